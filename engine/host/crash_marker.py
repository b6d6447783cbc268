"""What a process leaves behind when a library ends it: a note by which the next opening distrusts the index.

LMDB ends the process (SIGABRT, SIGSEGV, SIGBUS) when a page of its file is not what another page says.  Without a note
the next start would meet the same page, and so would every one after it.  The fault handler writes the Python stacks
of all threads to the file `crash`; when they show that the index was being read, recovery builds it anew.

Rules kept here:
- Only a process that died of such a signal leaves a note; SIGKILL and power loss leave none.
- A note counts once: it is renamed to `crash.last` when the index has been rebuilt, and kept for whoever asks why.
- The fault handler is the process's own: where somebody else has enabled it, it is left alone.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from lakefs.errors import DiskFailed
from lakefs.ports import Disk

CRASH_PATH: Final = "crash"
LAST_CRASH_PATH: Final = "crash.last"
_IN_INDEX: Final = b"engine/tables/lmdb_index.py"
_READ_BYTES: Final = 1 << 20


@contextmanager
def noting_crashes(disk: Disk) -> Iterator[None]:
    """Have the fault handler write to the store's note during the block.  The store's lock is held.  DiskFailed."""
    if faulthandler.is_enabled():
        yield
        return
    path = disk.local_path(CRASH_PATH)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskFailed(f"cannot open {path}: {error.strerror}", subject=path) from error
    faulthandler.enable(descriptor, all_threads=True)
    try:
        yield
    finally:
        faulthandler.disable()
        note = os.fstat(descriptor)
        with suppress(FileNotFoundError):  # the folder may have been moved, and another store be in its place
            if not note.st_size and os.path.samestat(note, os.stat(path)):
                os.unlink(path)
        os.close(descriptor)


def died_in_index(disk: Disk) -> bool:
    """Whether the note says that a process died while it read the index."""
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
    """The note has been heeded."""
    disk.rename(CRASH_PATH, LAST_CRASH_PATH)
