"""The lock of a machine that has joined a lake: one `lake serve` serves its folders.

Where the names are on the machine, their lock says that.  A joined machine waits for the locks of its members, since
processes of a run that was killed may be ending there; so the processes that serve it exclude each other by a lock of
their own, `machine.lock` in each folder.  It is given up with the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import structlog

from engine.lake.machine import MACHINE_FILE, give_to_owner
from lakefs.errors import StoreLocked

LOCK_FILE: Final = "machine.lock"
_log: Final = structlog.get_logger(__name__)


@contextmanager
def machine_locked(folders: Sequence[Path]) -> Iterator[None]:
    """Keep other processes from serving these folders during the block.  StoreLocked if one does.

    Folders without a machine's record, and those that cannot be written to, are left out.
    """
    with ExitStack() as held:
        for folder in folders:
            if (folder / MACHINE_FILE).exists():
                _lock(folder, held)
        yield


def _lock(folder: Path, held: ExitStack) -> None:
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held.callback(os.close, descriptor)
        give_to_owner(folder, LOCK_FILE)
    except OSError as error:
        _log.warning("a folder of this machine could not be locked", folder=str(folder), reason=str(error))
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        told = f"{folder} is open in another process, which serves it; stop that one"
        raise StoreLocked(told, subject=str(folder)) from error
