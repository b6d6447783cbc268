"""A small lake for tests of the walker: real members on simulated disks, a writer, and a check of everything.

Its tables have four rows, so that a few chunks meet in each.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import cycle

import trio

from engine.coordinator.lake_state import LakeState
from engine.format.layouts import Table as StoreTable, unpack_chunk_record
from engine.format.shards import shard_key
from engine.segments.files import segment_path
from engine.store.store import Store
from engine.walker.walker import Walker
from engine.walker.walker_pace import Pace
from engine.walker.walker_report import WalkReport
from lakefs.cluster import placing
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.members import Member, Standing
from lakefs.cluster.placing import first_table, next_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.errors import EngineUnreachable
from lakefs.host.offload import InlineOffload
from lakefs.ids import Buffer, ChunkId, ChunkKind, GcGeneration, MemberId, Partition, RingEpoch, chunk_id_of, id_text
from lakefs.limits import GRANULE_BYTES, KIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient, Reply
from tests.contract.engines import LAKE
from tests.memory_coordinator import MemoryCoordinator
from tests.shards import Shard, drop, listed, read, set_epoch, store
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import client_of, simulated_store

PROTECTION = Protection(4, 2)
CODE = ErasureCode(4, 2)
BITS = 2
PARTITIONS = [Partition(number) for number in range(1 << BITS)]
WAYS = [
    [PARTITIONS],
    [[one] for one in PARTITIONS],
    [PARTITIONS[::3], PARTITIONS[1:3]],
    [PARTITIONS[:3], PARTITIONS[3:]],
]
"""Ways to walk all partitions: some at once."""
SIZES = (1, 5_000, GRANULE_BYTES, GRANULE_BYTES + 1, 2 * GRANULE_BYTES, 200 * KIB, 300_000)
Hook = Callable[[MemberId, m.Request], Awaitable[None]]


def member_id(number: int) -> MemberId:
    return MemberId(bytes([number + 1]) * 16)


def member(number: int, state: Standing = Standing.IN) -> Member:
    return Member(member_id(number), 1 << 40, machine=f"host {number}", state=state)


def table_of(count: int) -> Table:
    """Return the first table of a lake of so many members."""
    members = tuple([member(number) for number in range(count)])
    return _first(members, placing._partition_bits(members))


@cache
def _first(members: tuple[Member, ...], partition_bits: int) -> Table:
    """Make a table once; some tests let tables have fewer partitions, and theirs are not those of others."""
    table = first_table(PROTECTION, members)
    assert table.partition_bits == partition_bits
    return table


@cache
def _next(last: Table, members: tuple[Member, ...], ring_epoch: RingEpoch) -> Table:
    table = next_table(last, members, at_once=True, accept_loss=True)
    assert table.partition_bits == last.partition_bits, "a test made tables small after the first one"
    return replace(table, ring_epoch=ring_epoch)


def small(table: Table) -> Table:
    """Return the table with four of its rows."""
    return replace(table, rows=table.rows[: 1 << BITS], partition_bits=BITS)


class Lake:
    """Members, as one process reaches them (`engine.members.ports.Members`), and what a writer has stored."""

    def __init__(self, nursery: trio.Nursery, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.whole_tables = [table_of(count)]
        self.generation_known = GcGeneration(1)
        self.coordinator = MemoryCoordinator()
        self.state = LakeState(self.coordinator)
        self.stores: dict[MemberId, Store] = {}
        self.clients: dict[MemberId, EngineClient] = {}
        self.disks: dict[MemberId, SimDisk] = {}
        self.away: set[MemberId] = set()
        self.content: dict[ChunkId, bytes] = {}
        self.before: list[Hook] = []
        """Called before each request, and after it."""
        self.after: list[Hook] = []
        self.nursery = nursery
        self._ways = cycle(WAYS)
        self._ends: dict[MemberId, tuple[trio.Event, trio.Event]] = {}

    # --- the port --------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Table]:
        return [small(table) for table in self.whole_tables]

    @property
    def generation(self) -> GcGeneration:
        return self.generation_known

    def is_up(self, member: MemberId) -> bool:
        return member in self.clients and member not in self.away

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        for hook in list(self.before):
            await hook(member, request)
        if not self.is_up(member):
            raise EngineUnreachable(f"member {member.hex()} is away")
        reply = await self.clients[member].call(request, body)
        for hook in list(self.after):
            await hook(member, request)
        return reply

    # --- members ---------------------------------------------------------------------------------------

    async def start(self, member: MemberId) -> None:
        """Start a member, on its disk or an empty one; it learns the generation, and no epoch."""
        await self.nursery.start(self._hold, member)
        await set_epoch(self.clients[member], generation=max(1, await self.state.generation()))

    async def _hold(self, member: MemberId, task_status: trio.TaskStatus[None]) -> None:
        """Hold a member open, in a task of its own, until it is stopped."""
        stop, stopped = self._ends[member] = trio.Event(), trio.Event()
        disk = self.disks.setdefault(member, SimDisk(self.rng.randrange(1 << 30)))
        async with simulated_store(disk, cluster_id=LAKE) as opened:
            self.stores[member], self.clients[member] = opened, client_of(opened)
            task_status.started()
            await stop.wait()
            del self.stores[member], self.clients[member]
        stopped.set()

    async def stop(self, member: MemberId) -> None:
        stop, stopped = self._ends.pop(member)
        stop.set()
        await stopped.wait()

    async def lose(self, member: MemberId) -> None:
        """Replace a member's device by an empty one."""
        await self.stop(member)
        del self.disks[member]
        await self.start(member)

    async def change(self, *members: Member, retire: bool = False) -> None:
        """Make the next epoch, of these members; the one before stays until it is retired."""
        newest = self.whole_tables[0]
        table = _next(newest, members, RingEpoch(newest.ring_epoch + 1))
        self.whole_tables = [table] if retire else [table, *self.whole_tables]

    async def advance_generation(self) -> GcGeneration:
        known = await self.state.generation()
        generation = await self.state.advance_generation(known)
        assert generation is not None
        self.generation_known = generation
        return generation

    # --- content ---------------------------------------------------------------------------------------

    def new_chunk(self, payload: bytes, kind: ChunkKind = ChunkKind.DATA) -> list[Shard]:
        """Return the shards of a chunk, which has to be in the lake from now on."""
        chunk = chunk_id_of(kind, payload)
        self.content[chunk] = payload
        return shards_of(chunk, payload)

    async def write_bytes(self, payload: bytes, *, generation: int = 1, kind: ChunkKind = ChunkKind.DATA) -> ChunkId:
        """Store a chunk at its homes."""
        shards = self.new_chunk(payload, kind)
        for shard in shards:
            await self.put(self.home(shard), shard, generation)
        return shards[0].chunk

    async def write(self, *sizes: int, generation: int = 1, kind: ChunkKind = ChunkKind.DATA) -> list[ChunkId]:
        """Store chunks of these sizes, each of random bytes, at their homes."""
        payloads = [self.rng.randbytes(size) for size in sizes]
        return [await self.write_bytes(payload, generation=generation, kind=kind) for payload in payloads]

    def home(self, shard: Shard) -> MemberId:
        return self.tables[0].homes(shard.chunk)[shard.number]

    def shard(self, chunk: ChunkId, number: int) -> Shard:
        return next(shard for shard in shards_of(chunk, self.content[chunk]) if shard.number == number)

    async def put(self, member: MemberId, shard: Shard, generation: int = 1) -> None:
        await store(self.clients[member], shard, generation=generation, epoch=EPOCH_OF_WRITERS)

    async def take(self, shard: Shard, member: MemberId | None = None) -> None:
        """Take a shard away from its home, or from another member."""
        client = self.clients[member or self.home(shard)]
        assert await drop(client, shard, touched=m.GENERATION_MAX, epoch=EPOCH_OF_WRITERS) == [0]

    async def spoil(self, shard: Shard, member: MemberId | None = None) -> None:
        """Flip a bit of a shard on the medium of its home, or of another member."""
        member = member or self.home(shard)
        opened = self.stores[member]
        with opened.metadata.view() as view:
            value = view.get(StoreTable.CHUNKS, shard_key(*shard.name))
        assert value is not None
        record = unpack_chunk_record(value)
        path = segment_path(record.segment, opened.segments.register.kinds[record.segment])
        self.disks[member].flip_bit(path, record.offset, 3)

    async def lie(self, shard: Shard, member: MemberId | None = None) -> None:
        """Let a member have other bytes, with checksums that fit them."""
        await self.take(shard, member)
        payload = bytearray(shard.payload)
        payload[len(payload) // 2] ^= 1
        await self.put(member or self.home(shard), shard.with_payload(bytes(payload)))

    # --- the walk --------------------------------------------------------------------------------------

    def walker(self, *, page: int = 3, pace: Pace | None = None) -> Walker:
        return Walker(self, self.state, CODE, InlineOffload(), pace or Pace(SimClock()), page=page)

    async def walk(self, *others: MemberId, deep: bool = False, page: int = 3) -> WalkReport:
        """Walk all partitions, each time in other parts; return the sum."""
        walker, report = self.walker(page=page), WalkReport()
        for partitions in next(self._ways):
            walked = await walker.walk(partitions, others=others, deep=deep)
            for one in walked.reports.values():
                report.add(one)
        return report

    async def lists(self) -> dict[tuple[str, int], list[MemberId]]:
        """Return where each shard is."""
        found: dict[tuple[str, int], list[MemberId]] = {}
        for number, client in self.clients.items():
            for shard in await listed(client, limit=1000):
                found.setdefault((id_text(shard.chunk), shard.number), []).append(number)
        return found

    async def check(self) -> None:
        """Check that every shard of every chunk is at its home, with its bytes, and nothing anywhere else."""
        expected = {}
        for chunk, payload in self.content.items():
            for shard in shards_of(chunk, payload):
                expected[id_text(chunk), shard.number] = [self.home(shard)]
        assert await self.lists() == expected
        for chunk, payload in self.content.items():
            for shard in shards_of(chunk, payload):
                assert await read(self.clients[self.home(shard)], shard) == [shard.payload]


EPOCH_OF_WRITERS = 1 << 40
"""Writers of these tests know every table, unless a test is about that."""


def shards_of(chunk: ChunkId, payload: bytes) -> list[Shard]:
    """Return all shards of a chunk."""
    size, length = CODE.shard_bytes(len(payload)), len(payload)
    parity = [bytearray(size) for _ in range(CODE.parity)]
    CODE.encode(payload, parity)
    data = [Shard(chunk, n, payload[n * size : (n + 1) * size], length) for n in range(CODE.data_shards(length))]
    return [*data, *(Shard(chunk, CODE.data + p, bytes(memory), length) for p, memory in enumerate(parity))]


def packed(table: Table) -> bytes:
    return pack(small(table))


@asynccontextmanager
async def lake(count: int = 6, seed: int = 0) -> AsyncIterator[Lake]:
    """A lake of so many members, all up and empty."""
    async with trio.open_nursery() as nursery:
        made = Lake(nursery, count, seed)
        try:
            for number in range(count):
                await made.start(member_id(number))
            yield made
        finally:
            with trio.CancelScope(shield=True):
                for one in list(made.clients):
                    await made.stop(one)
