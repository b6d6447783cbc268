"""The calls of several processes that share a folder: a `Place` with what programs do as a whole.

Each method opens, changes and closes, or keeps a handle in a slot.  The worker's `do` runs one step in the place of a
folder; a place and its slots last from step to step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tests.mount.place import Place, Result, outcome, pattern
from tests.mount.steps import Argument

READ_MAX: Final = 1 << 20
_places: Final[dict[str, SharedPlace]] = {}


class SharedPlace(Place):
    """One process's view of a folder that others change, too."""

    def append(self, path: str, key: int, size: int) -> Result:
        """Append with a handle that was opened for it: O_APPEND, and O_CREAT."""
        return self._within_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, lambda file: _written(file, key, size))

    def create_new(self, path: str, key: int, size: int) -> Result:
        """Make a file that must not exist, and write it: O_EXCL."""
        return self._within_open(path, os.O_WRONLY | os.O_EXCL | os.O_CREAT, lambda file: _written(file, key, size))

    def edit(self, path: str, offset: int, key: int, size: int) -> Result:
        """Change bytes in the middle of a file."""
        return self._within_open(path, os.O_RDWR, lambda file: os.pwrite(file, pattern(key, size), offset))

    def save(self, path: str, temporary: str, key: int, size: int) -> None:
        """Save as an editor does: a new file, fsync, renamed over the old one."""

        def write(file: int) -> Result:
            _written(file, key, size)
            os.fsync(file)
            return None

        self._within_open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, write)
        self.rename(temporary, path)

    def make_folders(self, path: str) -> None:
        """mkdir -p."""
        os.makedirs(self._at(path), exist_ok=True)

    def remove_all(self, path: str) -> None:
        """rm -r."""
        shutil.rmtree(self._at(path))

    def _within_open(self, path: str, flags: int, call: Callable[[int], Result]) -> Result:
        descriptor = os.open(self._at(path), flags | os.O_CLOEXEC, 0o644)
        try:
            done = call(descriptor)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        os.close(descriptor)
        return done

    def hold(self, slot: int, path: str, flags: int, key: int, size: int) -> Result:
        """Open a file that exists and keep it open; write at once, if `size` is not 0."""
        self.open(slot, path, flags)
        return self.pwrite(slot, 0, key, size) if size else "opened"

    def read_all(self, slot: int) -> Result:
        """Read all of an open file, past what this process's kernel kept of it."""
        return self._with(slot, _all_of)

    def drop(self) -> None:
        """Close all that is open, whatever that says."""
        with suppress(OSError):
            self.end()


def _written(file: int, key: int, size: int) -> int:
    return os.write(file, pattern(key, size))


def _all_of(file: int) -> bytes:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(file, READ_MAX, 0)


def do(folder: str, call: str, arguments: tuple[Argument, ...]) -> object:
    """Run one step in this process's place of a folder; return its outcome."""
    place = _places.setdefault(folder, SharedPlace(folder))
    return outcome(lambda: getattr(place, call)(*arguments))


def leave(folder: str) -> None:
    """Close all that this process has open in a folder, and forget the place."""
    place = _places.pop(folder, None)
    if place is not None:
        place.drop()
