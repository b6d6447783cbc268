"""What every serving process of the command line does: say where it listens, and end with one error, not a group."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def say(line: str) -> None:
    """One line on stdout, at once: whoever starts a process waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_loop(main: Callable[[], Awaitable[T]]) -> T:
    """Run to the end; its result.  An error that nurseries have wrapped is raised bare."""
    import trio

    try:
        return trio.run(main)
    except BaseExceptionGroup as group:
        raise _only(group) from group


def _only(error: BaseException) -> BaseException:
    """What a nursery wrapped, when that is one error; else the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
