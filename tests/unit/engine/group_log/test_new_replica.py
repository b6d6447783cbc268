"""A replica that begins anew: from the leader's checkpoint, and what the log has behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.group_log.assembly import ReplicaIsBehind
from engine.group_log.checkpoint_requests import checkpoint_group
from engine.group_log.log_bounds import CHECKPOINT_PIECE_BYTES, CHECKPOINTS_OPEN_MAX
from engine.group_log.new_replica import CheckpointSource, holding_log
from engine.group_log.replica import leading
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import OF_REPLICAS, NamesService
from engine.store.keyed_store import KeyedStore
from engine.store.names_opening import BeginAnew, open_names_store
from lakefs.errors import EngineBusy, InvalidArgument, SessionLost, StoreDamaged, UnsupportedVersion
from lakefs.host.offload import InlineOffload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.memory_coordinator import memory_coordinator
from tests.replica_rig import KEYS, place_of
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import SMALL_SIZES, ask, run
from tests.unit.engine.process.names_machine import bind, keys_of
from tests.unit.support.metadata_rig import NAMES_OF


@asynccontextmanager
async def names_of(
    coordinator: Coordinator, number: int, disk: SimDisk, begin_anew: BeginAnew | None = None
) -> AsyncIterator[KeyedStore]:
    """Open names that have replicas; entered when this one leads."""
    async with open_names_store(
        disk,
        SimClock(),
        InlineOffload(),
        cluster_id=NAMES_OF,
        create=True,
        verify_index=False,
        sizes=SMALL_SIZES,
        index_committed=disk.note_index_sync,
        leading=lambda metadata, _: leading(metadata, place_of(coordinator, number)),
        begin_anew=begin_anew,
    ) as store:
        yield store


def served(store: KeyedStore, disk: SimDisk) -> EngineClient:
    """Return a client of names that lead."""
    group = checkpoint_group(store.metadata, disk, InlineOffload())
    return EmbeddedEngine(NamesService(store, checkpoints=group), descriptors=False)


async def trimmed_names(stack: AsyncExitStack, coordinator: Coordinator, disk: SimDisk) -> KeyedStore:
    """Open a first replica with names, whose log was trimmed."""
    await coordinator.transact([], [Put(KEYS.origin, place_of(coordinator, 1).replica)])
    store = await stack.enter_async_context(names_of(coordinator, 1, disk))
    for number in range(20):
        await bind(store, f"{number:02d}")
    await trio.sleep(5)
    assert not (await coordinator.range(*KEYS.groups, limit=1)).entries
    return store


def test_a_new_replica_begins_from_a_checkpoint_and_then_leads_with_all_names() -> None:
    async def lead(coordinator: Coordinator, begun: trio.Event, end: trio.Event) -> None:
        async with AsyncExitStack() as stack:
            disk = SimDisk(1)
            store = await trimmed_names(stack, coordinator, disk)
            stores.append(served(store, disk))
            begun.set()
            await bind(store, "20")
            await trio.sleep(1)
            await bind(store, "21")
            await end.wait()

    async def follow(coordinator: Coordinator, leads: trio.Event) -> None:
        disk = SimDisk(2)
        with pytest.raises(ReplicaIsBehind):
            async with names_of(coordinator, 2, disk):
                pass
        async with holding_log(coordinator, SimClock(), KEYS, place_of(coordinator, 2).replica):
            source = CheckpointSource(stores[0], SimClock(), InlineOffload())
            async with names_of(coordinator, 2, disk, source.begin_anew) as store:
                leads.set()
                assert await keys_of(store) == [f"{number:02d}" for number in range(22)]

    async def main() -> None:
        async with memory_coordinator() as coordinator, trio.open_nursery() as nursery:
            begun, end, leads = trio.Event(), trio.Event(), trio.Event()
            nursery.start_soon(lead, coordinator, begun, end)
            await begun.wait()
            nursery.start_soon(follow, coordinator, leads)
            await trio.sleep(3)
            assert not leads.is_set()
            end.set()

    stores: list[EngineClient] = []
    run(main)


def test_nothing_is_trimmed_while_a_replica_begins_anew() -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator, AsyncExitStack() as stack:
            store = await trimmed_names(stack, coordinator, SimDisk(1))
            async with holding_log(coordinator, SimClock(), KEYS, place_of(coordinator, 2).replica):
                await trio.sleep(1)
                await bind(store, "20")
                await trio.sleep(20)
                assert (await coordinator.range(*KEYS.groups, limit=1)).entries
            await trio.sleep(2)
            assert not (await coordinator.range(*KEYS.groups, limit=1)).entries

    run(main)


def test_a_copy_that_arrives_damaged_is_refused_and_the_store_stays_as_it_was() -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator, AsyncExitStack() as stack:
            first, second = SimDisk(1), SimDisk(2)
            store = await trimmed_names(stack, coordinator, first)
            await store.metadata.checkpoint()
            path = first.list_folder("checkpoints")[-1]
            file = first.open(f"checkpoints/{path}")
            file.pwrite(b"\xff\xff", file.size() // 2)
            source = CheckpointSource(served(store, first), SimClock(), InlineOffload())
            with pytest.raises(StoreDamaged):
                async with names_of(coordinator, 2, second, source.begin_anew):
                    pass
            with pytest.raises(ReplicaIsBehind):
                async with names_of(coordinator, 2, second):
                    pass

    run(main)


def test_a_checkpoint_is_read_by_those_who_opened_it_within_its_bounds() -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator, AsyncExitStack() as stack:
            disk = SimDisk(1)
            store = await trimmed_names(stack, coordinator, disk)
            service = NamesService(store, checkpoints=checkpoint_group(store.metadata, disk, InlineOffload()))
            clients = [EmbeddedEngine(service, descriptors=False) for _ in range(CHECKPOINTS_OPEN_MAX + 1)]
            client = clients[0]
            with pytest.raises(SessionLost):
                await client.call(m.ReadCheckpoint(0, 1))
            opened = await ask(client, m.OpenCheckpoint(), m.CheckpointOpened)
            for offset, length in ((-1, 1), (opened.file_bytes + 1, 1), (0, 0), (0, CHECKPOINT_PIECE_BYTES + 1)):
                with pytest.raises(InvalidArgument):
                    await client.call(m.ReadCheckpoint(offset, length))
            assert (await client.call(m.ReadCheckpoint(opened.file_bytes, 1))).body.joined() == b""
            await bind(store, "20")
            await trio.sleep(2)
            assert (await ask(clients[1], m.OpenCheckpoint(), m.CheckpointOpened)).sequence > opened.sequence
            assert len((await client.call(m.ReadCheckpoint(0, 1 << 20))).body.joined()) == opened.file_bytes
            for other in clients[2:-1]:
                await other.call(m.OpenCheckpoint())
            with pytest.raises(EngineBusy):
                await clients[-1].call(m.OpenCheckpoint())
            await client.aclose()
            await clients[-1].call(m.OpenCheckpoint())
            for other in clients:
                await other.aclose()

    run(main)


def test_names_without_replicas_refuse_their_requests() -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator, AsyncExitStack() as stack:
            store = await trimmed_names(stack, coordinator, SimDisk(1))
            client = EmbeddedEngine(NamesService(store), descriptors=False)
            for request in (m.OpenCheckpoint(), m.ReadCheckpoint(0, 1)):
                assert type(request) in OF_REPLICAS
                with pytest.raises(UnsupportedVersion):
                    await client.call(request)

    run(main)
