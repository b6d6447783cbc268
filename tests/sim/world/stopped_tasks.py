"""Stops tasks of a simulated run, and all below them, as SIGSTOP stops a process: time and the world go on.

    with stopping_tasks() as stopped:
        stopped.stop(task)          no step of it is run any more, whatever it waits for
        stopped.resume(task)        all that has happened for it happens now

A task that is stopped and whose deadline passes is cancelled when it goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from trio._core._run import GLOBAL_RUN_CONTEXT
from trio.lowlevel import Task


class StoppedTasks:
    """The tasks of a run that are stopped."""

    def __init__(self) -> None:
        self._held: dict[Task, list[Task]] = {}
        """For each task that was stopped, the tasks that run when it goes on."""

    def stop(self, task: Task) -> None:
        """Stop a task and all below it; those that are just running do one more step."""
        self._held.setdefault(task, [])

    def resume(self, task: Task) -> None:
        """Let a task go on, if it is stopped."""
        for each in self._held.pop(task, ()):
            GLOBAL_RUN_CONTEXT.runner.runq.append(each)

    def resume_all(self) -> None:
        """Let all tasks go on."""
        for task in list(self._held):
            self.resume(task)

    def is_stopped(self, task: Task) -> bool:
        """Return True for a task that was stopped itself."""
        return task in self._held

    def holds(self, task: Task) -> bool:
        """Keep a task that can go on, if it, or one above it, is stopped."""
        above: Task | None = task
        while above is not None:
            if above in self._held:
                self._held[above].append(task)
                return True
            above = None if above.parent_nursery is None else above.parent_nursery.parent_task
        return False

    @property
    def has_any(self) -> bool:
        return bool(self._held)


class _RunQueue(deque[Task]):
    """Trio's queue of tasks that can go on, without those that are stopped."""

    stopped: StoppedTasks

    def append(self, task: Task, /) -> None:
        """Add a task, unless it is stopped."""
        if not (self.stopped.has_any and self.stopped.holds(task)):
            super().append(task)


@contextmanager
def stopping_tasks() -> Iterator[StoppedTasks]:
    """Let tasks of this run be stopped during the block; all go on when it ends, for whatever reason."""
    runner = GLOBAL_RUN_CONTEXT.runner
    queue = _RunQueue(runner.runq)
    queue.stopped = StoppedTasks()
    runner.runq = queue
    try:
        yield queue.stopped
    finally:
        queue.stopped.resume_all()
        runner.runq = deque(queue)


def task_of(nursery: trio.Nursery) -> Task:
    """Return the task that a nursery belongs to."""
    return nursery.parent_task
