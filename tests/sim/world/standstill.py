"""Notices a simulated run that will never end: hours of its time pass, and tasks wait for what never happens."""

from __future__ import annotations

from collections.abc import Iterator
from types import CoroutineType
from typing import Any

import trio

from tests.sim.judges.history import SimFailure

PATIENCE_S = 1800.0
"""Simulated seconds; the longest life lasts a few minutes."""


async def watch_for_standstill() -> None:
    """Raise when the run has lasted too long, with the place where each task waits."""
    await trio.sleep(PATIENCE_S)
    root = trio.lowlevel.current_root_task()
    assert root is not None
    waits = "\n".join(f"  {task.name}: {_place(task.coro)}" for task in _tasks(root))
    raise SimFailure(f"the run stands still; tasks wait here:\n{waits}")


def _tasks(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tasks(child)


def _place(coroutine: Any) -> str:
    """Return the functions of ours on a task's stack, outermost first."""
    names: list[str] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and "/site-packages/" not in frame.f_code.co_filename:
            names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        if isinstance(coroutine, CoroutineType):
            coroutine = coroutine.cr_await
        else:
            coroutine = getattr(coroutine, "ag_await", None)
    return " > ".join(names)
