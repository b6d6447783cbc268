"""A small team of tasks that take turns in leading (Schmidt et al., "Leader/Followers", 2000).

The leader takes the next job and serves it itself.  Another task, parked or new, becomes the leader only when serving
first waits.  So a job that need not wait costs no task, and one that waits does not delay the others.

Rules kept here:
- Exactly one worker leads.  A worker serves one job at a time; cancelling its scope cancels that job only.
- A scope that was cancelled is replaced before the worker does anything else.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

import trio

J = TypeVar("J")
T = TypeVar("T")

_IDLE_WORKERS_MAX: Final = 8
"""Most workers kept for the next job that waits; a parked task holds about 3 KiB."""


class Worker:
    """One task of a team.  `scope` encloses all that it does."""

    __slots__ = ("scope", "task")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None


class Team(Generic[J]):
    """Serves jobs until `lead` returns None.

    `lead` waits for the next job; only one task runs it at a time.  `serve` does a job.  `before_handover`, which is
    synchronous, is called when a job has to wait.  They raise only Cancelled.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        lead: Callable[[], Awaitable[J | None]],
        serve: Callable[[J, Worker], Coroutine[Any, Any, None]],
        before_handover: Callable[[], None],
    ) -> None:
        self._nursery = nursery
        self._lead = lead
        self._serve = serve
        self._before_handover = before_handover
        self._leader: Worker | None = None
        self._idle: list[Worker] = []

    def start(self) -> None:
        """Start a new worker as the leader."""
        self._leader = Worker()
        self._nursery.start_soon(self._work, self._leader)

    def leads(self, worker: Worker) -> bool:
        """Return True if the worker takes the next job when it has served this one."""
        return self._leader is worker

    async def _work(self, worker: Worker) -> None:
        worker.task = trio.lowlevel.current_task()
        while True:
            with worker.scope:
                # The leader's scope is not cancelled: a job served without a wait cannot be.
                while self._leader is worker or not worker.scope.cancel_called:
                    if self._leader is not worker and not await self._park(worker):
                        return
                    assert self._leader is worker, "only the leader takes a job"
                    job = await self._lead()
                    if job is None:
                        return
                    await noticing_wait(self._serve(job, worker), self._hand_over)
            worker.scope = trio.CancelScope()

    def _hand_over(self) -> None:
        self._before_handover()
        if self._idle:
            self._leader = self._idle.pop()
            assert self._leader.task is not None, "a parked worker has a task"
            trio.lowlevel.reschedule(self._leader.task)
        else:
            self.start()

    async def _park(self, worker: Worker) -> bool:
        """Wait until made the leader; False when enough others wait already."""
        assert self._leader is not worker, "the leader does not park"
        if len(self._idle) >= _IDLE_WORKERS_MAX:
            return False
        self._idle.append(worker)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._idle.remove(worker)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        return True


@types.coroutine
def noticing_wait(coroutine: Coroutine[Any, Any, T], waits: Callable[[], None]) -> Generator[Any, Any, T]:
    """Await a coroutine; call `waits` when it first yields to trio.

    The coroutine runs in the caller's task, as if awaited: the values it yields to trio, and those that trio sends or
    raises, are passed on unchanged.
    """
    try:
        wanted = coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    waits()
    while True:
        try:
            try:
                answer = yield wanted
            except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
                wanted = coroutine.throw(error)
            else:
                wanted = coroutine.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
