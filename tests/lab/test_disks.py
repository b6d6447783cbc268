"""A store on NVMe and on persistent memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakefs.client.connect import connect
from lakefs.errors import LakeError
from tests.e2e.served import LAKE, Served
from tests.lab.hardware import ext4_on, found, load_modules, mounted, shell, wait_for
from tests.lab.kept_index import is_kept_over_stops_and_not_over_kills

pytestmark = [pytest.mark.slow, pytest.mark.lab("nvme", "nvdimm")]
MIB = 1 << 20


@pytest.fixture(scope="module")
def pmem() -> Path:
    load_modules("nfit", "nd_pmem", "dax_pmem", "device_dax", "ext4")
    found("pmem*")
    first, second = sorted(path.name for path in Path("/sys/bus/nd/devices").glob("namespace*.0"))[:2]
    shell(f"ndctl create-namespace -f -e {first} -m fsdax -M mem")
    shell(f"ndctl create-namespace -f -e {second} -m devdax -M mem")
    return found("pmem*")


@pytest.fixture
def fsdax(pmem: Path, tmp_path: Path) -> Iterator[Path]:
    with ext4_on(pmem, tmp_path / "pmem", "dax=always") as place:
        yield place


@pytest.fixture(scope="module")
def nvme() -> Path:
    load_modules("nvme", "ext4")
    return found("nvme0n1")


def test_an_index_in_a_file_on_persistent_memory_is_kept(fsdax: Path, tmp_path: Path) -> None:
    is_kept_over_stops_and_not_over_kills(tmp_path, fsdax / "hot-index", "file")


def test_an_index_in_persistent_memory_itself_is_kept(pmem: Path, tmp_path: Path) -> None:
    is_kept_over_stops_and_not_over_kills(tmp_path, found("dax*"), "DAX device")


def objects(count: int, size: int) -> dict[str, bytes]:
    return {f"lab/{size}-{number}": os.urandom(size) for number in range(count)}


@pytest.mark.parametrize("medium", ["nvme", "fsdax"])
def test_a_store_is_whole_behind_a_kill_and_a_clean_stop(
    medium: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if medium == "nvme":
        disk = request.getfixturevalue("nvme")
        with ext4_on(disk, tmp_path / "disk") as place:
            _whole(place)
    else:
        _whole(request.getfixturevalue("fsdax"))


def _whole(place: Path) -> None:
    served = Served(place)
    known = objects(30, 3_000) | objects(3, 5 * MIB)
    with connect(served.server) as client:
        client.create_bucket("lab")
        for name, content in known.items():
            client.put(name, content)
    for end in (served.kill, served.stop):
        end()
        served.start()
        with connect(served.server) as client:
            assert {name: bytes(client.get(name)) for name in known} == known
    assert served.stop() == 0
    done = subprocess.run([*LAKE, "fsck", "--data", str(served.data)], capture_output=True, text=True)
    assert done.returncode == 0, done


def test_when_the_disk_is_taken_away_puts_fail_and_what_was_acknowledged_is_there_when_it_comes_back(
    nvme: Path, tmp_path: Path
) -> None:
    with ext4_on(nvme, tmp_path / "disk") as place:
        served = Served(place)
        kept: dict[str, bytes] = {}
        with connect(served.server) as client:
            client.create_bucket("lab")
            for name, content in objects(20, 20_000).items():
                client.put(name, content)
                kept[name] = content
            slot = Path("/sys/class/nvme/nvme0/device").resolve()
            (slot / "remove").write_text("1")
            wait_for(lambda: not Path("/sys/block/nvme0n1").exists(), "the disk is still there")
            with pytest.raises(LakeError) as caught:
                for name, content in objects(50, 20_000).items():
                    client.put(name, content)
                    kept[name] = content
            assert type(caught.value).__name__ in ("DiskFailed", "StoreReadOnly"), repr(caught.value)
            with pytest.raises(LakeError) as caught:
                client.put("lab/later", b"x")
        status = served("status")
        assert "read-only" in status.text, status
        served.kill()
    Path("/sys/bus/pci/rescan").write_text("1")
    again = found("nvme*n1")
    with mounted(again, tmp_path / "disk"):
        served.start()
        with connect(served.server) as client:
            assert {name: bytes(client.get(name)) for name in kept} == kept
        assert served.stop() == 0
