"""A lake whose names, members and head are reached over TCP, as on several machines; all of it in this process.

Clients and the head reach the names through a `Wire`, which tests cut and silence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

import trio

from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.lake_state import NO_EPOCH, NO_GENERATION, LakeState
from engine.coordinator.names_coordinator import open_names_coordinator
from engine.coordinator.records import LakeRecord, MemberRecord
from engine.coordinator.remote_coordinator import open_remote_coordinator
from engine.head.head import open_head
from engine.head.names_link import names_at
from engine.host.clock import SystemClock
from engine.members.member_links import connect_member, open_member_links
from engine.requests.bind import BindGate
from engine.requests.table import NamesService, Service
from engine.server.listener import Server
from engine.stripes.stripes import LakeStripes
from engine.walker.membership import members_of_records
from lakefs.cluster.placing import first_table
from lakefs.cluster.table_format import pack
from lakefs.errors import EngineUnreachable
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import GcGeneration, MemberId
from lakefs.limits import GIB
from lakefs.ports import Listener, Stream
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import EngineService
from tests.held_open import Process
from tests.lake_rig import MIRRORED
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.store_rig import simulated_store
from tests.unit.support.metadata_rig import NAMES_OF

TOKEN: Final = "token of the lake"
SILENCE_S: Final = 0.4
_ANY_PORT: Final = "tcp://127.0.0.1:0"


class Wire:
    """Forwards connections to an address, until it is cut or silenced."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.to = ""
        self._nursery = nursery
        self._network = TrioNetwork()
        self._scopes: dict[trio.CancelScope, None] = {}
        self._flows = trio.Event()
        self._flows.set()

    async def listen(self) -> str:
        """Begin to forward; return the address of this end."""
        listener = await self._network.listen(_ANY_PORT)
        self._nursery.start_soon(self._accept, listener)
        return listener.address

    def cut(self) -> None:
        """End all connections."""
        for scope in self._scopes:
            scope.cancel()

    def silence(self) -> None:
        """Forward nothing from now on, and close nothing, as when a machine dies."""
        self._flows = trio.Event()

    def restore(self) -> None:
        """Forward again; what was under way when it was silenced is lost."""
        self.cut()
        self._flows.set()

    async def _accept(self, listener: Listener) -> None:
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    nursery.start_soon(self._forward, await listener.accept())
        finally:
            with trio.CancelScope(shield=True):
                await listener.aclose()

    async def _forward(self, near: Stream) -> None:
        with trio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                await self._flows.wait()
                far = await self._network.connect(self.to)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, near, far, nursery.cancel_scope)
                    nursery.start_soon(self._pump, far, near, nursery.cancel_scope)
            except EngineUnreachable:
                pass
            finally:
                del self._scopes[scope]
                with trio.CancelScope(shield=True):
                    await near.aclose()

    async def _pump(self, source: Stream, target: Stream, scope: trio.CancelScope) -> None:
        buffer = memoryview(bytearray(1 << 16))
        try:
            while count := await source.receive_into(buffer):
                await self._flows.wait()
                await target.send([bytes(buffer[:count])])
        except EngineUnreachable:
            pass
        finally:
            await source.aclose()
            scope.cancel()


class Names:
    """The names of the lake, with its coordinator: started and stopped by a test, each time at another port."""

    def __init__(self, nursery: trio.Nursery, wire: Wire) -> None:
        self._nursery = nursery
        self._wire = wire
        self._disk = SimDisk()
        self._process = Process()

    async def start(self) -> None:
        """Start; returns when they listen."""
        self._process = Process()
        self._wire.to = await self._nursery.start(self._process.run, self._opened())

    async def stop(self) -> None:
        """End all connections and stop."""
        await self._process.stop(crash=True)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[str]:
        async with (
            names_store(self._disk) as store,
            open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features) as coordinator,
        ):
            await LakeState(coordinator).make_lake(LakeRecord(NAMES_OF, MIRRORED.data, MIRRORED.parity))
            gate = BindGate(GcGeneration(1))
            service = NamesService(store, gate=gate, coordinator=coordinator_group(coordinator))
            async with served(service) as address:
                yield address


@asynccontextmanager
async def served(service: EngineService) -> AsyncIterator[str]:
    """Serve at a free port until the block ends; the connections are then cut."""
    server = Server(service, TrioNetwork(), token=TOKEN)
    async with trio.open_nursery() as nursery:
        yield await nursery.start(server.listen_and_serve, _ANY_PORT)
        nursery.cancel_scope.cancel()


class TcpLake:
    """A lake, and the parts of it that tests fail."""

    def __init__(self, wire: Wire, names: Names, head: str) -> None:
        self.wire = wire
        self.names = names
        self.head = head
        """The head's address."""


@asynccontextmanager
async def tcp_lake() -> AsyncIterator[TcpLake]:
    """A lake with two members, each chunk on both, and a head."""
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        wire = Wire(nursery)
        at = await wire.listen()
        names = Names(nursery, wire)
        await names.start()
        await _make_lake(at, [await stack.enter_async_context(_member()) for _ in range(2)])
        head = await stack.enter_async_context(_head(at))
        yield TcpLake(wire, names, head)
        await stack.aclose()
        await names.stop()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _member() -> AsyncIterator[MemberRecord]:
    """A member of the lake; yields its record, with the address at which it is served."""
    async with simulated_store(cluster_id=NAMES_OF) as store, served(Service(store)) as address:
        member = MemberId(store.superblock.store_id)
        yield MemberRecord(member, (address,), GIB, (f"device {member.hex()}", "", "", ""))


async def _make_lake(at: str, members: Sequence[MemberRecord]) -> None:
    """Register the members, and make the lake's first generation and table, as their machine does."""
    async with open_remote_coordinator(at, token=TOKEN, lake=NAMES_OF) as coordinator:
        await coordinator.connect()
        state = LakeState(coordinator)
        for member in members:
            await state.register(member)
        await state.advance_generation(NO_GENERATION)
        table = first_table(MIRRORED, members_of_records(await state.members()))
        assert await state.next_epoch(NO_EPOCH, pack(table)) == 1


@asynccontextmanager
async def _head(at: str) -> AsyncIterator[str]:
    """A head on another machine than the names: it reaches all of the lake over TCP."""
    coordinator_at = partial(open_remote_coordinator, at, token=TOKEN, lake=NAMES_OF, silence_s=SILENCE_S)
    offload = InlineOffload()
    async with (
        coordinator_at() as coordinator,
        open_member_links(coordinator, partial(connect_member, token=TOKEN)) as links,
        open_head(
            names_at(at, token=TOKEN, silence_s=SILENCE_S),
            LakeStripes(links, LakeState(coordinator), offload),
            links,
            offload=offload,
            clock=SystemClock(),
            buffers=BufferPool(64 << 20),
        ) as head,
        served(head) as address,
    ):
        yield address
