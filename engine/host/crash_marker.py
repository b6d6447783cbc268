"""The crash note: a file by which the start after a fatal signal knows that the index must be rebuilt.

LMDB ends the process (SIGABRT, SIGSEGV, SIGBUS) when a page of its file contradicts another.  Without a note, every
later start would meet the same page.  The fault handler writes the Python stacks of all threads to the file `crash`; if
they show that the index was being read, recovery rebuilds it.

Rules kept here:
- Only a process that died of such a signal leaves a note; SIGKILL and power loss leave none.
- A note counts once: when the index has been rebuilt, it is renamed to `crash.last` and kept for people.
- A process has one fault handler: if other code has enabled it, it is not changed.
"""

from __future__ import annotations

import errno
import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog

from lakefs.errors import DiskFailed
from lakefs.ports import Disk

CRASH_PATH: Final = "crash"
LAST_CRASH_PATH: Final = "crash.last"
_IN_INDEX: Final = b"engine/tables/lmdb_index.py"
_READ_BYTES: Final = 1 << 20
_log: Final = structlog.get_logger(__name__)


@contextmanager
def noting_crashes(disk: Disk) -> Iterator[None]:
    """Let the fault handler write to the store's note during the block.  The store's lock is held.  DiskFailed.

    Where a full disk leaves no room for the file, the store is opened without it, and a warning is logged.
    """
    if faulthandler.is_enabled():
        yield
        return
    path = disk.local_path(CRASH_PATH)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _log.warning("no room for the file that a crash is noted in", path=path)
            yield
            return
        raise DiskFailed(f"cannot open {path}: {error.strerror}", subject=path) from error
    faulthandler.enable(descriptor, all_threads=True)
    try:
        yield
    finally:
        faulthandler.disable()
        note = os.fstat(descriptor)
        with suppress(OSError):  # the folder may have been moved, or replaced by another store's
            if not note.st_size and os.path.samestat(note, os.stat(path)):
                os.unlink(path)
        os.close(descriptor)


def died_in_index(disk: Disk) -> bool:
    """Return True if the note shows that a process died while it used the index."""
    if not disk.exists(CRASH_PATH):
        return False
    file = disk.open(CRASH_PATH, read_only=True)
    try:
        note = bytearray(min(file.size(), _READ_BYTES))
        file.pread_into(memoryview(note), 0)
    finally:
        file.close()
    return _IN_INDEX in note


def set_aside(disk: Disk) -> None:
    """Rename the note, after the index has been rebuilt."""
    disk.rename(CRASH_PATH, LAST_CRASH_PATH)
