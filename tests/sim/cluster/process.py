"""Processes of a simulated lake: tasks that end together, on one host, while the world goes on.

A process that meets `SimCrashed` is dead: its other tasks are cancelled, and its callers lose their connections.  A
LakeError may end it, too, as when it cannot open its store.  Any other error is a bug, and ends the world.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from lakefs.errors import EngineUnreachable, LakeError
from tests.sim.world.disk import SimCrashed

T = TypeVar("T")
DRAIN_S = 3.0
"""A process that is stopped waits so long for requests in flight."""


class Outcome(Generic[T]):
    """The result of a call that runs in another task, or its LakeError."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self._results: list[T] = []
        self._error: LakeError | None = None

    async def take(self, call: Callable[[], Awaitable[T]]) -> None:
        """Run the call and keep its outcome."""
        try:
            self._results.append(await call())
        except LakeError as error:
            self._error = error
        self.done.set()

    def fail(self, error: LakeError) -> None:
        """End it with an error, unless it has ended."""
        if not self.done.is_set():
            self._error = error
            self.done.set()

    def copy(self, other: Outcome[T]) -> None:
        """End it as another one has ended."""
        self._results, self._error = other._results, other._error
        self.done.set()

    def result(self) -> T:
        """Return the result, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._results[0]


class SimProcess:
    """One life of a process.  `host` is where it runs."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.is_up = False
        """It can be asked."""
        self.dies_silently = False
        """Its host dies with it: nobody hears of its end."""
        self.ended = trio.Event()
        self.error: LakeError | None = None
        """The error that ended it."""
        self._stop = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._requests: trio.Nursery | None = None
        self._listeners: dict[Callable[[], None], None] = {}

    @property
    def is_gone(self) -> bool:
        """True when it was killed, or has ended: what its tasks do then, to clean up, never happens."""
        return self._nursery is None or self._nursery.cancel_scope.cancel_called

    def on_end(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when the process ends; returns the function that prevents that."""
        self._listeners[listener] = None
        return lambda: (self._listeners.pop(listener, None), None)[1]

    def stop(self) -> None:
        """Ask it to stop cleanly."""
        self._stop.set()

    async def serve_until_stopped(self) -> None:
        """Let it be asked, until it is to stop and requests in flight have ended, or were cancelled."""
        try:
            async with trio.open_nursery() as self._requests:
                self.is_up = True
                await self._stop.wait()
                self.is_up = False
                self._requests.cancel_scope.deadline = trio.current_time() + DRAIN_S
        finally:
            self.is_up, self._requests = False, None

    def kill(self) -> None:
        """End it wherever it is.  Its disks have to be dead already."""
        if self._nursery is not None:
            self._nursery.start_soon(_crash)

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run it to its end.  Raises what neither a crash nor a LakeError explains."""
        try:
            async with trio.open_nursery() as self._nursery:
                await body()
                self._end()
                self._nursery.cancel_scope.cancel()
        except (LakeError, SimCrashed, BaseExceptionGroup) as error:
            self._end()
            self._judge(error)
        finally:
            self._end()
            self._nursery = None
            self.ended.set()

    def _end(self) -> None:
        self.is_up = False
        listeners, self._listeners = list(self._listeners), {}
        for listener in listeners:
            listener()

    def _judge(self, error: BaseException) -> None:
        causes = causes_of(error)
        rest = [cause for cause in causes if not isinstance(cause, (SimCrashed, LakeError))]
        if rest:
            raise error
        if not any(isinstance(cause, SimCrashed) for cause in causes):
            assert isinstance(causes[0], LakeError)
            self.error = causes[0]

    async def serve(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call in the process; return its result, or raise its LakeError.  EngineUnreachable when it ends."""
        if not self.is_up or self._requests is None:
            raise EngineUnreachable("nothing listens there")
        outcome: Outcome[T] = Outcome()
        try:
            self._requests.start_soon(outcome.take, call)
        except RuntimeError:  # closed to new tasks: it ends just now
            raise EngineUnreachable("nothing listens there") from None
        forget = self.on_end(lambda: outcome.fail(EngineUnreachable("the process has ended")))
        try:
            await outcome.done.wait()
        finally:
            forget()
        return outcome.result()


async def _crash() -> None:
    raise SimCrashed


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions inside of groups of exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes_of(inner)]
    return [error]
