"""Bounds on the parts of a store: journal, overlay, checkpoints, segments, buffers.  Tests make them small."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from engine.format.extents import page_down
from lakefs import limits

_JOURNAL_BYTES_MIN: Final = 256 * limits.KIB


@dataclass(frozen=True)
class MetadataSizes:
    """Bounds of journal, overlay and checkpoint: bytes, or entries of the overlay."""

    group_bytes: int = limits.GROUP_BYTES_MAX
    journal_file: int = limits.JOURNAL_FILE_BYTES
    journal_fill: int = limits.JOURNAL_FILL_BYTES
    overlay_entries_apply: int = limits.OVERLAY_ENTRIES_APPLY
    overlay_entries_max: int = limits.OVERLAY_ENTRIES_MAX
    checkpoint_journal: int = limits.CHECKPOINT_JOURNAL_BYTES

    def fitted(self, disk_bytes: int) -> MetadataSizes:
        """Return these sizes with a journal that fits on a small disk."""
        most = max(_JOURNAL_BYTES_MIN, disk_bytes // limits.JOURNAL_SHARE)
        return replace(
            self,
            journal_file=min(self.journal_file, most),
            journal_fill=min(self.journal_fill, page_down(most // 8)),
            checkpoint_journal=min(self.checkpoint_journal, most),
        )


@dataclass(frozen=True)
class SegmentSizes:
    """Bytes: length of segments, steps in which they grow, and room they leave on the disk."""

    large_segment: int = limits.LARGE_SEGMENT_BYTES
    small_segment: int = limits.SMALL_SEGMENT_BYTES
    large_extend: int = limits.LARGE_EXTEND_BYTES
    small_fill: int = limits.SMALL_FILL_BYTES
    headroom: int = 0


@dataclass(frozen=True)
class StoreSizes:
    """The bounds of `lakefs.limits` that one store works with.  The reserve sets `segments.headroom`."""

    metadata: MetadataSizes = field(default_factory=MetadataSizes)
    segments: SegmentSizes = field(default_factory=SegmentSizes)
    gc_batch: int = limits.GC_BATCH
    compact_won_bytes: int = limits.COMPACT_WON_BYTES_MIN
    buffer_bytes: int = limits.BUFFER_POOL_BYTES
    huge_buffers: int = limits.BUFFERS_HUGE
    part_bytes_min: int = limits.PART_BYTES_MIN
    write_ahead_bytes: int = limits.WRITE_AHEAD_BYTES


DEFAULT_SIZES: Final = MetadataSizes()
DEFAULT_STORE_SIZES: Final = StoreSizes()
