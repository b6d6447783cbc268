"""The end of all rights that names have given to heads, kept for the process that opens them next on this machine.

    last_end    when all rights of the process before end, on the clock of both; None: nobody knows
    begin       a new record; from then on `keep` is called before a right leaves the process

A process that was killed cannot say until when heads may use their stamps.  Its record does: the next process waits for
that end, and not for the longest right there is.  A record lies in /dev/shm, which is memory: it outlives a process,
and no boot, and writing it waits for no device.  `docs/format.md` has its layout.

Rules kept here:
- A record counts only for the opening of the store that follows the one that wrote it, in the same boot of the machine
  and the same time namespace: all else is unknown, and whoever opens the store waits for the longest right.
- A record is made whole and then renamed into its place.  Its end, one aligned word, is written by one instruction.
- Files of others, and files that others may write, are not read.  Without a place nothing is kept.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import stat
import struct
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import structlog

from engine.host.client_files import MEMORY_FILE_SYSTEMS
from engine.superblock.superblock import Superblock
from lakefs.host.file_systems import file_system_of
from lakefs.ids import BootId
from lakefs.layout import Layout
from lakefs.limits import PAGE_BYTES

GIVEN_RIGHTS: Final = Layout(
    "given rights",
    64,
    [
        ("end_ns", "Q"),
        ("magic", "8s"),
        ("format_version", "I"),
        ("reserved", "4s"),
        ("boot_id", "16s"),
        ("machine_boot_id", "16s"),
        ("time_namespace", "Q"),
    ],
)
_END: Final = struct.Struct("<Q")
_HEADER: Final = GIVEN_RIGHTS.offset_of("magic")
_MAGIC: Final = b"LAKERGHT"
_VERSION: Final = 1
_NS: Final = 1e9
_MEMORY_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - the record of another user is neither read nor replaced
_MACHINE_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE: Final = Path("/proc/self/ns/time")
_log: Final = structlog.get_logger(__name__)


class RightsRecord(Protocol):
    """The record of an open store."""

    def keep(self, end: float) -> None:
        """Note that no right lasts beyond `end`, which is never less than before."""
        ...

    def remove(self) -> None:
        """Forget the record: no right is left, and none is given any more."""
        ...


class GivenRights(Protocol):
    """Where records are kept.  Blocks for no device."""

    def last_end(self, before: Superblock) -> float | None:
        """Return the end that the last process kept which had this store open; None if that is not known."""
        ...

    def begin(self, opened: Superblock, end: float) -> RightsRecord:
        """Begin the record of an opening, in which no right lasts beyond `end` so far."""
        ...


class _NoRecord:
    def keep(self, end: float) -> None:
        """See `RightsRecord`."""

    def remove(self) -> None:
        """See `RightsRecord`."""


class NothingKept:
    """`GivenRights` where there is no place for it."""

    def last_end(self, before: Superblock) -> float | None:
        """See `GivenRights`."""
        return None

    def begin(self, opened: Superblock, end: float) -> RightsRecord:
        """See `GivenRights`."""
        return _NoRecord()


NOTHING_KEPT: Final = NothingKept()


class RightsInMemory:
    """`GivenRights` in the memory of this machine; both processes have one clock, and the moments are on it."""

    def __init__(self, folder: Path = _MEMORY_FOLDER) -> None:
        self._folder = folder

    def last_end(self, before: Superblock) -> float | None:
        """See `GivenRights`."""
        try:
            page = _read(self._path(before))
            header = _packed(BootId(before.boot_before))[_HEADER:]
        except OSError:
            return None
        (end_ns,) = _END.unpack_from(page)
        return end_ns / _NS if page[_HEADER : GIVEN_RIGHTS.size] == header else None

    def begin(self, opened: Superblock, end: float) -> RightsRecord:
        """See `GivenRights`."""
        path = self._path(opened)
        try:
            return _Record(path, _packed(opened.boot_id), end)
        except OSError as error:
            _log.warning("a restart will wait a second for rights of heads", path=str(path), reason=error.strerror)
            return _NoRecord()

    def _path(self, superblock: Superblock) -> Path:
        return self._folder / f"lake-rights-{superblock.store_id.hex()}"


class _Record:
    """A record that is mapped.  OSError if it cannot be made."""

    def __init__(self, path: Path, packed: bytes, end: float) -> None:
        self._path = path
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if file_system_of(descriptor) not in MEMORY_FILE_SYSTEMS:
                raise OSError(errno.EOPNOTSUPP, "it is not in memory")
            os.write(descriptor, packed.ljust(PAGE_BYTES, b"\0"))  # so that the mapping has its page
            self._words = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")
            self.keep(end)
            os.rename(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def keep(self, end: float) -> None:
        """See `RightsRecord`."""
        self._words[0] = math.ceil(end * _NS) if end > 0 else 0

    def remove(self) -> None:
        """See `RightsRecord`."""
        with suppress(OSError):
            self._path.unlink()


def _packed(boot: BootId) -> bytes:
    """Return a record of an opening of a store, now and here, without its end.  OSError."""
    machine_boot = uuid.UUID(_MACHINE_BOOT.read_text().strip()).bytes
    time_namespace = 0
    with suppress(FileNotFoundError):  # a kernel before 5.6
        time_namespace = _TIME_NAMESPACE.stat().st_ino
    return GIVEN_RIGHTS.pack(0, _MAGIC, _VERSION, bytes(4), boot, machine_boot, time_namespace)


def _read(path: Path) -> bytes:
    """Return the bytes of a record that nobody else may have written.  OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it may be another user's")
        page = os.pread(descriptor, PAGE_BYTES, 0)
    finally:
        os.close(descriptor)
    if len(page) != PAGE_BYTES:
        raise OSError(errno.EIO, "it is cut")
    return page
