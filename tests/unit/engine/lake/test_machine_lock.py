"""A machine that has joined a lake is served by one process, whichever of its folders the other one is given."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.lake.machine import MACHINE_FILE
from engine.lake.machine_lock import LOCK_FILE, machine_locked
from lakefs.errors import StoreLocked


def folders_in(place: Path, *names: str) -> list[Path]:
    found = [place / name for name in names]
    for folder in found:
        folder.mkdir()
        (folder / MACHINE_FILE).touch()
    return found


def test_folders_that_are_served_are_refused_until_that_has_ended(tmp_path: Path) -> None:
    first, second = folders_in(tmp_path, "first", "second")
    with machine_locked([first, second]):
        for others in ([second], [second, first]):
            with pytest.raises(StoreLocked, match="is open in another process"), machine_locked(others):
                pass
        assert stat.S_IMODE((first / LOCK_FILE).stat().st_mode) == 0o600
    with machine_locked([second]), machine_locked([first]):
        pass


def test_a_refused_start_holds_nothing(tmp_path: Path) -> None:
    first, second = folders_in(tmp_path, "first", "second")
    with machine_locked([second]):
        with pytest.raises(StoreLocked), machine_locked([first, second]):
            pass
        with machine_locked([first]):
            pass
    assert not [fd for fd in os.listdir("/proc/self/fd") if _is_lock(fd)]


def _is_lock(descriptor: str) -> bool:
    path = Path("/proc/self/fd", descriptor)
    return path.is_symlink() and path.readlink().name == LOCK_FILE


def test_folders_without_a_record_and_those_that_cannot_be_written_to_are_left_out(tmp_path: Path) -> None:
    (kept,) = folders_in(tmp_path, "kept")
    (kept / LOCK_FILE).mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    with machine_locked([kept, empty, tmp_path / "absent"]), machine_locked([kept, empty]):
        assert list(empty.iterdir()) == []
