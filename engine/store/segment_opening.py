"""Builds the segments of a store being opened, and closes them however it ends."""

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
    """Close the segments' open files after the block, when no task writes to them any more."""
    try:
        yield
    finally:
        segments.abandon()


def segments_of(
    disk: Disk, offload: Offload, opened: OpenedStore, metadata: Metadata, sizes: SegmentSizes, io_queue: IoQueue | None
) -> Segments:
    """Return the segments of a store being opened."""
    identity = opened.superblock.identity
    return Segments(disk, offload, identity, lambda: _segment_id(metadata), sizes, metadata.owed_bytes, io_queue)


async def _segment_id(metadata: Metadata) -> SegmentId:
    segment, sequence = await metadata.commit(lambda txn: txn.new_segment_id())
    await metadata.wait_durable(sequence)
    return segment
