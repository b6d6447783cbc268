"""One lake on several devices of a machine, as an operator starts, breaks and starts it again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from engine.process.names_place import open_local_names
from lakefs.ids import new_id16
from tests.e2e.served import WAIT_S, Served, lake
from tests.e2e.small_disk import tmpfs

DEVICE_BYTES: Final = 512 << 20
pytestmark = [pytest.mark.slow]


class ServedLake(Served):
    """A lake whose members lie in these folders."""

    def __init__(self, folder: Path, devices: list[Path], *options: str, start: bool = True) -> None:
        self.devices = devices
        super().__init__(folder, *options, started=start)

    @property
    def folders(self) -> list[Path]:
        """See `Served`."""
        return self.devices

    @property
    def data_options(self) -> list[str]:
        """See `Served`."""
        return [part for device in self.devices for part in ("--data", str(device))]

    def members(self, *numbers: int) -> list[int]:
        """Return the processes of these members, of the folders' numbers from 1 on."""
        sockets = {f"{self.socket}.{number}" for number in numbers}
        return [pid for pid, arguments in processes() if sockets & set(arguments)]

    def put(self, key: str, content: bytes) -> None:
        self.good("put", "-", f"bucket/{key}", stdin=content)

    def get(self, key: str) -> bytes:
        return self.good("cat", f"bucket/{key}").out


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield each process with its arguments."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                arguments = Path(entry.path, "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            yield int(entry.name), arguments


@contextmanager
def served(folder: Path, devices: list[Path], *options: str) -> Iterator[ServedLake]:
    """Serve a lake for the block; no process of it is left behind."""
    served = ServedLake(folder, devices, *options)
    try:
        yield served
    finally:
        assert served.process is not None
        if served.process.poll() is None:
            assert served.stop() == 0
        assert not served.members(*range(1, len(devices) + 1))


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    """Six file systems of their own."""
    with ExitStack() as mounted:
        found = []
        for number in range(1, 7):
            folder = tmp_path / f"device{number}"
            folder.mkdir()
            found.append(mounted.enter_context(tmpfs(folder, DEVICE_BYTES)) / "lake")
        yield found


def lose(device: Path) -> None:
    """Take a device away: its folder is an empty one of another file system then."""
    subprocess.run(["umount", "-l", str(device.parent)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", str(device.parent)], check=True)


def content(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def eventually(happens: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.1)


OBJECTS: Final = {"short": content(1, 100), "page": content(2, 70_000), "long": content(3, 9_000_001)}


def test_any_two_devices_are_lost_and_nothing_is(tmp_path: Path, devices: list[Path]) -> None:
    with served(tmp_path, devices) as lake_:
        assert lake_.printed[0].endswith("(6 members, protection 4+2)")
        for key, payload in OBJECTS.items():
            lake_.put(key, payload)
    for lost in (devices[0], devices[3]):
        lose(lost)
    shuffled = devices[3:] + devices[:3]
    with served(tmp_path, shuffled) as lake_:
        for key, payload in OBJECTS.items():
            assert lake_.get(key) == payload
        lake_.put("later", OBJECTS["long"][::-1])
        assert lake_.get("later") == OBJECTS["long"][::-1]


@pytest.mark.thorough
def test_two_members_are_killed_under_a_client_that_notices_nothing(tmp_path: Path, devices: list[Path]) -> None:
    with served(tmp_path, devices) as lake_:
        for number in range(4):
            lake_.put(f"before {number}", content(number, 3_000_000))
        for number in (2, 5):
            for pid in lake_.members(number):
                os.kill(pid, signal.SIGKILL)
            lake_.put(f"after {number}", content(100 + number, 3_000_000))
            for key in range(4):
                assert lake_.get(f"before {key}") == content(key, 3_000_000)
            assert lake_.get(f"after {number}") == content(100 + number, 3_000_000)
        eventually(lambda: len(lake_.members(2, 5)) == 2, "members that ended were not started again")


@pytest.mark.thorough
def test_all_processes_are_killed_and_what_was_answered_is_there(tmp_path: Path, devices: list[Path]) -> None:
    with served(tmp_path, devices) as lake_:
        for key, payload in OBJECTS.items():
            lake_.put(key, payload)
        for pid in lake_.members(*range(1, 7)):
            os.kill(pid, signal.SIGKILL)
        lake_.kill()
        eventually(lambda: not lake_.members(*range(1, 7)), "a member outlived its parent")
        lake_.start()
        for key, payload in OBJECTS.items():
            assert lake_.get(key) == payload


def test_members_end_when_their_parent_is_killed(tmp_path: Path, devices: list[Path]) -> None:
    with served(tmp_path, devices) as lake_:
        assert len(lake_.members(*range(1, 7))) == 6
        lake_.kill()
        eventually(lambda: not lake_.members(*range(1, 7)), "a member outlived its parent")


@pytest.mark.thorough
def test_a_new_device_becomes_a_member_only_when_it_is_meant_to(tmp_path: Path, devices: list[Path]) -> None:
    with served(tmp_path, devices[:5]) as lake_:
        lake_.put("long", OBJECTS["long"])
    with served(tmp_path, devices) as lake_:
        assert lake_.printed[0].endswith("(5 members, protection 4+2)")
        assert not devices[5].exists() or not list(devices[5].iterdir())
    with served(tmp_path, devices, "--new-devices") as lake_:
        assert lake_.printed[0].endswith("(6 members, protection 4+2)")
        assert lake_.get("long") == OBJECTS["long"]


@pytest.mark.thorough
def test_a_member_is_drained_and_removed_and_a_lost_one_is_removed(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(5)]
    with served(tmp_path, folders, "--protect", "2+1", "--accept-loss") as lake_:
        for key, payload in OBJECTS.items():
            lake_.put(key, payload)
        early = lake_("cluster", "remove", folders[1])
        assert "it has places in a table; drain it" in early.err
        lake_.good("cluster", "drain", folders[1])
        lake_.good("cluster", "drain", folders[1])
        eventually(lambda: lake_("cluster", "remove", folders[1]).code == 0, "it was not drained")
        for pid in lake_.members(3):
            os.kill(pid, signal.SIGKILL)
        lake_.good("cluster", "remove", folders[2], "--accept-loss")
        for key, payload in OBJECTS.items():
            assert lake_.get(key) == payload
        eventually(lambda: len(_members_of(lake_)) == 3, "a removed member is still shown")
        assert "names no member" in lake_("cluster", "drain", "ffff0000").err
        last = lake_("cluster", "drain", folders[-1])
        assert "3 members on 1 device have places, and 3 are needed; add another one first" in last.err


def _members_of(served: ServedLake) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(served.good("cluster", "status", "--json").out)["members"]
    return found


def refused(folder: Path, devices: list[Path], *options: str) -> str:
    """Start a lake that must not start; return its message."""
    folders = [part for device in devices for part in ("--data", str(device))]
    done = lake("serve", *folders, "--socket", folder / "s", "--s3", "off", "--admin", "off", *options)
    assert done.code not in (0, 70), done
    return done.err


def test_a_lake_that_one_device_would_harm_is_made_only_on_demand(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    message = refused(tmp_path, folders, "--protect", "2+1")
    assert "protection 2+1 needs 3 devices, and these 3 folders lie on 1" in message
    assert "not offered; choose one of" in refused(tmp_path, folders, "--protect", "3+3")
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is no folder" in refused(tmp_path, [folders[0], tmp_path / "file"])
    assert not any(folder.exists() for folder in folders)
    with served(tmp_path, folders, "--protect", "2+1", "--accept-loss") as lake_:
        lake_.put("long", OBJECTS["long"])
        assert lake_.get("long") == OBJECTS["long"]
        about = json.loads(lake_.good("status", "--json").out)
        assert [(each["folder"], each["serves"]) for each in about["folders"]] == [(str(f), True) for f in folders]
        lake_.good("kv", "set", "blocks", "--quota", "1G")
        assert "space blocks" in lake_.good("status").text
        into_itself = lake_("put", "-r", tmp_path, "bucket/self")
        assert into_itself.code == 2
        assert "data folder of the store" in into_itself.err
    assert "this lake was made with protection 2+1, which stays" in refused(tmp_path, folders, "--protect", "4+2")


@pytest.mark.thorough
def test_folders_that_belong_elsewhere_are_refused(tmp_path: Path) -> None:
    mine = [tmp_path / f"mine{number}" for number in range(2)]
    other = [tmp_path / f"other{number}" for number in range(2)]
    options = ("--protect", "1+1", "--accept-loss")
    for folders in (mine, other):
        with served(tmp_path, folders, *options):
            pass
    engine = Served(tmp_path)
    assert engine.stop() == 0
    assert "of another lake" in refused(tmp_path, [mine[0], other[0]])
    assert "is the store of one engine" in refused(tmp_path, [mine[0], engine.data])
    alone = lake("serve", "--data", mine[0], "--socket", tmp_path / "s", "--s3", "off", "--admin", "off")
    assert "of 2 copies of the names too few are here to know that none is newer" in alone.err
    for folder, part in ((mine[0], "a member"), (mine[0] / "names", "a copy of the names")):
        assert f"{part} of the lake" in lake("doctor", "--data", folder).text
    assert "given twice" in refused(tmp_path, [mine[0], mine[0]])


def test_a_first_start_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]

    async def make_names_alone() -> None:
        places = [folder / "names" for folder in folders[:2]]
        async with open_local_names(places, lake_id=new_id16(), protection_losses=1, is_new=True):
            pass

    for folder in folders:
        folder.mkdir()
    trio.run(make_names_alone)
    assert "protection 2+1 needs 3 devices" in refused(tmp_path, folders, "--protect", "2+1")
    with served(tmp_path, folders, "--protect", "2+1", "--accept-loss") as lake_:
        assert lake_.printed[0].endswith("(3 members, protection 2+1)")
        lake_.put("long", OBJECTS["long"])
        assert lake_.get("long") == OBJECTS["long"]


@pytest.mark.thorough
def test_a_copy_of_the_names_that_is_lost_is_given_up_by_the_very_words_of_the_refusal(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    with served(tmp_path, folders, "--protect", "2+1", "--accept-loss") as lake_:
        lake_.put("long", OBJECTS["long"])
    shutil.rmtree(folders[0])
    message = refused(tmp_path, folders)
    assert "of 2 copies of the names too few are here" in message
    word = message.split("start with: ")[1].split(";")[0]
    with served(tmp_path, folders, *word.split()) as lake_:
        assert lake_.get("long") == OBJECTS["long"]
    assert "--without takes the id of a copy" in refused(tmp_path, folders, "--without", "first")
