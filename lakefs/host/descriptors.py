"""Descriptors: copying and closing them, and the rest of a short gathered read or write.

close(2) can wait for the process that serves the file system.  `close_all` is for the caller's own files;
`close_later` is for descriptors that a peer sent, and never waits.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Thread
from typing import Final

from lakefs.errors import EngineBusy
from lakefs.ids import Buffer

CLOSER: Final = "lake-let-go"
"""The name of threads that run slow closes."""


def after(parts: Sequence[Buffer], count: int) -> list[Buffer]:
    """Return the parts that remain after their first `count` bytes; copies nothing."""
    left: list[Buffer] = []
    for part in parts:
        if count >= len(part):
            count -= len(part)
        else:
            left.append(memoryview(part)[count:] if count else part)
            count = 0
    return left


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that are no longer needed."""
    for descriptor in descriptors:
        os.close(descriptor)


def close_later(descriptors: Iterable[int]) -> None:
    """Close descriptors that a peer sent, without waiting.

    close(2) makes a file system flush, and a file system served by a process answers when that process does: a mount
    of the lake then stores what was written to the file, and waits for the engine.
    """
    others: list[int] = []
    for descriptor in descriptors:
        if is_memory(descriptor):
            os.close(descriptor)
        else:
            others.append(descriptor)
    if others:
        aside(partial(close_all, others))


def aside(close: Callable[[], None]) -> None:
    """Run a close that may be slow in a thread; run it here only if no thread can be started."""
    try:
        Thread(target=close, name=CLOSER, daemon=True).start()
    except RuntimeError:
        close()


def is_memory(descriptor: int) -> bool:
    """Return True for a file on tmpfs or hugetlbfs, memfds included; the kernel answers without asking a file
    system."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def is_cuttable(descriptor: int) -> bool:
    """Return True unless the file is memory sealed against shrinking: reads of a mapping of a cut file get SIGBUS."""
    try:
        return not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return True


def duplicates(descriptors: Iterable[int]) -> list[int]:
    """Return duplicates of all descriptors, or none.  EngineBusy if the limit of open files is reached."""
    copies: list[int] = []
    try:
        copies.extend(os.dup(descriptor) for descriptor in descriptors)
    except OSError as error:
        close_all(copies)
        raise EngineBusy("out of descriptors; try again, or raise the limit of open files") from error
    return copies
