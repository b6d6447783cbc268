"""The coordinator as a process on another host reaches it: each call over a connection to the names' process."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

import trio

from engine.coordinator.coordinator import Changes, Compare, Found, Operation, Page, ReadAnew, Transacted, Watch
from engine.coordinator.names_coordinator import NamesCoordinator
from lakefs.errors import EngineUnreachable
from lakefs.ids import LeaseId, Revision
from lakefs.limits import MEMBER_CONNECT_S
from tests.sim.cluster.network import Connection, Network
from tests.sim.cluster.process import SimProcess

T = TypeVar("T")


class CoordinatorPlace(Protocol):
    """The place of the coordinator."""

    process: SimProcess | None
    coordinator: NamesCoordinator | None


class FarCoordinator:
    """`Coordinator` over the simulated network.  `keep` holds its connection."""

    def __init__(self, network: Network, near: str, place: CoordinatorPlace) -> None:
        self._network = network
        self._near = near
        self._place = place
        self._connection: Connection | None = None
        self._wanted = trio.Event()
        self._settled = trio.Event()

    async def keep(self) -> None:
        """Connect whenever a call needs it, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            with trio.CancelScope(deadline=trio.current_time() + MEMBER_CONNECT_S) as connecting:
                with suppress(EngineUnreachable):
                    async with self._network.connected(self._near, self._place.process) as connection:
                        connecting.deadline = math.inf
                        self._settle(connection)
                        await connection.lost.wait()
            self._settle(None)

    def _settle(self, connection: Connection | None) -> None:
        self._connection = connection
        settled, self._settled = self._settled, trio.Event()
        settled.set()

    async def _connected(self) -> Connection:
        if self._connection is None:
            settled = self._settled
            self._wanted.set()
            await settled.wait()
        if self._connection is None:
            raise EngineUnreachable("the coordinator cannot be reached")
        return self._connection

    async def _ask(self, call: Callable[[NamesCoordinator], Awaitable[T]]) -> T:
        await trio.lowlevel.checkpoint()
        connection = await self._connected()

        async def there() -> T:
            coordinator = self._place.coordinator
            if coordinator is None:
                raise EngineUnreachable("the coordinator has ended")
            return await call(coordinator)

        return await connection.ask(there)

    async def get(self, key: bytes) -> Found:
        """See the port."""
        return await self._ask(lambda coordinator: coordinator.get(key))

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """See the port."""
        return await self._ask(lambda coordinator: coordinator.range(begin, end, limit=limit, after=after))

    async def transact(
        self, compares: Sequence[Compare], then_ops: Sequence[Operation], else_ops: Sequence[Operation] = ()
    ) -> Transacted:
        """See the port."""
        return await self._ask(lambda coordinator: coordinator.transact(compares, then_ops, else_ops))

    async def lease(self, ttl_s: int) -> LeaseId:
        """See the port."""
        return await self._ask(lambda coordinator: coordinator.lease(ttl_s))

    async def keep_alive(self, lease: LeaseId) -> bool:
        """See the port."""
        return await self._ask(lambda coordinator: coordinator.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        """See the port."""
        await self._ask(lambda coordinator: coordinator.revoke(lease))

    @asynccontextmanager
    async def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AsyncIterator[Watch]:
        """See the port."""

        async def begun(coordinator: NamesCoordinator) -> Watch:
            return await coordinator.watch(begin, end, from_revision).__aenter__()

        connection = await self._connected()
        yield _FarWatch(connection, await self._ask(begun))


class _FarWatch:
    """A watch at the coordinator; what it has not handed over when the connection ends is watched for anew."""

    def __init__(self, connection: Connection, watch: Watch) -> None:
        self._connection = connection
        self._watch = watch

    @property
    def resumes_at(self) -> Revision:
        """See the port."""
        return self._watch.resumes_at

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes | ReadAnew:
        async def following() -> list[Changes | ReadAnew]:
            try:
                return [await anext(self._watch)]
            except StopAsyncIteration:
                return []

        events = await self._connection.ask(following)
        if not events:
            raise StopAsyncIteration
        return events[0]
