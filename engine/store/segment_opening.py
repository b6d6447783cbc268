"""The segments of a store that is being opened, and what becomes of them when it is closed in whatever way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.format.sizes import SegmentSizes
from engine.metadata.metadata_store import Metadata
from engine.segments.segment_store import Segments
from engine.superblock.superblock import OpenedStore
from lakefs.ids import SegmentId
from lakefs.ports import Disk, IoQueue, Offload


@asynccontextmanager
async def abandoned(segments: Segments) -> AsyncIterator[None]:
    """Whatever is open of the segments is closed behind the block, when nobody writes to them any more."""
    try:
        yield
    finally:
        segments.abandon()


def segments_of(
    disk: Disk,
    offload: Offload,
    opened: OpenedStore,
    metadata: Metadata,
    sizes: SegmentSizes,
    io_queue: IoQueue | None,
) -> Segments:
    """The segments of a store that is being opened."""
    identity = opened.superblock.identity
    return Segments(
        disk, offload, identity, lambda: _segment_id(metadata), sizes, metadata.owed_bytes, io_queue
    )


async def _segment_id(metadata: Metadata) -> SegmentId:
    segment, sequence = await metadata.commit(lambda txn: txn.new_segment_id())
    await metadata.wait_durable(sequence)
    return segment
