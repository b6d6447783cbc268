"""Admission: decides from recent reads which chunks are worth a cell of the DRAM tier.

TinyLFU (Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017): reads are counted in a
count-min sketch of small counters, which are halved from time to time, so that old reads count less.  A chunk is
admitted from its second read on; if another chunk must be evicted for it, only if it was read more often than that one.

Rules kept here:
- A chunk read only once is never admitted: a scan leaves the tier as it is, however long.
- A scan longer than the tier, repeated, does not replace the tier's chunks: they stay until others are read more often.
- Memory is fixed at construction: one byte a counter, four rows.

An estimate may be too high, because chunks share counters, but never too low (until counters are halved).  A chunk
admitted by mistake costs one wasted copy, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.tables._frequency import Sketch
from lakefs.ids import ChunkId

READS_FOR_ADMISSION: Final = 2
MARGIN: Final = 1
"""A candidate's count must exceed the victim's by more than this.  The candidate's current read is already counted, so
of two chunks read equally often it is one ahead."""
SAMPLE_FACTOR: Final = 8
"""Counters are halved after this many counted reads for each place of the tier."""


class Admission:
    """Counts reads of one tier's chunks.  Used on the loop."""

    def __init__(self, places: int) -> None:
        """`places` is about how many chunks the tier holds.  Memory: 16 to 32 bytes for each."""
        assert places >= 1, "a tier has room for a chunk"
        width = 1 << max(10, (4 * places - 1).bit_length())
        self._sketch = Sketch(width, max(SAMPLE_FACTOR * places, 1024))
        self.note: Final[Callable[[ChunkId], int]] = self._sketch.note
        """Count a read of the chunk; returns the estimated number of its recent reads, 1 to 15."""
        self.note_many: Final[Callable[[list[ChunkId]], bytes]] = self._sketch.note_many
        """Call `note` for each, in order; returns a byte for each."""
        self.estimate: Final[Callable[[ChunkId], int]] = self._sketch.estimate
        """Return the estimated number of recent reads of the chunk, 0 to 15."""

    def admits(self, chunk: ChunkId, victim: ChunkId | None) -> bool:
        """Return True if the chunk is worth a cell: the one of `victim`, or a free one if that is None."""
        count = self.estimate(chunk)
        return count >= READS_FOR_ADMISSION and (victim is None or count > self.estimate(victim) + MARGIN)
