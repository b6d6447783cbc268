"""What every serving process of the command line does: keep its memory together and its pauses short, say where it
listens, and end with one error, not a group."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_M_ARENA_MAX = -8  # malloc.h


def keep_one_arena() -> None:
    """Have all threads take memory from one heap.

    By default glibc gives each thread of the pools one of its own, and what one thread frees is no use to the next:
    under mixed load the engine's private memory grew half as much again.  Payloads are in memory of their own, so the
    threads hardly meet at the heap's lock.  A C library without mallopt is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def say(line: str) -> None:
    """One line on stdout, at once: whoever starts a process waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_loop(main: Callable[[], Awaitable[T]]) -> T:
    """Run to the end; its result.  An error that nurseries have wrapped is raised bare."""
    import trio

    keep_one_arena()
    # Modules, classes and functions stay: a full collection that walked them kept the loop for tens of milliseconds.
    gc.freeze()
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        raise _only(group) from group


def _only(error: BaseException) -> BaseException:
    """What a nursery wrapped, when that is one error; else the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
