"""One store, open: its parts put together, its life from lock to clean stop.

    open   lock, superblock, metadata (recovery), segments (all sealed), root node; the superblock says "not clean"
    serve  commits, index and checkpoints run in tasks of `open_store`; a walk behind start-up verifies the index
    stop   segments trimmed and synced, index complete, checkpoint, superblock says "clean", lock released

Rules kept here:
- The superblock says "clean" only after everything before it in that list succeeded.
- Nothing is freed before the walk has ended, and nothing while an index that is damaged cannot be rebuilt.
- A damaged index is rebuilt from checkpoint and journal while the store serves; what cannot be answered meanwhile
  is an error, never a false "not found" that a client could take for the truth.

`Store` has no network and no frames: `service` speaks messages on top of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import trio

from engine import superblock as superblocks
from engine.buckets import initialise
from engine.check import check_store
from engine.chunks import Chunks
from engine.collect_report import CollectReport, CollectTotals
from engine.compaction import Compactor
from engine.damage_report import damage_report
from engine.dram import Dram
from engine.dram_tier import DramTier
from engine.format import ReadOnlyFeature
from engine.full_disk import telling_full, write_superblock
from engine.gc import Collector
from engine.holds import Holds
from engine.hot_index import HotIndex
from engine.index_upkeep import keep_index_whole
from engine.lendings import Lendings
from engine.manifests import Manifests
from engine.metadata import Metadata, open_metadata
from engine.pace import Writers
from engine.payloads import PayloadMemory
from engine.quarantine import Quarantine
from engine.recovery import INDEX_FOLDER
from engine.reserve import Reserve
from engine.scrub import Scrubber
from engine.segment_opening import abandoned, segments_of
from engine.segments import Segments
from engine.sizes import DEFAULT_STORE_SIZES, StoreSizes
from engine.superblock import OpenedStore, Superblock
from engine.tasks import plain_errors
from engine.upload_expiry import UploadExpiry
from engine.watch import Watchers
from lakefs.buffers import BufferPool
from lakefs.errors import IndexDamaged, LakeError, StoreReadOnly
from lakefs.ids import Sequence
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, COMPACT_SHARE, GC_GRACE_S, INFLIGHT_PER_CONNECTION
from lakefs.ports import Clock, Disk, IoQueue, Offload
from lakefs.version import VERSION
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.messages import HelloReply

_log = structlog.get_logger()


@dataclass
class Store:
    """The parts of an open store."""

    superblock: Superblock
    disk: Disk
    clock: Clock
    offload: Offload
    reserve: Reserve
    metadata: Metadata
    segments: Segments
    holds: Holds
    quarantine: Quarantine
    chunks: Chunks
    manifests: Manifests
    collector: Collector
    scrubber: Scrubber
    compactor: Compactor
    watchers: Watchers
    payload_memory: PayloadMemory
    buffers: BufferPool
    sizes: StoreSizes
    collected: CollectTotals = field(default_factory=CollectTotals)
    index_verified: bool = False
    index_suspect: trio.Event = field(default_factory=trio.Event)
    """Set when a read met a damaged record of the index."""
    index_looked_at: trio.Event = field(default_factory=trio.Event)
    """Set while nobody walks through the index; `index_damage` is why it could not be made whole then."""
    index_damage: LakeError | None = None
    lent: Lendings = field(init=False)
    hot_index: HotIndex | None = None
    clean_before: int | None = None
    """Where the last boot stopped cleanly."""
    at_clean_stop: list[Callable[[Sequence], None]] = field(default_factory=list)
    """Called in a thread with the last sequence, before the superblock says "clean"."""
    leaving: AsyncExitStack = field(default_factory=AsyncExitStack)
    dram: Dram = field(init=False)
    _superblock_lock: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        self.lent = Lendings(self.offload)
        self.dram = _dram(self, None)

    def hello(self, *, descriptors: bool) -> HelloReply:
        """What a client is told when it connects."""
        return HelloReply(
            protocol=PROTOCOL_VERSION,
            server=f"lake {VERSION}",
            store_id=self.superblock.store_id,
            engine_id=self.superblock.engine_id,
            boot_id=self.superblock.boot_id,
            features=0,
            domains=list(self.superblock.domains),
            inflight_max=INFLIGHT_PER_CONNECTION,
            body_bytes_max=BODY_BYTES_MAX,
            batch_max=BATCH_MAX,
            descriptors=descriptors,
            read_only=bool(self.read_only_because),
        )

    @property
    def read_only_because(self) -> str:
        """Why nothing is written any more; empty while all is well."""
        if self.metadata.failed is not None:
            return self.metadata.failed.message
        if self.segments.failed:
            return "a write or sync of a segment failed; mend the disk and restart the engine"
        return ""

    @property
    def is_collecting(self) -> bool:
        """Whether gc or compaction are at work."""
        return self.collector.running or self.compactor.running

    async def status(self) -> dict[str, Any]:
        """State for people and scripts; JSON-able."""
        reason = self.read_only_because
        free, total = await self.offload.run(lambda: (self.disk.free_bytes(), self.disk.total_bytes()))
        return {
            "version": VERSION,
            "data": str(Path(self.disk.local_path(INDEX_FOLDER)).parent),
            "store_id": self.superblock.store_id.hex(),
            "engine_id": self.superblock.engine_id.hex(),
            "state": "read-only" if reason else "serving",
            "reason": reason,
            "index_verified": self.index_verified,
            "disk": {"free_bytes": free, "total_bytes": total, "reserve_bytes": self.reserve.held_bytes},
            "segments": {
                "count": len(self.segments.all_ids()),
                "allocated_bytes": await self.segments.allocated_bytes(),
                "healed_reads": self.segments.healed_reads,
                "damaged_chunks": len(self.quarantine),
            },
            "reads": self.segments.read_statistics(),
            "metadata": self.metadata.stats(),
            "clients": self.holds.statistics(),
            "buffers": {"in_use": self.buffers.in_use, "capacity": self.buffers.capacity},
            "lent_memory": self.lent.statistics(),
            "pins": self.segments.pins.statistics(),
            "dram": self.dram.statistics(),
            "gc_running": self.collector.running,
            "scrub": self.scrubber.status(),
            "compaction_running": self.compactor.running,
            "hot_index": self.hot_index.statistics() if self.hot_index is not None else {"state": "off"},
        }

    async def begin_to_use(self, feature: ReadOnlyFeature) -> None:
        """Say in the superblock that the store uses a feature; durable on return.  StoreFull, DiskFailed."""
        async with self._superblock_lock:
            features = self.superblock.read_only_features | feature
            if features != self.superblock.read_only_features:
                changed = replace(self.superblock, read_only_features=features)
                await self.offload.run(write_superblock, self.disk, changed, self.reserve)
                self.superblock = changed

    async def collect(self, share: float = COMPACT_SHARE) -> CollectReport:
        """A cycle of gc, the reserve filled up again, then compaction with what room is left; errors as of the two."""
        # What an index that is not whole does not show would be freed: the walk through it is waited for.
        if not self.index_looked_at.is_set():
            await self.index_looked_at.wait()
        if self.index_damage is not None:
            raise IndexDamaged(
                f"nothing is freed: the index is damaged and cannot be rebuilt ({self.index_damage.message})",
                subject="index",
            )
        try:
            report = await self.collector.run()
        finally:
            await self.offload.run(self.reserve.restore)
        compaction = await self.compactor.run(share)
        after = await self.segments.allocated_bytes()
        done = CollectReport(**{**asdict(report), "disk_bytes_after": after}, compaction=compaction)
        self.collected.add(done, self.clock.wall_ns())
        return done

    async def check(self, *, full: bool) -> dict[str, Any]:
        """fsck of the open store; JSON-able report."""
        return await check_store(self.metadata, self.segments, self.chunks, self.manifests, full=full)

    async def damaged(self) -> list[dict[str, Any]]:
        """The quarantine: each damaged chunk, and the objects that it belongs to; JSON-able."""
        return await damage_report(self.metadata, self.manifests, self.quarantine)


@asynccontextmanager
async def open_store(
    disk: Disk,
    clock: Clock,
    offload: Offload,
    *,
    create: bool = True,
    grace_s: float = GC_GRACE_S,
    verify_index: bool = True,
    upload_expiry_s: float = 0.0,
    sizes: StoreSizes = DEFAULT_STORE_SIZES,
    index_committed: Callable[[], None] | None = None,
    while_locked: Callable[[], AbstractContextManager[None]] = nullcontext,
    io_queue: IoQueue | None = None,
    tier: DramTier | None = None,
) -> AsyncIterator[Store]:
    """Open the store on a disk, and stop it cleanly at the end.

    StoreLocked, StoreUnusable, StoreDamaged, JournalDamaged, StoreFull, StoreReadOnly.  When the body raises, or a
    write has failed, the store is closed as a crash would leave it: everything acknowledged is there.
    `upload_expiry_s`: age at which gc removes unfinished uploads, 0: never.
    `index_committed` runs in a thread after each commit of the index; `while_locked` is entered when the lock is
    held, before anything is recovered.  `io_queue` reads many places at once; by default `offload` does.
    `tier` is its owner's to close.
    """
    with telling_full():
        opened = await offload.run(lambda: superblocks.open_store(disk, clock, create=create))
    try:
        if opened.read_only:
            raise StoreReadOnly(opened.read_only)
        for warning in opened.warnings:
            _log.warning(warning)
        with plain_errors(), while_locked():
            async with (
                _running(
                    disk, clock, offload, opened, grace_s, upload_expiry_s, sizes, index_committed, io_queue
                ) as store,
                store.leaving,
            ):
                store.clean_before = opened.superblock.clean_sequence
                async with trio.open_nursery() as nursery:
                    if tier is not None:
                        store.dram = _dram(store, tier)
                        nursery.start_soon(store.dram.run)
                    if verify_index:
                        nursery.start_soon(keep_index_whole, store)
                    else:
                        store.index_looked_at.set()
                    yield store
                    nursery.cancel_scope.cancel()
                await _stop(store)
    finally:
        opened.lock.close()


@asynccontextmanager
async def _running(
    disk: Disk,
    clock: Clock,
    offload: Offload,
    opened: OpenedStore,
    grace_s: float,
    upload_expiry_s: float,
    sizes: StoreSizes,
    index_committed: Callable[[], None] | None,
    io_queue: IoQueue | None,
) -> AsyncIterator[Store]:
    reserve = Reserve(disk)
    holds = Holds(clock)
    watchers = Watchers()
    unclean = replace(opened.superblock, clean_sequence=None)
    with telling_full():
        await offload.run(reserve.open)
        metadata = await open_metadata(
            disk,
            offload,
            clock,
            identity=opened.superblock.identity,
            clean_sequence=opened.superblock.clean_sequence,
            release_reserve=reserve.release,
            index_committed=index_committed,
            sizes=sizes.metadata.fitted(await offload.run(disk.total_bytes)),
            headroom_bytes=reserve.headroom_bytes,
        )
        metadata.on_durable(watchers.publish)
        try:
            await offload.run(write_superblock, disk, unclean, reserve)
        except BaseException:
            await metadata.close(clean=False)  # or the index stays open, and the opening cannot be tried anew
            reserve.close()
            raise
    segments = segments_of(
        disk, offload, opened, metadata, replace(sizes.segments, headroom=reserve.headroom_bytes), io_queue
    )
    metadata.write_first(segments.small)
    async with abandoned(segments), trio.open_nursery() as nursery:
        await nursery.start(metadata.run)
        try:
            await segments.open()
            _, sequence = await metadata.commit(initialise)
            await metadata.wait_durable(sequence)
            expiry = UploadExpiry(metadata, clock, upload_expiry_s, batch=sizes.gc_batch)
            yield _put_together(
                unclean,
                disk,
                clock,
                offload,
                reserve,
                metadata,
                segments,
                holds,
                watchers,
                expiry,
                sizes,
                grace_s=0.0 if opened.created else grace_s,
            )
        finally:
            reserve.close()
            nursery.cancel_scope.cancel()


def _put_together(
    superblock: Superblock,
    disk: Disk,
    clock: Clock,
    offload: Offload,
    reserve: Reserve,
    metadata: Metadata,
    segments: Segments,
    holds: Holds,
    watchers: Watchers,
    expiry: UploadExpiry,
    sizes: StoreSizes,
    *,
    grace_s: float,
) -> Store:
    quarantine = Quarantine(metadata, clock)
    chunks = Chunks(metadata, segments, offload, holds, quarantine, sizes.write_ahead_bytes)
    manifests = Manifests(metadata, chunks)
    buffers = BufferPool(sizes.buffer_bytes)
    writers = Writers(metadata)
    collector = Collector(
        metadata,
        segments,
        manifests,
        holds,
        quarantine,
        clock,
        expiry,
        writers,
        grace_s=grace_s,
        batch=sizes.gc_batch,
    )
    memory = PayloadMemory(buffers)
    compactor = Compactor(
        metadata,
        segments,
        chunks,
        memory,
        reserve,
        writers,
        collector.reclaiming,
        won_bytes_min=sizes.compact_won_bytes,
        batch=sizes.gc_batch,
    )
    return Store(
        superblock,
        disk,
        clock,
        offload,
        reserve,
        metadata,
        segments,
        holds,
        quarantine,
        chunks,
        manifests,
        collector,
        Scrubber(metadata, segments, chunks, quarantine, clock),
        compactor,
        watchers,
        memory,
        buffers,
        sizes,
    )


def _dram(store: Store, tier: DramTier | None) -> Dram:
    return Dram(tier, store.metadata, store.segments, store.quarantine, store.offload)


async def _stop(store: Store) -> None:
    """The clean stop; when a part of it fails the store is left as after a crash, and that is said."""
    try:
        if store.metadata.failed is None:
            await store.scrubber.save()
            await store.metadata.sync()  # and what is placed is written
        await store.segments.close()
        clean_sequence = await store.metadata.close()
        if clean_sequence is None:
            return
        for keep in store.at_clean_stop:
            await store.offload.run(keep, clean_sequence)
        clean = replace(store.superblock, clean_sequence=clean_sequence)
        await store.offload.run(write_superblock, store.disk, clean, store.reserve)
    except LakeError as error:
        _log.error("the store was not stopped cleanly; the next start recovers it", error=error.message)
