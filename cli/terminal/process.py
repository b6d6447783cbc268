"""Runs the loop of an engine or a gateway: one heap for all threads, short pauses of Python's gc, one error at the end.

A single error inside groups is raised without them.  `say` writes a line at once, for a starter that waits for it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_M_ARENA_MAX = -8  # malloc.h


def keep_one_arena() -> None:
    """Make all threads allocate from one heap.

    By default glibc gives each pool thread a heap of its own, and memory freed by one thread is useless to the next:
    under mixed load the engine's private memory grew half as much again.  Payloads are in memory of their own, so
    threads rarely contend for the heap's lock.  A C library without mallopt is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def say(line: str) -> None:
    """Write one line on stdout, at once: the process that started this one waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_loop(main: Callable[[], Awaitable[T]]) -> T:
    """Run to the end and return the result.  A single error that nurseries have wrapped is raised bare."""
    import trio

    keep_one_arena()
    # Modules, classes and functions stay: a full collection that walked them blocked the loop for tens of milliseconds.
    gc.freeze()
    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        raise single_error(group) from group


def single_error(error: BaseException) -> BaseException:
    """Return the single error inside nested groups, or the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
