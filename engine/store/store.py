"""One open store: its parts, and the operations that use all of them.  `engine.store.opening` makes and stops it.

Rules kept here:
- No room is freed before the walk through the index has ended, nor while a damaged index cannot be rebuilt.

`Store` has no network and no frames: `engine.requests.table` handles messages on top of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.chunks.chunk_store import Chunks
from engine.chunks.manifests import Manifests
from engine.chunks.payload import PayloadMemory
from engine.chunks.shards import TAKES_NOTHING, Shards
from engine.fabric.engine_fabric import EngineFabric
from engine.format.sizes import StoreSizes
from engine.fsck.check import check_store
from engine.fsck.damage_report import damage_report
from engine.keyed.upkeep import KeyedUpkeep
from engine.metadata.recovery import INDEX_FOLDER
from engine.segments.segment_store import Segments
from engine.sessions.lendings import Lendings
from engine.store.keyed_store import KeyedStore
from engine.superblock.reserve import Reserve
from engine.tiers.dram_filler import Dram
from engine.tiers.dram_source import SegmentSource
from engine.tiers.dram_tier import DramTier
from engine.tiers.shared_index import SharedIndex
from engine.upkeep.compaction import Compactor
from engine.upkeep.gc import Collector, CollectReport, CollectTotals
from engine.upkeep.scrub import Scrubber
from engine.upkeep.shard_gc import ShardCollector
from lakefs.errors import IndexDamaged, StoreReadOnly
from lakefs.host.buffers import BufferPool
from lakefs.ids import Sequence
from lakefs.limits import COMPACT_SHARE
from lakefs.ports import Disk, Offload
from lakefs.wire.messages import FEATURE_FABRIC, SHARED_BY_ENGINES


@dataclass(frozen=True)
class Opening:
    """One opening of a store: its boot id, and the journal group up to which it was recovered."""

    boot: bytes
    recovered: Sequence


@dataclass(frozen=True)
class Member:
    """The parts of a store that is a member of a lake: its shards, and their gc."""

    shards: Shards
    collector: ShardCollector
    opening: Opening


@dataclass(kw_only=True)
class Store(KeyedStore):
    """The parts of an open store: those of its names and keys, and those of its content."""

    disk: Disk
    offload: Offload
    reserve: Reserve
    segments: Segments
    chunks: Chunks
    manifests: Manifests
    collector: Collector
    scrubber: Scrubber
    compactor: Compactor
    payload_memory: PayloadMemory
    buffers: BufferPool
    sizes: StoreSizes
    member: Member | None = None
    """None in the store of one engine: it keeps no shards."""
    collected: CollectTotals = field(default_factory=CollectTotals)
    lent: Lendings = field(init=False)
    shared_index: SharedIndex | None = None
    clean_before: int | None = None
    """Sequence at which the last boot stopped cleanly; None if it did not."""
    at_clean_stop: list[Callable[[Sequence], None]] = field(default_factory=list)
    """Called in a thread with the last sequence, before the superblock says "clean"."""
    after_collecting: Callable[[], None] | None = None
    """Called in a thread when a cycle of `collect` has ended."""
    leaving: AsyncExitStack = field(default_factory=AsyncExitStack)
    fabric: EngineFabric = field(default_factory=lambda: EngineFabric(None, "it is off"))
    dram: Dram = field(init=False)
    keyed_upkeep: KeyedUpkeep = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lent = Lendings(self.offload)
        self.keyed_upkeep = KeyedUpkeep(
            self.metadata,
            self.keyed,
            self.clock,
            batch=self.sizes.gc_batch,
            without_spaces=self.features.end_unused_spaces,
        )
        self.use_tier(None)

    def use_tier(self, tier: DramTier | None) -> None:
        """Put the DRAM tier in front of the segments; None: use no tier."""
        self.dram = Dram(tier, SegmentSource(self.metadata, self.segments, self.quarantine), self.offload)

    @property
    def offered(self) -> int:
        """See `NamesStore.offered`."""
        return super().offered | SHARED_BY_ENGINES | (FEATURE_FABRIC if self.fabric.is_on else 0)

    @property
    def read_only_because(self) -> str:
        """The reason why the store takes no writes; empty while it does."""
        reason = super().read_only_because
        if reason:
            return reason
        if self.segments.gate.reason:
            reason = self.segments.gate.reason
            return f"a write or sync of a segment failed ({reason}); mend that, and restart the engine"
        return ""

    @property
    def is_collecting(self) -> bool:
        """True while gc or compaction runs."""
        return self.collector.running or self.compactor.running

    async def status(self) -> dict[str, Any]:
        """Return the state for people and scripts; JSON-able."""
        await self._look_at_lock()
        free, total = await self.offload.run(lambda: (self.disk.free_bytes(), self.disk.total_bytes()))
        found = await super().status()
        if self.member is not None and not found["reason"] and not self.member.shards.may_take():
            found["reason"] = TAKES_NOTHING
        return {
            **found,
            "data": str(Path(self.disk.local_path(INDEX_FOLDER)).parent),
            "disk": {"free_bytes": free, "total_bytes": total, "reserve_bytes": self.reserve.held_bytes},
            "segments": {
                "count": len(self.segments.register.kinds),
                "allocated_bytes": await self.segments.room.allocated_bytes(),
                "healed_reads": self.segments.reader.healed_reads,
                "damaged_chunks": len(self.quarantine),
            },
            "reads": self.segments.batches.statistics(),
            "buffers": {"in_use": self.buffers.in_use, "capacity": self.buffers.capacity},
            "lent_memory": self.lent.statistics(),
            "pins": self.segments.pins.statistics(),
            "keyed": self.keyed.statistics(),
            "dram": self.dram.statistics(),
            "rdma": self.fabric.statistics(),
            "gc_running": self.collector.running,
            "scrub": self.scrubber.status(),
            "compaction_running": self.compactor.running,
            "hot_index": self.shared_index.statistics() if self.shared_index is not None else {"state": "off"},
            "keyed_index": self.keyed_index.statistics() if self.keyed_index is not None else {"state": "off"},
        }

    async def collect(self, share: float = COMPACT_SHARE) -> CollectReport:
        """Run gc, refill the reserve, then compact with the room left; raises the errors of gc and compaction."""
        # gc would free chunks that an incomplete index does not show, so it waits for the walk through the index.
        if not self.index_looked_at.is_set():
            await self.index_looked_at.wait()
        if self.index_damage is not None:
            raise IndexDamaged(
                f"nothing is freed: the index is damaged and cannot be rebuilt ({self.index_damage.message})",
                subject="index",
            )
        self.keyed.begin_collecting()
        try:
            try:
                report = await self.collector.run()
            finally:
                await self.offload.run(self.reserve.restore)
            compaction = await self.compactor.run(share)
        except IndexDamaged:
            self.metadata.index_suspect.set()
            raise
        after = await self.segments.room.allocated_bytes()
        done = CollectReport(**{**asdict(report), "disk_bytes_after": after}, compaction=compaction)
        self.collected.add(done, self.clock.wall_ns())
        if self.after_collecting is not None:
            await self.offload.run(self.after_collecting)
        return done

    async def _look_at_lock(self) -> None:
        """Stop writing if another process may hold the store now; the next creation of a file would notice it too."""
        try:
            await self.offload.run(self.disk.check_lock)
        except StoreReadOnly as error:
            self.metadata.stop_writing(error.message)

    async def check(self, *, full: bool) -> dict[str, Any]:
        """Run fsck on the open store; returns a JSON-able report."""
        return await check_store(
            self.metadata, self.segments, self.chunks, self.manifests, self.features.has, full=full
        )

    async def damaged(self) -> list[dict[str, Any]]:
        """Return the quarantine: each damaged chunk, and the objects that it belongs to; JSON-able."""
        return await damage_report(self.metadata, self.manifests, self.quarantine)
