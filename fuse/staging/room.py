"""The room of a staging folder: its slots, its bounds, and long files that are emptied beside the loop.

A slot is a staging file and its sidecar.  Emptying a file of some GiB takes a second, most of it spent on the page
cache: nobody waits for that but who needs the room.

Rules kept here:
- A slot that is emptied belongs to no file: its sidecar is empty already.
- Its bytes count no more from the moment on that its file gave it up.  So a disk that is full while files are emptied
  is not full yet: `with_room` empties one after the other at once, and tries again after each.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from fuse.staging.sidecar import SidecarFile
from lakefs.errors import InvalidArgument, LakeError, LocalFileError, StoreFull

T = TypeVar("T")
APPEND_FROM_BYTES: Final = 256 << 10
"""Native threads append to files from this length on: most that stay shorter are closed before that has paid."""
RANGES_MAX: Final = 1 << 20
"""Most ranges over all files of a folder, 16 bytes each: 16 MiB; random 4 KiB writes need at least 4 GiB for that."""


@dataclass(frozen=True)
class Slot:
    """A staging file and its sidecar, both open."""

    stem: str
    descriptor: int
    sidecar: SidecarFile


class Slots(Protocol):
    """Gives slots to staged files, and takes them back."""

    def another(self, slot: Slot) -> Slot | None:
        """Return an empty slot for the file of this one, if emptying this one takes long; else None."""

    def release(self, slot: Slot, *, keep: bool) -> None:
        """Take a slot back, empty it unless it is to be kept as it is."""


class Emptying:
    """A slot that is being emptied: in a thread, or by who needs the room first."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.is_empty = False
        """True once it has been; False after `run` too if that failed."""
        self._lock = threading.Lock()

    def run(self) -> None:
        """Empty it, or wait until another thread has.  Takes as long as that does; a failure is not raised."""
        with self._lock:
            if not self.is_empty:
                try:
                    os.ftruncate(self.slot.descriptor, 0)
                except OSError:
                    return
                self.is_empty = True


class AppendedFile(Protocol):
    """A file that native threads append to (`fuse.staging.appending`)."""

    def take_over(self) -> None:
        """Note what they have written by now."""

    def end_appends(self) -> None:
        """Let them write no more, and note what they have written."""


class Room:
    """Shared by the files of one folder: the limit of staged bytes, and the staged bytes and ranges of all."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.range_count = 0
        self.emptying: list[Emptying] = []
        self.append_from_bytes = APPEND_FROM_BYTES
        self.lent_bytes = 0
        """Bytes that native threads may append and, as far as is known, have not."""
        self.appended: list[AppendedFile] = []

    @property
    def left_bytes(self) -> int:
        """Number of bytes that may still be staged, or lent."""
        return self.limit_bytes - self.used_bytes - self.lent_bytes

    def with_room(self, call: Callable[[], T]) -> T:
        """Make a call that writes to the folder.  If the disk is full while files are emptied: again, after that.

        The loop waits for one file after the other, as few as it takes.
        """
        tried: list[Emptying] = []
        while True:
            try:
                return call()
            except OSError as error:
                waiting = [each for each in self.emptying if not each.is_empty and each not in tried]
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not waiting:
                    raise
                tried.append(waiting[0])
                waiting[0].run()

    def reserve(self, name: str, byte_count: int, range_count: int) -> None:
        """Raise StoreFull unless that many more bytes and ranges may be staged; what is lent is given back for them."""
        if byte_count > self.left_bytes:
            for file in list(self.appended):
                file.end_appends()
        if self.used_bytes + byte_count > self.limit_bytes:
            raise StoreFull(
                f"{name}: the staging folder {self.path} is at its limit of {self.limit_bytes} bytes for what is not "
                "stored yet; close or sync files that are being written, or mount with a larger limit",
                subject=name,
            )
        if range_count > 0 and self.range_count + range_count > RANGES_MAX:
            raise StoreFull(
                f"{name}: bytes were written at more than {RANGES_MAX} places that the store does not have yet "
                f"(staging folder {self.path}); sync or close files that are being written",
                subject=name,
            )

    def failure(self, error: OSError, name: str) -> LakeError:
        """Return the error to raise for an OSError of the folder's file system."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(
                f"{name}: the disk of the staging folder {self.path} is full; make room there, or mount with a staging "
                "folder elsewhere",
                subject=name,
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return LocalFileError(
                f"{name}: the mount has no descriptors left ({error.strerror}); close files, or raise"
                " the limit of open files of its process",
                subject=name,
            )
        if error.errno == errno.EFBIG:
            return InvalidArgument(f"{name}: longer than a file in the staging folder {self.path} may be", subject=name)
        return LocalFileError(f"{name}: staging folder {self.path}: {error.strerror}", subject=name)
