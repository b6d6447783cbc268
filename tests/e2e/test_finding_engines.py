"""The engine that a client without an address finds, and the store that an engine beside the system's makes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.fresh_machine import FreshMachine, fresh_machine, python
from tests.e2e.mount_rig import NOBODY
from tests.e2e.served import LAKE

pytestmark = pytest.mark.thorough

NO_PORTS = ("--s3", "off", "--admin", "off")
SYSTEM = "/run/lake/lake.sock"
ASKS = """
import lakefs, trio
with lakefs.connect() as lake:
    print([bucket.name for bucket in lake.buckets()])
async def main():
    async with lakefs.connect_trio() as lake:
        print([bucket.name for bucket in await lake.buckets()])
trio.run(main)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[FreshMachine]:
    """A machine whose system engine has the bucket `system`."""
    with fresh_machine() as made:
        yield made


@pytest.fixture(scope="module")
def system(machine: FreshMachine) -> Iterator[FreshMachine]:
    """The machine while its system engine serves the group of the user without rights."""
    with machine.begun("serve", "--socket-group", "nogroup", *NO_PORTS):
        machine.lake("bucket", "create", "system")
        yield machine


def own_socket(machine: FreshMachine) -> str:
    return f"{machine.home(NOBODY)}/.local/share/lake/lake.sock"


def test_where_no_engine_is_one_sentence_names_what_was_tried(machine: FreshMachine) -> None:
    told = machine.lake("ls", uid=NOBODY)
    assert told.code == 69
    assert told.err == (
        f"lake: no engine was found: your own socket {own_socket(machine)} is not there, and the system's socket "
        f"{SYSTEM} is not there; start one with: lake serve, or name one with --server or LAKE_SERVER\n"
    )
    assert SYSTEM in machine.lake("ls").err


def test_a_system_engine_for_root_alone_is_told_and_no_store_is_made_beside_it(machine: FreshMachine) -> None:
    with machine.begun("serve", *NO_PORTS):
        told = machine.lake("ls", uid=NOBODY)
        assert told.code == 77
        assert f"{SYSTEM} may not be used by this user: only root may; start" in told.err
        refused = machine.lake("serve", *NO_PORTS, uid=NOBODY)
        assert (refused.code, "system's engine" in refused.err, "--data" in refused.err) == (2, True, True), refused
    assert list(machine.home(NOBODY).iterdir()) == []


def test_the_system_s_engine_is_found_by_every_kind_of_client(system: FreshMachine) -> None:
    assert system.lake("ls", uid=NOBODY).text == "system\n"
    asked = system.run(*python(ASKS), uid=NOBODY)
    assert asked.lines == ["['system']"] * 2, asked
    with system.begun("gateway", "--s3", "127.0.0.1:0", "--admin", "off", uid=NOBODY) as printed:
        assert f"engine  unix:{SYSTEM}" in printed
    doctor = system.lake("doctor", uid=NOBODY)
    assert (doctor.code, f"unix:{SYSTEM}: serving" in doctor.text) == (0, True), doctor


@pytest.mark.fuse
def test_a_mount_finds_the_system_s_engine(system: FreshMachine) -> None:
    place = system.home(NOBODY) / "mnt"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    command = system.command(*LAKE, "mount", "--foreground", place, uid=NOBODY)
    with subprocess.Popen(
        command, env=system.environment(NOBODY), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as mount:
        assert mount.stdout is not None
        assert str(place) in mount.stdout.readline()
        assert system.run("ls", place, uid=NOBODY).text == "system\n"
        mount.terminate()
        assert mount.wait(60) == 0


def test_a_user_not_in_the_group_is_told_which_one_to_join(system: FreshMachine) -> None:
    told = system.lake("ls", uid=NOBODY, gid=12)
    assert told.code == 77
    assert "join the group nogroup" in told.err
    assert "your own socket" in told.err


def test_an_engine_of_one_s_own_is_taken_before_the_system_s(system: FreshMachine) -> None:
    own = system.home(NOBODY) / ".local/share/lake"
    with system.begun("serve", "--data", own, *NO_PORTS, uid=NOBODY):
        system.lake("bucket", "create", "own", uid=NOBODY)
        assert system.run(*python(ASKS), uid=NOBODY).lines == ["['own']"] * 2
    assert system.lake("ls", uid=NOBODY).text == "system\n"


def test_an_engine_that_is_named_and_does_not_answer_is_never_replaced_by_another(system: FreshMachine) -> None:
    absent = str(system.folder / "absent")
    for args, settings in ((("--server", f"unix:{absent}"), {}), ((), {"LAKE_SOCKET": absent, "LAKE_SERVER": ""})):
        told = system.lake(*args, "ls", uid=NOBODY, settings=settings)
        assert (told.code, absent in told.err) == (69, True), told
