"""Names with a coordinator on a simulated network, which can be stopped, cut and silenced.

A fault is planted in the coordinator itself (`Faulty`): a connection that is cut before a call is done, or after it was
done and before its answer has left.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import trio

from engine.coordinator.coordinator import (
    Changes,
    Compare,
    Coordinator,
    Found,
    Operation,
    Page,
    ReadAnew,
    Transacted,
    Watch,
)
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.lake_state import LakeState
from engine.coordinator.names_coordinator import NamesCoordinator, open_names_coordinator
from engine.coordinator.records import LakeRecord
from engine.coordinator.remote_coordinator import RemoteCoordinator, open_remote_coordinator
from engine.requests.table import NamesService
from engine.server.listener import Server
from lakefs.ids import LeaseId, Revision
from tests.held_open import Process
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.sim.world.network import SimulatedNetwork
from tests.unit.support.metadata_rig import NAMES_OF

T = TypeVar("T")
ADDRESS: Final = "tcp://names:7000"
TOKEN: Final = "token of the lake"
FIRST_REVISION: Final = 2
"""The first revision of a test: the lake was recorded before it."""
BEFORE, AFTER = "cut before it is done", "cut after it was done"


class FrozenNetwork(SimulatedNetwork):
    """A network whose bytes and connects stay under way while it is frozen, as when a machine dies."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(random.Random(seed), latency_s=0.001)
        self._thawed = trio.Event()
        self._thawed.set()

    def freeze(self) -> None:
        self._thawed = trio.Event()

    def thaw(self) -> None:
        self._thawed.set()

    async def delay(self) -> None:
        await self._thawed.wait()
        await super().delay()


class Faulty:
    """A coordinator whose next call meets a fault, once."""

    def __init__(self, inner: Coordinator, cut: Callable[[], None]) -> None:
        self.next_fault = ""
        self.calls = 0
        self._inner = inner
        self._cut = cut

    async def get(self, key: bytes) -> Found:
        return await self._do(partial(self._inner.get, key))

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        return await self._do(partial(self._inner.range, begin, end, limit=limit, after=after))

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        return await self._do(partial(self._inner.transact, compares, then_ops, else_ops, is_repeatable=is_repeatable))

    async def compact(self, revision: Revision) -> None:
        await self._do(partial(self._inner.compact, revision))

    @asynccontextmanager
    async def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AsyncIterator[Watch]:
        async with self._inner.watch(begin, end, from_revision) as watch:
            yield FaultyWatch(watch, self)

    async def lease(self, ttl_s: int) -> LeaseId:
        return await self._do(partial(self._inner.lease, ttl_s))

    async def keep_alive(self, lease: LeaseId) -> bool:
        return await self._do(partial(self._inner.keep_alive, lease))

    async def revoke(self, lease: LeaseId) -> None:
        await self._do(partial(self._inner.revoke, lease))

    async def _do(self, call: Callable[[], Awaitable[T]]) -> T:
        self.calls += 1
        await self.meet(BEFORE)
        found = await call()
        await self.meet(AFTER)
        return found

    async def meet(self, fault: str) -> None:
        """Meet this fault, if it is the next one."""
        if self.next_fault == fault:
            self.next_fault = ""
            self._cut()
            await trio.sleep_forever()  # until the connection's end cancels it


class FaultyWatch:
    """A watch whose next event meets a fault."""

    def __init__(self, inner: Watch, faulty: Faulty) -> None:
        self._inner = inner
        self._faulty = faulty

    @property
    def resumes_at(self) -> Revision:
        return self._inner.resumes_at

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes | ReadAnew:
        await self._faulty.meet(BEFORE)
        event = await anext(self._inner)
        await self._faulty.meet(AFTER)
        return event


class RemoteNames:
    """Names of one lake at ADDRESS: started and stopped by a test."""

    def __init__(self, nursery: trio.Nursery, network: FrozenNetwork, disk: SimDisk | None = None) -> None:
        self.disk = disk or SimDisk()
        self.network = network
        self.token = TOKEN
        self._nursery = nursery
        self._process = Process()
        self._server: Server | None = None

    async def start(self) -> None:
        """Start; `faulty` is the coordinator that is served."""
        self._process = Process()
        self.faulty: Faulty = await self._nursery.start(self._process.run, self._opened())

    async def stop(self) -> None:
        """Cut the connections and stop, as a process that is killed."""
        await self._process.stop(crash=True)

    async def shut_down(self) -> float:
        """Shut down as after a signal; returns the seconds that it took."""
        assert self._server is not None, "they have started"
        began = trio.current_time()
        await self._server.drain(60)
        took_s = trio.current_time() - began
        await self._process.stop()
        return took_s

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Faulty]:
        async with (
            names_store(self.disk) as store,
            open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features) as coordinator,
            trio.open_nursery() as nursery,
        ):
            self.inner: NamesCoordinator = coordinator
            await LakeState(coordinator).make_lake(LakeRecord(NAMES_OF, 1, 1))
            faulty = Faulty(coordinator, self.network.cut_all)
            service = NamesService(store, coordinator=coordinator_group(faulty))
            self._server = Server(service, self.network, token=self.token)
            await nursery.start(self._server.listen_and_serve, ADDRESS)
            yield faulty
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def names_and_remote(seed: int = 1) -> AsyncIterator[tuple[RemoteNames, RemoteCoordinator]]:
    """Names that have started, and a coordinator that asks them over a simulated network."""
    async with trio.open_nursery() as nursery:
        network = FrozenNetwork(seed)
        names = RemoteNames(nursery, network)
        await names.start()
        async with remote_of(network) as remote:
            yield names, remote
        await names.stop()


def remote_of(
    network: FrozenNetwork, *, token: str = TOKEN, lake: bytes | None = NAMES_OF
) -> AbstractAsyncContextManager[RemoteCoordinator]:
    """A coordinator that asks the names at ADDRESS."""
    return open_remote_coordinator(ADDRESS, token=token, lake=lake, network=network)
