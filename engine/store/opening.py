"""Opens a store from a folder, and stops it cleanly.

    open   lock, superblock, stamps, metadata (recovery), superblock says "not clean", segments (all sealed), root node
    serve  commits, index and checkpoints run in tasks of `open_store`; a walk after the start verifies the index
    stop   journal synced, segments trimmed and synced, index completed, checkpoint if due, superblock says "clean",
           stamps ended, lock released

Rules kept here:
- The superblock says "clean" only when every group is durable, and the segments are trimmed and synced.  A full
  index or a failed checkpoint does not prevent that: the next start replays the journal.
- A damaged index is rebuilt from checkpoint and journal while the store serves.  Until then a request that needs the
  damaged part fails with an error, never with a false "not found".
- On a full disk the reserve gives room for the superblock; if that is too little, the error says what to do.
- The segments' files are closed, and the stamps have ended, however the store ends: the stamps before the lock is
  released, so that no answer is repeated while another engine has the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

import trio

from engine.chunks.chunk_store import Chunks
from engine.chunks.manifests import Manifests
from engine.chunks.payload import PayloadMemory
from engine.chunks.quarantine import Quarantine
from engine.chunks.shards import Shards
from engine.fabric.engine_fabric import EngineFabric
from engine.format.features import ReadOnlyFeature
from engine.format.sizes import DEFAULT_STORE_SIZES, StoreSizes
from engine.keyed.part_counts import count_missing_parts
from engine.metadata.metadata_store import Metadata
from engine.metadata.stamps import Stamps, open_stamps
from engine.namespace.watch import Watchers
from engine.segments.segment_store import Segments
from engine.sessions.references import References
from engine.store.features import Features
from engine.store.metadata_life import MetadataLife, locked_store, logging_unclean_stop
from engine.store.store import Member, Opening, Store
from engine.superblock.reserve import Reserve
from engine.superblock.superblock import NO_CLUSTER, OpenedStore
from engine.tiers.dram_tier import DramTier
from engine.upkeep.compaction import Compactor
from engine.upkeep.gc import Collector
from engine.upkeep.index_upkeep import keep_index_whole
from engine.upkeep.scrub import Scrubber
from engine.upkeep.shard_gc import ShardCollector
from engine.uploads.expiry import UploadExpiry
from lakefs.host.buffers import BufferPool
from lakefs.ids import SegmentId, Sequence
from lakefs.limits import GC_GRACE_S
from lakefs.ports import Clock, Disk, IoQueue, Offload


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
    while_locked: Callable[[OpenedStore], AbstractContextManager[None]] = lambda _: nullcontext(),
    io_queue: IoQueue | None = None,
    tier: DramTier | None = None,
    fabric: EngineFabric | None = None,
    cluster_id: bytes = NO_CLUSTER,
) -> AsyncIterator[Store]:
    """Open the store on a disk, and stop it cleanly at the end.

    StoreLocked, StoreUnusable, StoreDamaged, JournalDamaged, StoreFull, StoreReadOnly.  When the body raises, or a
    write has failed, the store is closed as a crash would leave it: every acknowledged change is durable.
    `upload_expiry_s`: age at which gc removes unfinished uploads, 0: never.
    `index_committed` runs in a thread after each commit of the index; `while_locked` is entered when the lock is
    held, before anything is recovered.  `io_queue` reads many places at once; by default `offload` does.
    The caller closes `tier`, and `fabric`, the RDMA device, behind it.
    `cluster_id`: 16 bytes, the lake of which the store is a member; NO_CLUSTER: it is the store of one engine.
    """
    async with locked_store(
        disk, clock, offload, create=create, cluster_id=cluster_id, has_names=False, while_locked=while_locked
    ) as opened:
        with open_stamps() as stamps:
            life = MetadataLife(disk, clock, offload, opened, sizes.metadata, index_committed, Reserve(disk))
            opening = _Opening(life, sizes, grace_s, upload_expiry_s, io_queue)
            async with opening.running(stamps) as store, store.leaving:
                store.clean_before = opened.superblock.clean_sequence
                store.fabric = fabric or store.fabric
                await store.features.mend()
                if store.features.has(ReadOnlyFeature.KEYED):
                    store.keyed.used.set()
                await count_missing_parts(store.metadata)
                async with trio.open_nursery() as nursery:
                    if tier is not None:
                        store.use_tier(tier)
                        nursery.start_soon(store.dram.run)
                    nursery.start_soon(store.keyed_upkeep.run)
                    if verify_index:
                        nursery.start_soon(keep_index_whole, store)
                    else:
                        store.index_looked_at.set()
                    yield store
                    nursery.cancel_scope.cancel()
                await _stop(store, life)


@dataclass(frozen=True)
class _Opening:
    """A store whose lock is held, and the arguments of `open_store`."""

    life: MetadataLife
    sizes: StoreSizes
    grace_s: float
    upload_expiry_s: float
    io_queue: IoQueue | None

    @asynccontextmanager
    async def running(self, stamps: Stamps | None) -> AsyncIterator[Store]:
        """Yield the store with its committer running; at the end, close its files as they are."""
        metadata = await self.life.recovered()
        recovered = metadata.durable_sequence
        metadata.use_stamps(stamps)
        segments = self._segments(metadata)
        try:
            async with self.life.running(metadata, segments.open):
                yield self._store(metadata, segments, recovered)
        finally:
            segments.abandon()  # no task writes to them any more

    def _segments(self, metadata: Metadata) -> Segments:
        """Return the segments; the metadata writes their small payloads before each journal group."""

        async def new_id() -> SegmentId:
            segment, sequence = await metadata.commit(lambda txn: txn.new_segment_id())
            await metadata.wait_durable(sequence)
            return segment

        life = self.life
        sizes = replace(self.sizes.segments, headroom=life.reserve.headroom_bytes)
        identity = life.opened.superblock.identity
        segments = Segments(life.disk, life.offload, identity, new_id, sizes, metadata.owed_bytes, self.io_queue)
        metadata.write_first(segments.small)
        return segments

    def _store(self, metadata: Metadata, segments: Segments, recovered: Sequence) -> Store:
        """Build the store on metadata and segments: first the parts for content, then gc, scrub and compaction."""
        clock, offload, reserve = self.life.clock, self.life.offload, self.life.reserve
        watchers = Watchers(metadata.on_durable)
        references, quarantine = References(clock), Quarantine(metadata, clock)
        chunks = Chunks(metadata, segments, offload, references, quarantine, self.sizes.write_ahead_bytes)
        manifests = Manifests(metadata, chunks)
        buffers = BufferPool(self.sizes.buffer_bytes, self.sizes.huge_buffers)
        memory = PayloadMemory(buffers)
        batch = self.sizes.gc_batch
        collector = Collector(
            metadata,
            segments,
            manifests,
            references,
            quarantine,
            clock,
            UploadExpiry(metadata, clock, self.upload_expiry_s, batch=batch),
            # It waits for clients of the last boot; a new store has none to wait for.
            grace_s=0.0 if self.life.opened.created else self.grace_s,
            batch=batch,
        )
        compactor = Compactor(
            metadata,
            segments,
            chunks,
            memory,
            reserve,
            collector.reclaiming,
            won_bytes_min=self.sizes.compact_won_bytes,
            batch=batch,
        )
        features = self.life.features(metadata)
        return Store(
            member=self._member(metadata, segments, chunks, quarantine, features, recovered),
            features=features,
            disk=self.life.disk,
            clock=clock,
            offload=offload,
            reserve=reserve,
            metadata=metadata,
            segments=segments,
            references=references,
            quarantine=quarantine,
            chunks=chunks,
            manifests=manifests,
            collector=collector,
            scrubber=Scrubber(metadata, segments, chunks, quarantine, clock),
            compactor=compactor,
            watchers=watchers,
            payload_memory=memory,
            buffers=buffers,
            sizes=self.sizes,
        )

    def _member(
        self,
        metadata: Metadata,
        segments: Segments,
        chunks: Chunks,
        quarantine: Quarantine,
        features: Features,
        recovered: Sequence,
    ) -> Member | None:
        """Return the parts for shards, if the store is a member of a lake."""
        superblock = self.life.opened.superblock
        if superblock.cluster_id == NO_CLUSTER:
            return None
        begin, is_new = features.begin_to_keep_shards, self.life.opened.created
        offload = self.life.offload
        shards = Shards(metadata, segments, offload, quarantine, chunks.ingest, begin_to_use=begin, is_new=is_new)
        opening = Opening(superblock.boot_id, recovered)
        return Member(shards, ShardCollector(metadata, shards, batch=self.sizes.gc_batch), opening)


async def _stop(store: Store, life: MetadataLife) -> None:
    """Stop the store cleanly; if a step fails, log it and leave the store as after a crash."""
    with logging_unclean_stop():
        await store.offload.run(store.disk.check_lock)
        if store.metadata.failed is None:
            await store.scrubber.save()
            await store.metadata.sync()  # placed payloads are written with it
        await store.segments.close()
        await life.stop(store.metadata, store.features, store.at_clean_stop)
