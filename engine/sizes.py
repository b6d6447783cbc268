"""How long the parts of a store get before something is done about it.  Tests make them small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lakefs.limits import (
    BUFFER_POOL_BYTES,
    CHECKPOINT_JOURNAL_BYTES,
    COMPACT_WON_BYTES_MIN,
    GC_BATCH,
    GROUP_BYTES_MAX,
    JOURNAL_FILE_BYTES,
    JOURNAL_FILL_BYTES,
    LARGE_EXTEND_BYTES,
    LARGE_SEGMENT_BYTES,
    OVERLAY_ENTRIES_APPLY,
    OVERLAY_ENTRIES_MAX,
    PART_BYTES_MIN,
    SMALL_FILL_BYTES,
    SMALL_SEGMENT_BYTES,
)


@dataclass(frozen=True)
class MetadataSizes:
    """Bytes, or entries of the overlay."""

    group_bytes: int = GROUP_BYTES_MAX
    journal_file: int = JOURNAL_FILE_BYTES
    journal_fill: int = JOURNAL_FILL_BYTES
    overlay_entries_apply: int = OVERLAY_ENTRIES_APPLY
    overlay_entries_max: int = OVERLAY_ENTRIES_MAX
    checkpoint_journal: int = CHECKPOINT_JOURNAL_BYTES


@dataclass(frozen=True)
class SegmentSizes:
    """How long segments get, in what steps they grow, and what they leave of the disk.  Bytes."""

    large_segment: int = LARGE_SEGMENT_BYTES
    small_segment: int = SMALL_SEGMENT_BYTES
    large_extend: int = LARGE_EXTEND_BYTES
    small_fill: int = SMALL_FILL_BYTES
    headroom: int = 0

    @property
    def half_of_headroom(self) -> int:
        """What those leave of the disk who give more room back at once than they take."""
        return self.headroom // 2


@dataclass(frozen=True)
class StoreSizes:
    """The bounds of `lakefs.limits` that one store works with.  `segments.headroom` is the reserve's to say."""

    metadata: MetadataSizes = field(default_factory=MetadataSizes)
    segments: SegmentSizes = field(default_factory=SegmentSizes)
    gc_batch: int = GC_BATCH
    compact_won_bytes: int = COMPACT_WON_BYTES_MIN
    buffer_bytes: int = BUFFER_POOL_BYTES
    part_bytes_min: int = PART_BYTES_MIN


DEFAULT_SIZES: Final = MetadataSizes()
DEFAULT_STORE_SIZES: Final = StoreSizes()
