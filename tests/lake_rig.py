"""A small lake in this process: members on simulated disks, names without content, a coordinator in memory.

Chunks are mirrored: at protection 1+1 the data shard and the parity shard of a chunk are both its bytes.  So tests need
no erasure code, and every rule about homes, tables and generations is that of any protection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import trio

from engine.chunks.manifests import HeldBlob
from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.lake_gc import LakeGc, LakeGcReport
from engine.lake_upkeep.lake_upkeep import LakeUpkeep, UpkeepSettings
from engine.lake_upkeep.other_shards import NO_OTHER_SHARDS
from engine.members.ports import Got, NewChunk, Wanted
from engine.namespace.buckets import find_bucket
from engine.namespace.removal import remove
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.changes import bind_changes
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from engine.store.store import Store
from engine.tables.views import Transaction
from engine.uploads.lifecycle import UploadRef, put_part
from lakefs.cluster.members import Member
from lakefs.cluster.placing import first_table, next_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import Table, members_to_ask
from lakefs.cluster.table_format import pack
from lakefs.content.manifest import CutKind, build
from lakefs.content.verify import granule_crcs
from lakefs.errors import ChunkNotFound, EngineUnreachable, LakeError, SessionLost
from lakefs.host.offload import InlineOffload
from lakefs.ids import BlobId, Buffer, ChunkId, GcGeneration, MemberId, RingEpoch, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.contract.engines import LAKE
from tests.held_open import Process
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.names_rig import names_store
from tests.shards import Shard, drop, listed, offer, read, set_epoch, store
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import PLAIN, ask, change, client_of, good, run, simulated_store

T = TypeVar("T")
MIRRORED = Protection(1, 1)
Hook = Callable[[MemberId, m.Request], Awaitable[Reply | None]]
"""Runs before a member's request is served; with a reply, or when it raises, the request is not served."""


async def serve(member: MemberId, request: m.Request) -> Reply | None:
    """Let the member serve the request."""
    return None


def member_id(index: int) -> MemberId:
    return MemberId(bytes((index,)) * 16)


def member(index: int) -> Member:
    return Member(member_id(index), 1 << 40, machine=f"machine {index}")


@dataclass
class MemberProcess:
    """A member: its disk, and its store while it runs."""

    disk: SimDisk = field(default_factory=SimDisk)
    process: Process | None = None
    store: Store | None = None
    client: EmbeddedEngine | None = None


class LocalMembers:
    """`Members` over stores in this process."""

    def __init__(self, tables: list[Table], nursery: trio.Nursery) -> None:
        self.tables: list[Table] = tables
        self._nursery = nursery
        self.generation = GcGeneration(1)
        self.processes: dict[MemberId, MemberProcess] = {}
        self.hook: Hook = serve
        self.sent: list[tuple[MemberId, m.Request]] = []

    def is_up(self, member: MemberId) -> bool:
        return self.processes[member].client is not None

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        self.sent.append((member, request))
        reply = await self.hook(member, request)
        return await self.client(member).call(request, body) if reply is None else reply

    def client(self, member: MemberId) -> EmbeddedEngine:
        """Return a member's client.  EngineUnreachable while it is away."""
        client = self.processes[member].client
        if client is None:
            raise EngineUnreachable("the member is away", subject=member.hex())
        return client

    async def start(self, member: MemberId, generation: GcGeneration) -> None:
        """Start a member on its disk, and bring it the generation as a connection does."""
        process = self.processes.setdefault(member, MemberProcess())
        process.process = Process()
        process.store = await self._nursery.start(process.process.run, simulated_store(process.disk, cluster_id=LAKE))
        process.client = client_of(process.store)
        newest = self.tables[0]
        await set_epoch(process.client, newest.ring_epoch, pack(newest), generation)

    async def stop(self, member: MemberId) -> None:
        """Stop a member cleanly."""
        process = self.processes[member]
        ended, process.process, process.store, process.client = process.process, None, None, None
        if ended is not None:
            await ended.stop()


class MirroredStripes:
    """`Stripes` at 1+1, over `LocalMembers`."""

    def __init__(self, members: LocalMembers) -> None:
        self.members = members
        self.unreadable: set[ChunkId] = set()
        self.reads: list[ChunkId] = []

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        table = self.members.tables[0]
        return [min([await self._length(table, generation, chunk, n) for n in (0, 1)]) for chunk in chunks]

    async def _length(self, table: Table, generation: GcGeneration, chunk: ChunkId, number: int) -> int:
        client = self.members.client(table.homes(chunk)[number])
        shard = Shard(chunk, number, b"")
        return (await offer(client, shard, epoch=table.ring_epoch, generation=generation))[0]

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        table = self.members.tables[0]
        fresh: list[bool] = []
        for new in chunks:
            made = [
                await store(
                    self.members.client(home),
                    Shard(new.chunk, number, bytes(new.payload)),
                    epoch=table.ring_epoch,
                    generation=generation,
                )
                for number, home in enumerate(table.homes(new.chunk))
            ]
            fresh.append(any(each == [True] for each in made))
        return fresh

    async def lengths(self, chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        raise NotImplementedError("gc knows the lengths of what it reads")

    async def read(self, wanted: Sequence[Wanted]) -> list[Got | LakeError]:
        return [await self._read(each.chunk) for each in wanted]

    async def _read(self, chunk: ChunkId) -> Got | LakeError:
        self.reads.append(chunk)
        for number in (0, 1):
            for member in members_to_ask(self.members.tables, chunk, number):
                if chunk in self.unreadable:
                    continue
                with suppress(EngineUnreachable, ChunkNotFound):
                    (payload,) = await read(self.members.client(member), Shard(chunk, number, b""))
                    return Got(0, memoryview(payload), granule_crcs(payload), len(payload))
        return ChunkNotFound("no shard of the chunk is found", subject=chunk.hex())


class SmallLake:
    """Members, names and a coordinator; made by `small_lake`."""

    def __init__(self, coordinator: MemoryCoordinator, nursery: trio.Nursery, count: int, batch: int) -> None:
        self.coordinator = coordinator
        self.state = LakeState(coordinator)
        self.names_disk = SimDisk()
        self._nursery = nursery
        self._batch = batch
        self.members = LocalMembers([first_table(MIRRORED, [member(index) for index in range(count)])], nursery)
        self.stripes = MirroredStripes(self.members)
        self.clock = SimClock()
        self.names: KeyedStore
        self.client: EmbeddedEngine
        self.gate: BindGate
        self.joined: JoinedGeneration
        self.settings = UpkeepSettings(name="small")
        self.others = NO_OTHER_SHARDS
        self.upkeep: LakeUpkeep
        self.gc: LakeGc
        self._names_process = Process()

    # --- processes ---------------------------------------------------------------------------------

    async def start_names(self) -> None:
        """Start the names on their disk."""
        self._names_process = Process()
        self.names = await self._nursery.start(self._names_process.run, names_store(self.names_disk))
        self.gate = BindGate()
        self.joined = JoinedGeneration(self.names.metadata, self.gate)
        self.upkeep = LakeUpkeep(
            self.coordinator,
            self.members,
            self.stripes,
            self.names,
            self.gate,
            self.joined,
            InlineOffload(),
            replace(self.settings, gc_batch=self._batch),
            others=self.others,
        )
        self.gc = self.upkeep.gc
        service = NamesService(self.names, gate=self.gate, upkeep=self.upkeep.requests, more_status=self.upkeep.status)
        self.client = EmbeddedEngine(service, descriptors=False)

    async def stop_names(self, *, crash: bool = False) -> None:
        """Stop the names; sessions and leases end.  After a crash their disk has what was synced."""
        await self._names_process.stop(crash=crash)
        if crash:
            self.names_disk = self.names_disk.crash()

    async def register(self, index: int) -> None:
        """Record a member with the coordinator."""
        domains = "sda", f"machine {index}"
        await self.state.register(MemberRecord(member_id(index), (f"member {index}",), 1 << 40, domains))

    async def restart(self, index: int) -> None:
        """Restart a member; it forgets marks and touches."""
        await self.members.stop(member_id(index))
        await self.members.start(member_id(index), await self.state.generation())

    async def next_epoch(self, *indexes: int, at_once: bool = True) -> Table:
        """Make the next ring epoch, of these members; members learn it, heads have it at once."""
        last = self.members.tables[0]
        table = next_table(last, [member(index) for index in indexes], at_once=at_once)
        assert await self.state.next_epoch(last.ring_epoch, pack(table)) == table.ring_epoch
        self.members.tables.insert(0, table)
        for index in indexes:
            if member_id(index) not in self.members.processes:
                await self.members.start(member_id(index), await self.state.generation())
        for process in self.members.processes.values():
            if process.client is not None:
                await set_epoch(process.client, table.ring_epoch, pack(table))
        return table

    async def retire(self) -> None:
        """Retire the oldest epoch."""
        oldest = self.members.tables.pop()
        assert await self.state.retire_epoch(oldest.ring_epoch, shards=await self.state.names_shards())

    async def move_strays(self) -> None:
        """Move each shard that is not at its home of the newest epoch, as the walker does (rule 4)."""
        table = self.members.tables[0]
        generation = await self.state.generation()
        for member, process in self.members.processes.items():
            if process.client is None:
                continue
            for shard in await listed(process.client):
                home = table.homes(shard.chunk)[shard.number]
                if home == member:
                    continue
                (payload,) = await read(process.client, shard)
                copy, given = shard.with_payload(payload), generation
                await store(self.members.client(home), copy, epoch=table.ring_epoch, generation=given)
                while (kept := await drop(process.client, shard, touched=given, epoch=table.ring_epoch)) != [0]:
                    given = GcGeneration(kept[0])  # touched since: the copy too, which may have been swept
                    await store(self.members.client(home), copy, epoch=table.ring_epoch, generation=given)

    # --- content -----------------------------------------------------------------------------------

    async def store_chunks(self, chunks: Sequence[tuple[ChunkId, bytes]], generation: GcGeneration) -> None:
        """Store chunks as a head does for a session of that generation: what is answered as present is not sent."""
        for chunk, payload in chunks:
            if not (await self.stripes.offer(generation, [chunk]))[0]:
                new = NewChunk(chunk, memoryview(payload), granule_crcs(payload))
                await self.stripes.store(generation, [new])

    async def bind(self, key: str, blob: bytes, generation: int, *, size: int = 1, epoch: int | None = None) -> None:
        """Bind a key as names do for a head, to what was answered in a generation and an epoch.  SessionLost."""

        def decide(txn: Transaction) -> list[m.NameResult]:
            self.gate.retire_below(self.members.tables[-1].ring_epoch)
            newest = self.members.tables[0].ring_epoch
            self.gate.check(m.Answered(generation, newest if epoch is None else epoch))
            return bind_changes(txn, [change(key, blob)], [HeldBlob(BlobId(blob), size, blob[0])], 1)

        results, sequence = await self.names.metadata.commit(decide)
        good(m.NameResults(results))
        await self.names.metadata.wait_durable(sequence)

    async def put(self, key: str, *payloads: bytes, generation: int | None = None) -> bytes:
        """Put an object of these chunks as a head does; returns its blob."""
        blob, chunks = layout(payloads)
        known = GcGeneration(generation or max(1, await self.state.generation()))
        while True:
            await self.store_chunks(chunks, known)
            try:
                await self.bind(key, blob, known, size=sum(map(len, payloads)))
            except SessionLost:
                known = GcGeneration(max(1, await self.state.generation()))
            else:
                return blob

    async def delete(self, *keys: str) -> None:
        await ask(self.client, m.DeleteNames([("bkt", key) for key in keys]), m.NameResults)

    async def copy(self, key: str, to: str) -> None:
        good(await ask(self.client, m.Copy("bkt", key, "bkt", to), m.NameResults))

    async def rename(self, key: str, to: str) -> None:
        good(await ask(self.client, m.Rename("bkt", key, "bkt", to), m.NameResults))

    async def lease(self, key: str) -> int:
        """Open an object; returns its lease."""
        (result,) = (await ask(self.client, m.OpenObjects([("bkt", key)], lease_inline=True), m.OpenResults)).results
        assert result.opened is not None
        assert result.opened.lease
        return result.opened.lease

    async def begin_upload(self, key: str) -> bytes:
        """Begin an upload to a key of the bucket; returns its id."""
        return (await ask(self.client, m.UploadCreate("bkt", key, PLAIN), m.UploadStat)).upload

    async def record_part(self, upload: bytes, blob: bytes, generation: int = 1 << 32) -> None:
        """Record part 1 of an upload to `upload`, as names do for a head.  SessionLost."""

        def decide(txn: Transaction) -> None:
            self.gate.check(m.Answered(generation, self.members.tables[0].ring_epoch))
            ref = UploadRef(find_bucket(txn, "bkt"), "upload", upload)
            put_part(txn, ref, 1, HeldBlob(BlobId(blob), 1, blob[0]), bytes(16), {}, 1)

        _, sequence = await self.names.metadata.commit(decide)
        await self.names.metadata.wait_durable(sequence)

    async def remove_without_waiting(self, key: str) -> int:
        """Remove a name; returns the sequence of the removal, which is not durable yet."""

        def decide(txn: Transaction) -> None:
            remove(txn, find_bucket(txn, "bkt"), key, m.NO_CONDITION, 1)

        return (await self.names.metadata.commit(decide, durable=False))[1]

    async def collect(self) -> LakeGcReport:
        return await self.gc.run()

    async def shards(self) -> set[tuple[MemberId, ChunkId, int]]:
        """Return all shards that members have which are up."""
        return {
            (member, shard.chunk, shard.number)
            for member, process in self.members.processes.items()
            if process.client is not None
            for shard in await listed(process.client)
        }

    async def chunks(self) -> set[ChunkId]:
        """Return all chunks of which some member has a shard."""
        return {chunk for _, chunk, _ in await self.shards()}

    async def is_readable(self, *payloads: bytes) -> bool:
        """Return True if all chunks of an object can be read, manifest included."""
        _, chunks = layout(payloads)
        for chunk, payload in chunks:
            (got,) = await self.stripes.read([Wanted(chunk, 0)])
            if isinstance(got, LakeError) or bytes(got.payload) != payload:
                return False
        return True


def layout(payloads: Sequence[bytes]) -> tuple[bytes, list[tuple[ChunkId, bytes]]]:
    """Return the blob of an object of these chunks, and all its chunks, manifests too."""
    chunks = [(data_chunk_id(payload), payload) for payload in payloads]
    tree = build(CutKind.FIXED, [(chunk, len(payload)) for chunk, payload in chunks])
    return tree.blob, [*chunks, *tree.manifests]


@asynccontextmanager
async def small_lake(count: int = 3, *, batch: int = 4) -> AsyncIterator[SmallLake]:
    """A lake of so many members at 1+1, its names started, in generation 1; gc walks `batch` names at a time."""
    async with memory_coordinator() as coordinator, trio.open_nursery() as nursery:
        lake = SmallLake(coordinator, nursery, count, batch)
        assert await lake.state.next_epoch(RingEpoch(0), pack(lake.members.tables[0])) == 1
        assert await lake.state.advance_generation(GcGeneration(0)) == 1
        for index in range(count):
            await lake.members.start(member_id(index), GcGeneration(1))
            await lake.register(index)
        await lake.start_names()
        try:
            yield lake
        finally:
            await lake.stop_names()
            for member in [*lake.members.processes]:
                await lake.members.stop(member)


# --- short ways ---------------------------------------------------------------------------------------


async def old(lake: SmallLake) -> None:
    """Let whatever is there become as old as anything may be."""
    for _ in range(3):
        await lake.collect()


def with_lake(main: Callable[[SmallLake], Awaitable[None]], count: int = 3) -> None:
    """Run a test with a small lake."""

    async def opened() -> None:
        async with small_lake(count) as lake:
            await main(lake)

    run(opened)


async def with_garbage(lake: SmallLake) -> set[tuple[MemberId, ChunkId, int]]:
    """Make content that stays and as much that is old garbage in two cycles; return the shards of the garbage."""
    for number in range(20):
        await lake.put(f"kept {number}", b"kept %d" % number)
        await lake.put(f"gone {number}", b"gone %d" % number)
    await lake.collect()
    await lake.delete(*[f"gone {number}" for number in range(20)])
    garbage = {data_chunk_id(b"gone %d" % number) for number in range(20)}
    return {shard for shard in await lake.shards() if shard[1] in garbage}


async def only_kept(lake: SmallLake) -> None:
    """All that is named is readable, and in some cycles all else is gone."""
    assert all([await lake.is_readable(b"kept %d" % number) for number in range(20)])
    await old(lake)
    assert await lake.chunks() == {data_chunk_id(b"kept %d" % number) for number in range(20)}
    assert all([await lake.is_readable(b"kept %d" % number) for number in range(20)])
