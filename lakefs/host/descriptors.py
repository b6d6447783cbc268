"""Descriptors: copied, closed, and what is left to do after a short gathered read or write.

close(2) can wait for whoever serves the file system.  `close_all` is for our own files, `close_later` for descriptors
that a peer sent: it never waits.
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
"""The name of threads that close what may take its time."""


def after(parts: Sequence[Buffer], count: int) -> list[Buffer]:
    """What is left of the parts behind their first `count` bytes; nothing is copied."""
    left: list[Buffer] = []
    for part in parts:
        if count >= len(part):
            count -= len(part)
        else:
            left.append(memoryview(part)[count:] if count else part)
            count = 0
    return left


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)


def close_later(descriptors: Iterable[int]) -> None:
    """Close descriptors that a peer handed over; waits for nobody.

    close(2) has a file system flush, and one that a process serves answers when that process likes: a mount of the lake
    stores what was written to the file then, and waits for the engine.
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
    """Let a thread close what may take its time; waits for it only when there is no thread to be had."""
    try:
        Thread(target=close, name=CLOSER, daemon=True).start()
    except RuntimeError:
        close()


def is_memory(descriptor: int) -> bool:
    """Whether it is a file on tmpfs or hugetlbfs, memfds among them; the kernel says so without asking anybody."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def duplicates(descriptors: Iterable[int]) -> list[int]:
    """Descriptors for the same files, all or none.  EngineBusy when there are none to be had."""
    copies: list[int] = []
    try:
        copies.extend(os.dup(descriptor) for descriptor in descriptors)
    except OSError as error:
        close_all(copies)
        raise EngineBusy("out of descriptors; try again, or raise the limit of open files") from error
    return copies
