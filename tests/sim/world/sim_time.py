"""Trio's time in a simulated run: it stands still while any task can go on, and then jumps to the next deadline.

Like `trio.testing.MockClock` with `autojump_threshold=0`, but several times cheaper: nobody asks the machine's clock,
and a task that only waits (`pause`) is woken by the clock itself, without a cancel scope.  It jumps under `run_seeded`
only.
"""

from __future__ import annotations

import heapq
import math

import trio
import trio.abc
from trio._core._run import GLOBAL_RUN_CONTEXT
from trio.lowlevel import Abort, RaiseCancelT, Task


class SimTime(trio.abc.Clock):
    """The clock of one `run_seeded`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._waits: list[tuple[float, int, list[Task]]] = []
        self._wait_count = 0

    def start_clock(self) -> None:
        """Do nothing: the run begins."""

    def current_time(self) -> float:
        """Return the seconds since the run began."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return 0 when the deadline has passed; else more, however far off it is."""
        return 0.0 if deadline <= self._now else math.inf

    def jump(self) -> None:
        """Jump to the next deadline or end of a pause: no task can go on."""
        waits = self._waits
        while waits and not waits[0][2]:  # given up
            heapq.heappop(waits)
        until = min(GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline(), waits[0][0] if waits else math.inf)
        if until == math.inf:
            return
        self._now = max(self._now, until)
        while waits and waits[0][0] <= self._now:
            for task in heapq.heappop(waits)[2]:
                trio.lowlevel.reschedule(task)

    async def wait(self, seconds: float, *, shielded: bool) -> None:
        """Like `trio.sleep`; `shielded`: a task that is cancelled during the wait still waits to the end."""
        waiting = [trio.lowlevel.current_task()]
        self._wait_count += 1
        heapq.heappush(self._waits, (self._now + seconds, self._wait_count, waiting))

        def abort(_: RaiseCancelT) -> Abort:
            if shielded:
                return Abort.FAILED
            waiting.clear()
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


async def pause(seconds: float, *, shielded: bool = False) -> None:
    """Let simulated time pass, under whichever clock the run has."""
    clock = trio.lowlevel.current_clock()
    if isinstance(clock, SimTime):
        await clock.wait(seconds, shielded=shielded)
        return
    with trio.CancelScope(shield=shielded):
        await trio.sleep(seconds)
