"""Blocking and CPU-heavy calls outside the loop: a pool of threads, or inline for the simulator.

Rules kept here:
- A call that has begun is waited for, whatever is cancelled: the memory it reads and the files it writes stay in use
  until it ends.  Cancellation is delivered before the call begins, or at the caller's next checkpoint.
- Each waiting task has one call in the queue, so the queue is bounded by the tasks, which the server bounds.
- Results are handed over in batches: one wake-up of the loop for all calls that ended since the last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import outcome
import trio

T = TypeVar("T")


class _Job:
    """One call, and the task that waits for it."""

    __slots__ = ("args", "call", "result", "task")

    def __init__(self, call: Callable[..., Any], args: tuple[object, ...], task: trio.lowlevel.Task) -> None:
        self.call = call
        self.args = args
        self.task = task
        self.result: outcome.Outcome[Any] | None = None


def _not_interruptible(raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


class ThreadOffload:
    """A pool of daemon threads (`lakefs.ports.Offload`).

    CPU per call on two slow cores, 1 / 8 / 32 calls at a time: 46-78 / 8-10 / 5-18 us; `trio.to_thread`:
    57-61 / 38 / 48-80 us.  Alone, the cost is the two wake-ups; in company they are shared.

    `async with ThreadOffload(threads, name):` or `start()` inside the loop and `close()` at the end.
    """

    def __init__(self, threads: int, name: str) -> None:
        assert threads > 0
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._finished: deque[_Job] = deque()
        self._drain_is_due = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]

    def start(self) -> None:
        """Start the threads; results are delivered to the running loop."""
        assert self._token is None, "started twice"
        self._token = trio.lowlevel.current_trio_token()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait for the calls already queued, then end the threads.  Blocks; a second call does nothing."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    async def __aenter__(self) -> ThreadOffload:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """Return the call's result or raise its exception; Cancelled only before it begins."""
        assert self._token is not None, "not started"
        assert not self._closed, "used after close"
        await trio.lowlevel.checkpoint_if_cancelled()
        self._queue.put(_Job(call, args, trio.lowlevel.current_task()))
        return cast(T, await trio.lowlevel.wait_task_rescheduled(_not_interruptible))

    def _work(self) -> None:
        """Run calls until `close`; the body of each thread."""
        token = self._token
        assert token is not None
        while (job := self._queue.get()) is not None:
            job.result = outcome.capture(job.call, *job.args)
            self._finished.append(job)
            del job  # otherwise its memory would be kept until the next call
            # Append first, flag second; `_drain` clears the flag first and empties second: nothing is missed.
            if not self._drain_is_due:
                self._drain_is_due = True
                try:
                    token.run_sync_soon(self._drain)
                except trio.RunFinishedError:
                    return  # the loop has ended, and with it every task that could wait

    def _drain(self) -> None:
        """Resume the tasks whose calls have ended; runs in the loop."""
        self._drain_is_due = False
        while self._finished:
            job = self._finished.popleft()
            assert job.result is not None
            trio.lowlevel.reschedule(job.task, job.result)


class InlineOffload:
    """Runs calls in the caller's task (`lakefs.ports.Offload`), for the simulator and for tests.

    A checkpoint before and after lets other tasks run between the decision and the call, and between the call and the
    caller's next step, as they can with threads.
    """

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """Return the call's result or raise its exception; Cancelled only before it begins."""
        await trio.lowlevel.checkpoint()
        try:
            return call(*args)
        finally:
            await trio.lowlevel.cancel_shielded_checkpoint()
