"""Hosts, and the ways between them: late, silent, one-way or cut; and connections from a host to a process.

A connection keeps the order of what is sent each way, as TCP does.  What is sent into a silent way arrives when it
speaks again, unless the connection is lost before that: `MEMBER_SILENCE_S` later, as those who hold it find out.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

import trio

from lakefs.errors import EngineUnreachable, LakeError
from lakefs.limits import MEMBER_SILENCE_S
from lakefs.wire.messages import Request
from tests.sim.cluster.process import Outcome, SimProcess
from tests.sim.world.sim_time import pause

T = TypeVar("T")


class Way(Enum):
    """The state of the way from one host to another."""

    GOOD = auto()
    LATE = auto()
    SILENT = auto()
    CUT = auto()
    """Refused at once, and connections end."""


CLOSED = (Way.SILENT, Way.CUT)


class Point(Protocol):
    """A point of histories: a kind of message."""

    async def met(self, connection: Connection, request: Request, *, is_answer: bool) -> None:
        """Return when the message may go on: a request that is about to be sent, or the answer that has come."""
        ...


class Network:
    """All ways between hosts.  `nursery` holds what is under way."""

    def __init__(self, rng: random.Random, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.points: dict[Point, None] = {}
        """Points of scenes: each sees every message (`tests.sim.cluster.stage`)."""
        self.late_s = 3.0
        """Most seconds that a message takes on a late way."""
        self._rng = rng
        self._ways: dict[tuple[str, str], Way] = {}
        self._changed = trio.Event()
        self._connections: dict[Connection, None] = {}

    def way(self, source: str, target: str) -> Way:
        """Return the state of a way."""
        return self._ways.get((source, target), Way.GOOD)

    def set_way(self, source: str, target: str, way: Way) -> None:
        """Change the way in one direction."""
        self._ways[source, target] = way
        self._notify()
        for connection in list(self._connections):
            if {connection.near, connection.far} != {source, target}:
                continue
            if way is Way.CUT:
                connection.lose("the connection was cut")
            elif way is Way.SILENT:
                self.nursery.start_soon(self._lose_silent, connection)

    def heal(self) -> None:
        """Make all ways good."""
        self._ways.clear()
        self._notify()

    def is_open(self, one: str, other: str) -> bool:
        """Return True if both directions carry."""
        return self.way(one, other) not in CLOSED and self.way(other, one) not in CLOSED

    def changed(self) -> trio.Event:
        """Return what is set at the next change of a way."""
        return self._changed

    def delay_s(self, source: str, target: str) -> float:
        """Return how long one message takes."""
        if source == target:
            return 0.0
        return self._rng.uniform(0.0, self.late_s if self.way(source, target) is Way.LATE else 0.0005)

    @asynccontextmanager
    async def connected(self, near: str, process: SimProcess | None) -> AsyncIterator[Connection]:
        """Connect from a host to a process.  EngineUnreachable; waits while the way is silent."""
        if process is None or not process.is_up:
            await trio.sleep(0.001)
            raise EngineUnreachable("nothing listens there")
        connection = Connection(self, near, process)
        self._connections[connection] = None
        forget = process.on_end(connection.lose_with_process)
        try:
            await connection.carry(near, process.host)
            await connection.carry(process.host, near)
            yield connection
        finally:
            self._connections.pop(connection, None)
            connection.lose("the connection was closed")
            forget()

    async def _lose_silent(self, connection: Connection) -> None:
        await trio.sleep(MEMBER_SILENCE_S)
        if not self.is_open(connection.near, connection.far):
            connection.lose("the other end is silent")

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


class Connection:
    """One connection, from a host to a process on another one, or on the same."""

    def __init__(self, network: Network, near: str, process: SimProcess) -> None:
        self.near = near
        self.far = process.host
        self.process = process
        self.lost = trio.Event()
        self._reason = ""
        self._network = network
        self._arrives: dict[str, float] = {}
        self._waiting: dict[Outcome[Any], None] = {}

    def lose(self, reason: str) -> None:
        """End it; whoever waits for an answer gets EngineUnreachable."""
        self._reason = self._reason or reason
        self.lost.set()
        for outcome in list(self._waiting):
            outcome.fail(EngineUnreachable(self._reason))

    def lose_with_process(self) -> None:
        """Note that the process has ended: heard of at once, or by its silence when its host died."""
        if self.process.dies_silently and self.near != self.far:
            self._network.nursery.start_soon(self._lose_later)
        else:
            self.lose("the process has ended")

    async def _lose_later(self) -> None:
        await trio.sleep(MEMBER_SILENCE_S)
        self.lose("the other end is silent")

    async def passes(self, request: Request, *, is_answer: bool = False) -> None:
        """Let what waits for such a message happen, at its sender, or at the receiver of its answer."""
        for point in [*self._network.points]:
            await point.met(self, request, is_answer=is_answer)

    def lost_for(self) -> EngineUnreachable | None:
        """Return the reason why it is lost; None while it is not."""
        return EngineUnreachable(self._reason) if self.lost.is_set() else None

    def check(self) -> None:
        """Raise EngineUnreachable if it is lost."""
        if self.lost.is_set():
            raise EngineUnreachable(self._reason)

    async def carry(self, source: str, target: str) -> None:
        """Return when a message that is sent now has arrived.  EngineUnreachable."""
        self.check()
        now, network = trio.current_time(), self._network
        arrives = max(self._arrives.get(target, 0.0), now + network.delay_s(source, target))
        self._arrives[target] = arrives
        if arrives > now:
            await pause(arrives - now)
        while network.way(source, target) is Way.SILENT and not self.lost.is_set():
            await _first_of(network.changed(), self.lost)
        if network.way(source, target) is Way.CUT:
            self.lose("there is no way to the host")
        self.check()

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call in the other process and return its result.  LakeErrors of it; EngineUnreachable: it may have run.

        Once sent it runs to its end, also when the caller is cancelled.
        """
        self.check()
        outcome: Outcome[T] = Outcome()
        self._network.nursery.start_soon(self._deliver, call, outcome)
        self._waiting[outcome] = None
        try:
            await outcome.done.wait()
        finally:
            self._waiting.pop(outcome, None)
        return outcome.result()

    async def _deliver(self, call: Callable[[], Awaitable[T]], outcome: Outcome[T]) -> None:
        try:
            await self.carry(self.near, self.far)
        except LakeError as error:
            outcome.fail(error)
            return
        served: Outcome[T] = Outcome()
        await served.take(lambda: self.process.serve(call))
        if not self.process.is_up:
            return  # the connection is lost, or will be
        try:
            await self.carry(self.far, self.near)
        except LakeError as error:
            outcome.fail(error)
            return
        if not outcome.done.is_set():
            outcome.copy(served)


async def _first_of(one: trio.Event, other: trio.Event) -> None:
    """Wait for the first of two events."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait, one)
        nursery.start_soon(wait, other)
