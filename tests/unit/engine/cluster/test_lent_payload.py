"""Shards for members on this machine: they go through lent memory, over real sockets, and nothing wrong is stored."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord
from engine.host.tasks import plain_errors
from engine.members.lent_area import LentArea
from engine.members.lent_payload import LENT_FROM_BYTES, LentPayload
from engine.members.member_link import MemberClient
from engine.members.member_links import MemberLinks, connect_member, open_member_links
from engine.members.ports import NewChunk, Wanted
from engine.members.read_memory import ReadMemory, take_anew
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.store import Store
from engine.stripes.stripes import LakeStripes
from lakefs.cluster.members import Member
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.content.verify import granule_crcs
from lakefs.errors import EngineUnreachable, InvalidArgument
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import GcGeneration, MemberId, RingEpoch, data_chunk_id
from lakefs.limits import CHUNK_BYTES, GIB, MIB, PAGE_BYTES
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import Body, Reply, ServedClient
from lakefs.wire.messages import ReadChunks, Request, StoreShards
from tests.memory_coordinator import memory_coordinator
from tests.shards import Shard, store_request
from tests.store_rig import simulated_store
from tests.unit.engine.cluster.stripe_rig import LAKE, payload_of

GENERATION = GcGeneration(1)
POOL_BYTES = 64 * MIB


class Noting(Service):
    """A member that notes the stores it is asked for, and may hold them up."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.store = store
        self.stores: list[StoreShards] = []
        self.body_bytes: list[int] = []
        self.may_serve = trio.Event()
        self.may_serve.set()
        self.reads = 0
        self.cancelled_reads = 0
        self.may_read = trio.Event()
        self.may_read.set()
        self.read_bytes: list[int] = []
        """Bytes of each answer to a read that went through the socket."""
        self.is_older = False
        """It does not know of memory for reads."""

    async def serve(self, client: ServedClient, request: Request, body: Body, descriptors: Sequence[int]) -> Reply:
        if isinstance(request, StoreShards):
            self.stores.append(request)
            self.body_bytes.append(body.nbytes)
            with trio.CancelScope(shield=True):  # as a process that does not run
                await self.may_serve.wait()
        if isinstance(request, ReadChunks):
            self.reads += 1
            try:
                await self.may_read.wait()
            except trio.Cancelled:
                self.cancelled_reads += 1
                raise
            if self.is_older:
                request = msgspec.structs.replace(request, memory=0, targets=[])
            reply = await super().serve(client, request, body, descriptors)
            self.read_bytes.append(reply.body.nbytes)
            return reply
        return await super().serve(client, request, body, descriptors)


@dataclass
class Lake:
    """Members behind sockets, and stripes over them."""

    stripes: LakeStripes
    area: LentArea
    links: MemberLinks
    members: list[Noting] = field(default_factory=list)
    records: list[MemberRecord] = field(default_factory=list)
    reads: ReadMemory = field(default_factory=lambda: ReadMemory(size_bytes=MIB))

    def in_area(self, payload: bytes) -> NewChunk:
        """Return a chunk that lies in the area, as one that a head has received."""
        memory = self.area.part(len(payload))[: len(payload)]
        memory[:] = payload
        return NewChunk(data_chunk_id(payload), memory, granule_crcs(memory))


@asynccontextmanager
async def lake(
    folder: Path, addresses: str = "unix:{folder}/{number}", reads: ReadMemory | None = None, protection: str = "1+1"
) -> AsyncIterator[Lake]:
    """A lake of as many members as the protection needs, each behind a socket of this machine."""
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(memory_coordinator())
        nursery = await stack.enter_async_context(trio.open_nursery())
        state, services, servers = LakeState(coordinator), list[Noting](), list[Server]()
        members, found = list[MemberId](), list[str]()
        wanted = Protection.parse(protection)
        for number in range(wanted.width):
            store = await stack.enter_async_context(simulated_store(cluster_id=LAKE))
            services.append(Noting(store))
            servers.append(Server(services[-1], TrioNetwork(), token="secret"))
            address = addresses.format(folder=folder, number=number)
            found.append(await nursery.start(servers[-1].listen_and_serve, address))
            members.append(MemberId(store.superblock.store_id))
        table = first_table(wanted, [Member(member, GIB, member.hex()) for member in members])
        assert await state.next_epoch(RingEpoch(0), pack(table))
        records = [MemberRecord(member, (address,), GIB, ()) for member, address in zip(members, found, strict=True)]
        for record in records:
            await state.register(record)
        area = LentArea(2 * POOL_BYTES)
        parity = BufferPool(POOL_BYTES, memory=area.part(POOL_BYTES))
        connect = partial(connect_member, token="secret", area=area, reads=reads)
        async with open_member_links(coordinator, connect) as links:
            stripes = LakeStripes(links, state, InlineOffload(), parity, take_anew if reads is None else reads.take)
            yield Lake(stripes, area, links, services, records, reads or ReadMemory(size_bytes=MIB))
        for server in servers:
            await server.drain(5)
        nursery.cancel_scope.cancel()
        for service in services:
            assert service.store.buffers.in_use == 0, "a member's memory was not given back"


async def reads_back(lake: Lake, payload: bytes) -> None:
    [got] = await lake.stripes.read([Wanted(data_chunk_id(payload), len(payload))])
    assert not isinstance(got, Exception)
    assert bytes(got.payload) == payload


def test_shards_in_the_area_are_read_by_the_members_and_all_others_are_sent(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made:
            for number, length in enumerate((CHUNK_BYTES, LENT_FROM_BYTES, 100_000)):
                payload = payload_of(length, number)
                assert await made.stripes.store(GENERATION, [made.in_area(payload)]) == [True]
                await reads_back(made, payload)
            assert [member.body_bytes for member in made.members] == [[0, 0, 0]] * 2
            small, elsewhere = made.in_area(payload_of(1000, 5)), payload_of(200_000, 6)
            other = NewChunk(data_chunk_id(elsewhere), memoryview(elsewhere), granule_crcs(elsewhere))
            assert await made.stripes.store(GENERATION, [small]) == [True]
            assert await made.stripes.store(GENERATION, [other]) == [True]
            await reads_back(made, elsewhere)
            assert [member.body_bytes[3:] for member in made.members] == [[1000, 200_000]] * 2

    trio.run(main)


def test_members_that_are_reached_over_tcp_are_sent_the_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path, "tcp://127.0.0.1:0") as made:
            payload = payload_of(CHUNK_BYTES)
            assert await made.stripes.store(GENERATION, [made.in_area(payload)]) == [True]
            await reads_back(made, payload)
            assert [member.body_bytes for member in made.members] == [[CHUNK_BYTES]] * 2

    trio.run(main)


def test_a_slot_that_gets_other_bytes_before_it_was_read_is_noticed_and_nothing_is_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made:
            payload = payload_of(CHUNK_BYTES)
            chunk = made.in_area(payload)
            for member in made.members:
                member.may_serve = trio.Event()
            with pytest.raises(InvalidArgument, match="checksums"), plain_errors():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(made.stripes.store, GENERATION, [chunk])
                    while not all(member.stores for member in made.members):
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    chunk.payload[CHUNK_BYTES // 2] ^= 1
                    for member in made.members:
                        member.may_serve.set()
            assert await made.stripes.offer(GENERATION, [chunk.chunk]) == [0]

    trio.run(main)


def test_a_cancelled_store_ends_only_when_no_member_reads_its_slots_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made:
            chunk = made.in_area(payload_of(CHUNK_BYTES))
            await made.stripes.store(GENERATION, [made.in_area(payload_of(100_000, 1))])
            for member in made.members:
                member.may_serve = trio.Event()
            ended = trio.Event()

            async def put(scope: trio.CancelScope) -> None:
                with scope:
                    await made.stripes.store(GENERATION, [chunk])
                ended.set()

            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put, scope)
                while not all(len(member.stores) == 2 for member in made.members):
                    await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()
                made.members[0].may_serve.set()
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert not ended.is_set(), "the second member may still read"
                made.members[1].may_serve.set()
                with trio.fail_after(5):
                    await ended.wait()

    trio.run(main)


def test_a_connection_that_is_lost_while_a_member_reads_a_slot_ends_the_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with lake(tmp_path) as made, trio.open_nursery() as nursery:
            payload = payload_of(CHUNK_BYTES)
            chunk = made.in_area(payload)
            made.members[0].may_serve = trio.Event()
            request = store_request([Shard(chunk.chunk, 0, payload)], epoch=1)
            failed: list[EngineUnreachable] = []

            async def store(client: MemberClient) -> None:
                try:
                    await client.call(request, [chunk.payload])
                except EngineUnreachable as error:
                    failed.append(error)

            async with connect_member(made.records[0], token="secret", area=made.area) as client:
                assert isinstance(client, LentPayload)
                nursery.start_soon(store, client)
                while not made.members[0].stores:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert len(failed) == 1
            made.members[0].may_serve.set()

    trio.run(main)


def test_an_area_is_sealed_and_knows_what_lies_in_it() -> None:
    area = LentArea(10 * PAGE_BYTES)
    first, second = area.part(PAGE_BYTES + 1), area.part(PAGE_BYTES)
    assert (area.offset_of(first), area.offset_of(second), area.offset_of(second[7:9])) == (0, 8192, 8199)
    assert area.offset_of(memoryview(bytearray(9))) is None
    assert area.offset_of(b"bytes") is None
    assert area.offsets_of([second, memoryview(bytearray(9))]) is None
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(area.descriptor, PAGE_BYTES)
    second[:5] = b"12345"
    assert os.pread(area.descriptor, 5, 8192) == b"12345"


def test_buffers_of_a_pool_in_the_area_do_not_overlap() -> None:
    area = LentArea(POOL_BYTES)
    pool = BufferPool(POOL_BYTES, memory=area.part(POOL_BYTES))
    buffers = [pool.try_acquire() for _ in range(pool.capacity)]
    assert pool.try_acquire() is None
    offsets = sorted(area.offset_of(buffer.view) or 0 for buffer in buffers if buffer is not None)
    assert len(offsets) == pool.capacity
    assert all(b - a >= CHUNK_BYTES + PAGE_BYTES for a, b in itertools.pairwise(offsets))
