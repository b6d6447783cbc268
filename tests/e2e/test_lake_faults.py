"""Mistakes and faults around the start of a lake on several devices: each ends with a clear word, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from engine.lake_upkeep.lake_upkeep import LOOK_INTERVAL_S
from lakefs.limits import MIB
from tests.e2e.served import Finished, lake
from tests.e2e.small_disk import tmpfs
from tests.e2e.test_lake_on_devices import (
    DEVICE_BYTES,
    OBJECTS,
    ServedLake,
    content,
    eventually,
    processes,
    refused,
    served,
)

pytestmark = [pytest.mark.slow]
MAKE: Final = ("--protect", "2+1", "--accept-loss")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of a lake at 2+1 that has an object; each test leaves it whole, and stopped.  The last has no names."""
    place = tmp_path_factory.mktemp("made")
    folders = [place / f"d{number}" for number in range(4)]
    with served(place, folders, *MAKE) as lake_:
        lake_.put("long", OBJECTS["long"])
    return folders


def start(folders: list[Path], socket: Path, *options: str) -> Finished:
    """Start a lake that has to end by itself."""
    given = [part for folder in folders for part in ("--data", str(folder))]
    return lake("serve", *given, "--socket", socket, "--s3", "off", "--admin", "off", *options)


def status_of(lake_: ServedLake) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lake_.good("cluster", "status", "--json").out)
    return found


def is_healed(lake_: ServedLake) -> bool:
    return bool(status_of(lake_)["walker"]["healed"])


def snapshot(folders: list[Path]) -> dict[str, bytes]:
    """Return all files of folders, with their content."""
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


# --- second starts -----------------------------------------------------------------------------------------


def test_a_second_start_with_another_protection_is_refused_and_changes_nothing(
    tmp_path: Path, made: list[Path]
) -> None:
    before = snapshot(made)
    for asked in ("4+2", "1+1"):
        for options in ((), ("--accept-loss",), ("--new-devices",)):
            done = start(made, tmp_path / "s", "--protect", asked, *options)
            assert done.code == 78, done
            assert f"was made with protection 2+1, which stays, and {asked} is asked for" in done.err
    assert "choose one of 1+0" in refused(tmp_path, made, "--protect", "2+2")
    assert snapshot(made) == before
    with served(tmp_path, made, "--protect", "2+1") as lake_:
        assert lake_.get("long") == OBJECTS["long"]


@pytest.mark.thorough
def test_folders_may_be_given_in_any_order_at_other_paths_or_without_one(tmp_path: Path, made: list[Path]) -> None:
    moved = [folder.rename(tmp_path / f"moved{number}") for number, folder in enumerate(made)]
    with served(tmp_path, moved[::-1]) as lake_:
        assert lake_.printed[0].endswith("(4 members, protection 2+1)")
        assert lake_.get("long") == OBJECTS["long"]
        assert {each["folder"] for each in status_of(lake_)["folders"]} == set(map(str, moved))
    with served(tmp_path, moved[:3]) as lake_:
        assert lake_.printed[0].endswith("(3 members, protection 2+1)")
        assert lake_.get("long") == OBJECTS["long"]
        assert [each["up"] for each in status_of(lake_)["members"]].count(False) == 1
        lake_.put("meanwhile", OBJECTS["page"])
    with served(tmp_path, moved) as lake_:
        eventually(lambda: is_healed(lake_), "what the left out one missed is not made up for")
        assert lake_.get("meanwhile") == OBJECTS["page"]
    for folder, place in zip(moved, made, strict=True):
        folder.rename(place)


def test_a_lake_is_served_once_and_an_empty_folder_too_many_is_named(tmp_path: Path, made: list[Path]) -> None:
    more = tmp_path / "more"
    with served(tmp_path, [*made, more]) as lake_:
        assert lake_.printed[0].endswith("(4 members, protection 2+1)")
        assert "To make it a new member: lake cluster add DIR" in lake_.good("status").text
        for folders in (made, made[:1], made[::-1]):
            done = start(folders, tmp_path / "other")
            assert done.code == 75, done
            assert "is open in another process" in done.err
        done = start(made[3:], tmp_path / "other")
        assert (done.code, "give all --data folders of the lake" in done.err) == (78, True), done
        assert lake_.get("long") == OBJECTS["long"]
        assert all(each["serves"] and not each["restarts"] for each in status_of(lake_)["folders"] if each["member"])
    assert not more.exists() or not list(more.iterdir())


@pytest.mark.thorough
def test_the_folder_of_one_member_is_no_lake_by_itself(tmp_path: Path, made: list[Path]) -> None:
    with_names, without = start(made[:1], tmp_path / "s"), start(made[3:], tmp_path / "s")
    assert (with_names.code, without.code) == (78, 78)
    assert "of 2 copies of the names too few are here" in with_names.err
    assert "the names of this lake lie on other devices than these" in without.err
    record = (made[3] / "machine.json").rename(tmp_path / "machine.json")
    alone = start(made[3:], tmp_path / "s")
    assert (alone.code, "and is no lake by itself" in alone.err) == (78, True), alone
    record.rename(made[3] / "machine.json")
    with served(tmp_path, made) as lake_:
        assert lake_.get("long") == OBJECTS["long"]


# --- the first start ---------------------------------------------------------------------------------------


def _names_are_made(folder: Path) -> bool:
    return (folder / "d0" / "names" / "superblock").exists()


def _a_member_is_made(folder: Path) -> bool:
    return any((folder / f"d{number}" / "superblock").exists() for number in range(3))


def _all_members_are_made(folder: Path) -> bool:
    return all((folder / f"d{number}" / "superblock").exists() for number in range(3))


MOMENTS: Final[dict[str, Callable[[Path], bool]]] = {
    "at once": lambda _: True,
    "folders": lambda folder: (folder / "d2").exists(),
    "names": _names_are_made,
    "first member": _a_member_is_made,
    "last member": _all_members_are_made,
    "first table": lambda folder: '"is_made":true' in _text(folder / "d0" / "machine.json"),
}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=[] if each == "names" else [pytest.mark.thorough]) for each in MOMENTS]
)
def test_a_first_start_that_is_interrupted_is_gone_on_with(tmp_path: Path, moment: str) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    first = ServedLake(tmp_path, folders, *MAKE, start=False)
    process = first.begin_to_serve()
    while not MOMENTS[moment](tmp_path):
        assert process.poll() is None
        time.sleep(0.002)
    by_python = (1, -signal.SIGINT) if moment == "at once" else ()  # the interpreter has not come to `lake` yet
    assert first.interrupt() in (0, 130, *by_python)
    sockets = {f"{first.socket}.{number}" for number in (1, 2, 3)}
    assert not [pid for pid, words in processes() if sockets & set(words)], "a member outlived the interrupted start"
    with served(tmp_path, folders, *MAKE) as lake_:
        assert lake_.printed[0].endswith("(3 members, protection 2+1)")
        lake_.put("long", OBJECTS["long"])
        assert lake_.get("long") == OBJECTS["long"]
        assert len(status_of(lake_)["members"]) == 3


# --- copies, and devices from an earlier time --------------------------------------------------------------


@pytest.mark.thorough
def test_a_copy_of_a_members_folder_is_named_and_not_served(tmp_path: Path, made: list[Path]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made[3], copy)
    for folders in ([*made[:3], copy], [*made, copy]):
        with served(tmp_path, folders) as lake_:
            assert "is a copy of a member of the lake" in lake_.good("cluster", "status").text
            found = {each["folder"]: each["serves"] for each in status_of(lake_)["folders"]}
            assert found == {str(folder): folder != copy for folder in folders}
            assert lake_.get("long") == OBJECTS["long"]
            if folders[3] != copy:
                eventually(lambda: is_healed(lake_), "what the member missed is not made up for")


def put_back(folder: Path, earlier: Path) -> None:
    """Give a folder the content of an earlier time, with its own inodes, as a snapshot of its device would."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.name != "lock":
            path.unlink()
    shutil.copytree(earlier, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock"))


@pytest.mark.thorough
def test_a_device_that_was_rolled_back_while_the_lake_was_down_is_found_out_and_healed(
    tmp_path: Path, made: list[Path]
) -> None:
    later: dict[str, bytes] = {}
    shutil.copytree(made[3], tmp_path / "earlier")
    with served(tmp_path, made) as lake_:
        looked_at = time.monotonic() + LOOK_INTERVAL_S + 1
        while time.monotonic() < looked_at:
            key = f"later {len(later)}"
            later[key] = content(len(later), 1_000_000)
            lake_.put(key, later[key])
    put_back(made[3], tmp_path / "earlier")
    with served(tmp_path, made) as lake_:
        told = "came back as it was earlier, and is being compared with the others"
        eventually(lambda: told in lake_.good("status").text, "it was not noticed")
        for key, payload in later.items():
            assert lake_.get(key) == payload
        eventually(lambda: is_healed(lake_) and told not in lake_.good("status").text, "it was not healed")
        report = json.loads(lake_.good("fsck", "--json").out)
        assert (report["damage"], report["notes"]) == (0, 0), report


# --- a smaller device --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_device_without_room_for_what_is_made_anew_is_refused_and_a_smaller_one_is_named(tmp_path: Path) -> None:
    with ExitStack() as mounted:
        places = [tmp_path / f"device{number}" for number in range(3)]
        for place in places:
            place.mkdir()
        devices = [mounted.enter_context(tmpfs(place, DEVICE_BYTES)) / "lake" for place in places]
        with served(tmp_path, devices, "--protect", "2+1") as lake_:
            lake_.put("long", content(1, 60 * MIB))
            for device in devices[:2]:
                _leave(device.parent, 8 * MIB)
            lost, where = devices[2], devices[2].parent
            [member] = [each["member"] for each in status_of(lake_)["folders"] if each["folder"] == str(lost)]
            subprocess.run(["umount", "-l", str(where)], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12M", "none", str(where)], check=True)
            for pid in lake_.members(3):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: not _is_up(lake_, member), "a member serves without its device")
            done = lake_("cluster", "replace", member, lost)
            assert "12.0 MiB free and the other members" in done.err
            assert "too little; give a larger device" in done.err
            assert done.code not in (0, 70)
            assert not lost.exists() or not list(lost.iterdir())
            assert member in [each["id"] for each in status_of(lake_)["members"]]
            subprocess.run(["mount", "-o", "remount,size=128M", str(where)], check=True)
            assert "384.0 MiB less than the one that it replaces" in lake_.good("cluster", "replace", member, lost).err
            eventually(lambda: _is_replaced(lake_, member), "the smaller device is not used")
            assert lake_.get("long") == content(1, 60 * MIB)


def _leave(place: Path, left_bytes: int) -> None:
    """Let other files take the room of a file system, up to so much."""
    with (place / "other").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(place).free - left_bytes)


def _is_up(lake_: ServedLake, member: str) -> bool:
    return any(each["up"] for each in status_of(lake_)["members"] if each["id"] == member)


def _is_replaced(lake_: ServedLake, member: str) -> bool:
    members = status_of(lake_)["members"]
    return member not in [each["id"] for each in members] and all(each["up"] and each["places"] for each in members)
