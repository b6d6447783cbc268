"""A request in flight on a trio client's connection, and who gets its answer: a task that waits, or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import outcome
import trio

from lakefs.wire.engine_port import Reply

Answered = Callable[[outcome.Outcome[Reply]], None]
"""Called once with the answer to a request, or its error, in the task that receives; raises nothing."""


class Call:
    """A request in flight.

    `task`: the task that waits for its final frame; None if none does.  `done` is called with it instead, if given.
    """

    __slots__ = ("done", "into", "raise_cancel", "receiving", "sent", "task")

    def __init__(
        self, task: trio.lowlevel.Task | None, into: Sequence[memoryview], done: Answered | None = None
    ) -> None:
        self.task = task
        self.done = done
        self.into = into
        self.sent = False
        self.receiving = False
        self.raise_cancel: Callable[[], NoReturn] | None = None

    def wake(self, result: outcome.Outcome[Reply]) -> bool:
        """Give the result to whom waits; return False if nobody does."""
        task, self.task = self.task, None
        done, self.done = self.done, None
        if task is not None:
            trio.lowlevel.reschedule(task, result)
        elif done is not None:
            done(result)
        return task is not None or done is not None

    @property
    def is_awaited(self) -> bool:
        """True if somebody waits for the answer."""
        return self.task is not None or self.done is not None

    def forget(self) -> None:
        """Let nobody wait for the answer."""
        self.task = self.done = None
