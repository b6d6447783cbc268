"""Bounds on the parts of a store: journal, overlay, checkpoints, segments, buffers.  Tests make them small."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from engine.format.extents import page_down
from lakefs.limits import (
    BUFFER_POOL_BYTES,
    BUFFERS_HUGE,
    CHECKPOINT_JOURNAL_BYTES,
    COMPACT_WON_BYTES_MIN,
    GC_BATCH,
    GROUP_BYTES_MAX,
    JOURNAL_FILE_BYTES,
    JOURNAL_FILL_BYTES,
    JOURNAL_SHARE,
    KIB,
    LARGE_EXTEND_BYTES,
    LARGE_SEGMENT_BYTES,
    OVERLAY_ENTRIES_APPLY,
    OVERLAY_ENTRIES_MAX,
    PART_BYTES_MIN,
    SMALL_FILL_BYTES,
    SMALL_SEGMENT_BYTES,
    WRITE_AHEAD_BYTES,
)

_JOURNAL_BYTES_MIN: Final = 256 * KIB


@dataclass(frozen=True)
class MetadataSizes:
    """Bounds of journal, overlay and checkpoint: bytes, or entries of the overlay."""

    group_bytes: int = GROUP_BYTES_MAX
    journal_file: int = JOURNAL_FILE_BYTES
    journal_fill: int = JOURNAL_FILL_BYTES
    overlay_entries_apply: int = OVERLAY_ENTRIES_APPLY
    overlay_entries_max: int = OVERLAY_ENTRIES_MAX
    checkpoint_journal: int = CHECKPOINT_JOURNAL_BYTES

    def fitted(self, disk_bytes: int) -> MetadataSizes:
        """Return these sizes with a journal that fits on a small disk."""
        most = max(_JOURNAL_BYTES_MIN, disk_bytes // JOURNAL_SHARE)
        return replace(
            self,
            journal_file=min(self.journal_file, most),
            journal_fill=min(self.journal_fill, page_down(most // 8)),
            checkpoint_journal=min(self.checkpoint_journal, most),
        )


@dataclass(frozen=True)
class SegmentSizes:
    """Bytes: length of segments, steps in which they grow, and room they leave on the disk."""

    large_segment: int = LARGE_SEGMENT_BYTES
    small_segment: int = SMALL_SEGMENT_BYTES
    large_extend: int = LARGE_EXTEND_BYTES
    small_fill: int = SMALL_FILL_BYTES
    headroom: int = 0


@dataclass(frozen=True)
class StoreSizes:
    """The bounds of `lakefs.limits` that one store works with.  The reserve sets `segments.headroom`."""

    metadata: MetadataSizes = field(default_factory=MetadataSizes)
    segments: SegmentSizes = field(default_factory=SegmentSizes)
    gc_batch: int = GC_BATCH
    compact_won_bytes: int = COMPACT_WON_BYTES_MIN
    buffer_bytes: int = BUFFER_POOL_BYTES
    huge_buffers: int = BUFFERS_HUGE
    part_bytes_min: int = PART_BYTES_MIN
    write_ahead_bytes: int = WRITE_AHEAD_BYTES


DEFAULT_SIZES: Final = MetadataSizes()
DEFAULT_STORE_SIZES: Final = StoreSizes()
