"""A head in this process, over chunks in memory and names on a simulated disk; and short ways to change its lake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass

import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import LakeRecord, MemberRecord
from engine.fabric.engine_fabric import EngineFabric
from engine.format.layouts import StoreIdentity
from engine.head.head import Head, open_head
from engine.head.head_tier import HeadMemory
from engine.head.names_link import ConnectNames, NamesConnection
from engine.lake.embedded_names import embedded_names
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.members.ports import Members, Stripes
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.bucket_assigning import BucketAssigner
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from engine.tiers.tier_index import open_tier_index
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.content.manifest import CutKind, build
from lakefs.errors import LakeError
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import ChunkId, GcGeneration, MemberId, RingEpoch
from lakefs.limits import MIB
from lakefs.ports import Clock, Offload
from lakefs.wire import messages as m
from tests.memory_coordinator import MemoryCoordinator
from tests.memory_member import MemoryMember
from tests.memory_stripes import KnownState, MemoryStripes
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, change, client_of, good, run, simulated_store, store_chunks

BUFFER_BYTES = 64 * MIB
SLAB_BYTES = 9 * MIB
INDEX_ENTRIES = 1000


UpkeepOf = Callable[[KeyedStore, BindGate], LakeUpkeep]
"""Makes the upkeep of a lake, for its names."""


class Names:
    """Names that heads connect to; `lose` ends their connections, as when names restart."""

    def __init__(
        self, store: KeyedStore, upkeep_of: UpkeepOf | None = None, buckets: BucketAssigner | None = None
    ) -> None:
        self.store = store
        self.gate = BindGate(GcGeneration(1))
        self._upkeep = None if upkeep_of is None else upkeep_of(store, self.gate)
        requests, status = (None, None) if self._upkeep is None else (self._upkeep.requests, self._upkeep.status)
        self.service = NamesService(store, gate=self.gate, upkeep=requests, more_status=status, buckets=buckets)
        self._lost = trio.Event()

    @property
    def upkeep(self) -> LakeUpkeep:
        """The upkeep of the lake."""
        assert self._upkeep is not None, "these names have none"
        return self._upkeep

    def connect(self) -> AbstractAsyncContextManager[NamesConnection]:
        """Connect a client of a head; see `ConnectNames`."""
        return embedded_names(self.service, self._lost.wait)()

    def lose(self) -> None:
        """End all connections; later ones are to the names that have started again."""
        self._lost.set()
        self._lost = trio.Event()


@dataclass
class HeadAndNames:
    """A head, and the names that it stands on."""

    head: Head
    names: Names
    keepers: Callable[[], Awaitable[Sequence[EmbeddedEngine]]]
    """Returns clients of the members that keep keys."""

    def client(self, *, descriptors: bool = False) -> EmbeddedEngine:
        """Connect one more client."""
        return EmbeddedEngine(self.head, descriptors=descriptors)

    def leases(self) -> int:
        """Return the number of leases that the names keep."""
        return self.names.store.references.statistics()["leases"]


@dataclass
class Lake(HeadAndNames):
    """A head and what it stands on."""

    stripes: MemoryStripes
    known: KnownState

    async def chunk_count(self) -> int:
        """Return the number of chunks."""
        return len(self.stripes.chunks)

    def advance(self, generation: int, *, tell_head: bool = False) -> None:
        """Have the names join a gc generation; the head learns of it by itself, or at once with `tell_head`."""
        self.names.gate.join(GcGeneration(generation))
        if tell_head:
            self.known.generation = GcGeneration(generation)


@asynccontextmanager
async def head_over(
    stripes: Stripes,
    members: Members,
    upkeep_of: UpkeepOf | None = None,
    disk: SimDisk | None = None,
    *,
    clients: Mapping[MemberId, EmbeddedEngine] | None = None,
    offload: Offload | None = None,
    clock: Clock | None = None,
    slabs: int = 0,
    fabric: EngineFabric | None = None,
) -> AsyncIterator[HeadAndNames]:
    """A head over stripes, and names of its own on a simulated disk; at the end nothing is held.

    `clients`: those of the members, if they are asked for (`keepers`).  `slabs`: of its DRAM tier.  `fabric`: its RDMA.
    """

    async def keepers() -> Sequence[EmbeddedEngine]:
        return list((clients or {}).values())

    offload = offload or InlineOffload()
    async with names_store(disk) as store, tier_of(slabs, offload, store.superblock.identity, fabric) as memory:
        names = Names(store, upkeep_of)
        connect: ConnectNames = names.connect
        async with open_head(
            connect,
            stripes,
            members,
            offload=offload,
            clock=clock or store.clock,
            buffers=BufferPool(BUFFER_BYTES),
            memory=memory,
            fabric=fabric,
        ) as head:
            yield HeadAndNames(head, names, keepers)
            assert head.parts.buffers.in_use == 0, "a request's memory was not given back"
            assert head.parts.answers.held_bytes == 0, "an answer's room was not given back"


@asynccontextmanager
async def tier_of(
    slabs: int, offload: Offload, identity: StoreIdentity, fabric: EngineFabric | None = None
) -> AsyncIterator[HeadMemory]:
    """A DRAM tier of small slabs, and its index; at the end nothing is pinned."""
    if not slabs:
        yield HeadMemory()
        return
    arena = Arena(slabs, SLAB_BYTES) if fabric is None else Arena(slabs, SLAB_BYTES, registered=fabric.registered)
    with closing(DramTier(arena)) as tier:
        async with open_tier_index(tier, offload, identity, "memory", INDEX_ENTRIES) as index:
            yield HeadMemory(tier, index)
        assert tier.statistics()["pinned_bytes"] == 0, "a pin was not taken back"


@asynccontextmanager
async def lake_of(
    disk: SimDisk | None = None,
    *,
    offload: Offload | None = None,
    clock: Clock | None = None,
    slabs: int = 0,
    fabric: EngineFabric | None = None,
) -> AsyncIterator[Lake]:
    """A lake in this process, whose chunks are in memory; its only member keeps keys, and starts when it is asked."""
    async with trio.open_nursery() as nursery:
        stripes, keys = MemoryStripes(), KeysMember(nursery)
        known = KnownState(reach=keys.reach)
        coordinator = MemoryCoordinator()
        await begin_records(LakeState(coordinator), known.tables[0])
        members = MemoryMember(stripes, known)

        def upkeep_of(store: KeyedStore, gate: BindGate) -> LakeUpkeep:
            joined = JoinedGeneration(store.metadata, gate)
            return LakeUpkeep(coordinator, members, stripes, store, gate, joined, offload or InlineOffload())

        async def keepers() -> Sequence[EmbeddedEngine]:
            return [await keys.reach()]

        async with head_over(
            stripes, known, upkeep_of, disk, offload=offload, clock=clock, slabs=slabs, fabric=fabric
        ) as made:
            yield Lake(made.head, made.names, keepers, stripes, known)
        await keys.stop()


class KeysMember:
    """A member that keeps keys: an engine on a simulated disk, started when it is first asked."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._starting = trio.Lock()
        self._stopped = trio.Event()
        self._ended = trio.Event()
        self.client: EmbeddedEngine | None = None

    async def reach(self) -> EmbeddedEngine:
        """Return a client of it."""
        async with self._starting:
            if self.client is None:
                self.client = await self._nursery.start(self._run)
        return self.client

    async def stop(self) -> None:
        """Stop it, if it runs; nothing is held by then."""
        self._stopped.set()
        if self.client is not None:
            await self._ended.wait()

    async def _run(self, task_status: trio.TaskStatus[EmbeddedEngine]) -> None:
        async with simulated_store(cluster_id=b"a lake of tests.") as store:
            client = client_of(store)
            task_status.started(client)
            await self._stopped.wait()
            assert store.buffers.in_use == 0, "a member's memory was not given back"
            held = store.references.statistics()
            assert (held["sessions"], held["leases"]) == (0, 0), "a head ends its sessions and leases at members"
            await client.aclose()
        self._ended.set()


def with_lake(body: Callable[[Lake, EmbeddedEngine], Awaitable[None]]) -> None:
    """Run with a lake and a client of its head."""

    async def main() -> None:
        async with lake_of() as lake:
            client = lake.client()
            try:
                await body(lake, client)
            finally:
                await client.aclose()

    run(main)


async def begin_records(state: LakeState, table: Table) -> None:
    """Record a lake with the coordinator: its members, its first table, and gc generation 1."""
    await state.make_lake(LakeRecord(b"a lake of tests.", table.protection.data, table.protection.parity))
    for member in table.members:
        await state.register(
            MemberRecord(member.id, ("here",), member.room_bytes, (f"device {member.id.hex()}", member.machine))
        )
    assert await state.next_epoch(RingEpoch(table.ring_epoch - 1), pack(table)) == table.ring_epoch
    assert await state.advance_generation(GcGeneration(0)) == 1


async def commit(client: EmbeddedEngine, session: bytes, key: str, blob: bytes, *, end: bool = True) -> m.ObjectStat:
    (stat,) = good(await ask(client, m.Commit(session, [change(key, blob)], end_session=end), m.NameResults))
    return stat


async def exists(client: EmbeddedEngine, key: str) -> bool:
    try:
        good(await ask(client, m.StatNames([("bkt", key)]), m.NameResults))
    except LakeError:
        return False
    return True


async def store_blob(client: EmbeddedEngine, session: bytes, *payloads: bytes) -> bytes:
    """Store a blob of several chunks; return its id."""
    chunks = await store_chunks(client, session, payloads)
    pieces = [(ChunkId(chunk), len(payload)) for chunk, payload in zip(chunks, payloads, strict=True)]
    tree = build(CutKind.FIXED, pieces)
    await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
    return tree.blob
