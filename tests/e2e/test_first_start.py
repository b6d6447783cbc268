"""The first `lake serve` on a machine: it works without preparation, and one that fails leaves nothing."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fresh_machine import FreshMachine, fresh_machine
from tests.e2e.mount_rig import NOBODY
from tests.e2e.served import lake
from tests.e2e.small_disk import tmpfs

NO_PORTS = ("--s3", "off", "--admin", "off")


@pytest.fixture(scope="module")
def machine() -> Iterator[FreshMachine]:
    """One machine for the module: each test leaves it without an engine."""
    with fresh_machine() as made:
        yield made


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_command_of_root_serves_and_its_socket_s_folder_is_root_s_alone(machine: FreshMachine) -> None:
    with machine.begun("serve") as printed:
        assert "listen  unix:/run/lake/lake.sock" in printed
        assert (mode_of(machine.path("/run/lake")), mode_of(machine.path("/run/lake/lake.sock"))) == (0o700, 0o600)
        assert machine.lake("bucket", "create", "bkt").code == 0
        assert machine.lake("ls").text == "bkt\n"
    assert not machine.path("/run/lake").exists()
    assert machine.path("/var/lib/lake/superblock").exists()


def test_the_socket_s_folder_is_open_to_the_socket_s_group_and_nobody_else(machine: FreshMachine) -> None:
    with machine.begun("serve", "--socket-group", "nogroup", *NO_PORTS):
        folder = machine.path("/run/lake")
        assert (mode_of(folder), folder.stat().st_gid) == (0o750, NOBODY)
        assert machine.lake("ls", uid=NOBODY).code == 0
        refused = machine.lake("ls", uid=NOBODY, gid=12)
        assert (refused.code, "join the group nogroup" in refused.err) == (77, True), refused


@pytest.mark.parametrize(
    ("options", "code", "existing"),
    [(("--admin", "TAKEN"), 71, ()), (("--hot-index", "/nowhere/index"), 78, ("journal", "mine"))],
)
def test_a_first_start_that_fails_leaves_nothing_but_what_was_there(
    folder: Path, options: tuple[str, ...], code: int, existing: tuple[str, ...]
) -> None:
    data = folder / "deep" / "store"
    for name in existing:
        (data / name).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        given = [option.replace("TAKEN", taken) for option in options]
        done = lake("serve", "--data", data, "--socket", folder / "run" / "s", *NO_PORTS, *given)
    assert (done.code, given[-1] in done.err) == (code, True), done
    assert [path.name for path in folder.iterdir()] == (["deep"] if existing else [])
    assert sorted(path.name for path in data.rglob("*")) == list(existing)


def test_a_first_start_on_a_full_disk_leaves_nothing(folder: Path) -> None:
    with tmpfs(folder, 4096) as disk:
        done = lake("serve", "--data", disk / "store", "--socket", folder / "s", *NO_PORTS)
        assert (done.code, "full" in done.err) == (74, True), done
        assert list(disk.iterdir()) == []


def test_a_start_that_fails_leaves_a_store_that_was_there(folder: Path) -> None:
    data = folder / "store"
    assert lake("bucket", "create", "bkt", "--data", data).code == 0
    before = {path.name for path in data.rglob("*")}
    serve = ("serve", "--data", data, "--socket", folder / "s", *NO_PORTS)
    assert lake(*serve, "--hot-index", "/nowhere/x").code == 78
    assert {path.name for path in data.rglob("*")} >= before - {"crash"}

    (data / "superblock").unlink()
    kept = {path: path.read_bytes() for path in data.rglob("*") if path.is_file() and path.name != "lock"}
    assert lake(*serve).code == 1
    assert {path: path.read_bytes() for path in kept} == kept
    (data / "superblock.copy").unlink()
    kept.pop(data / "superblock.copy")
    assert lake(*serve).code == 1
    assert {path: path.read_bytes() for path in kept} == kept


def test_doctor_names_the_first_thing_that_keeps_lake_serve_from_starting_and_leaves_nothing(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    settings = folder / "lake.toml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        settings.write_text(
            f'data = "{folder}/a/store"\nsocket = "{folder}/file/s"\ns3 = "{taken}"\nadmin = "127.0.0.1:0"\n'
        )
        told = lake("doctor", "--config", settings)
    assert told.code == 78
    assert told.lines[-1].startswith("first failure: socket folder: ")
    assert told.lines[-1].endswith(f"{folder}/file is no folder; choose another place with --socket PATH")
    failed = [line.split("  ")[1].strip() for line in told.lines if line.startswith("fail")]
    assert failed == ["socket folder", "S3 port"]
    settings.write_text(f'data = "{folder}/a/store"\nsocket = "{folder}/b/s"\ns3 = "off"\nadmin = "off"\n')
    good = lake("doctor", "--config", settings, "--json")
    assert (good.code, json.loads(good.out)["first_failure"]) == (0, None), good
    assert sorted(path.name for path in folder.iterdir()) == ["file", "lake.toml"]
