"""Admission: which chunks are worth a place in the DRAM tier, told from how often they were read lately.

TinyLFU (Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017): reads are counted in a
count-min sketch of small counters, which are halved now and then, so that old fame fades.  A chunk is admitted from its
second read on, and where something has to go for it, only when it was read more often than that.

Rules kept here:
- What is read once is never admitted: a scan passes by, however long.
- A scan that is longer than the tier, read again and again, does not turn it over: what is in stays in until something
  is read more often.
- Memory is fixed when it is made: one byte a counter, four rows.

An estimate may be too high, when counters are shared, never too low (until they are halved): wrongly admitted is a
wasted copy, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.tiers._frequency import Sketch
from lakefs.ids import ChunkId

READS_FOR_ADMISSION: Final = 2
MARGIN: Final = 1
"""By how much a chunk has to be ahead of what goes for it.  It was counted just now, and that was not: of two that are
read equally often the one that asks is one ahead."""
SAMPLE_FACTOR: Final = 8
"""Counters are halved each time that so many reads as the tier has places, times this, were counted."""


class Admission:
    """Counts reads of one tier's chunks.  Used on the loop."""

    def __init__(self, places: int) -> None:
        """`places`: about how many chunks the tier holds.  Memory: 16 to 32 bytes for each."""
        assert places >= 1, "a tier has room for something"
        width = 1 << max(10, (4 * places - 1).bit_length())
        self._sketch = Sketch(width, max(SAMPLE_FACTOR * places, 1024))
        self.note: Final[Callable[[ChunkId], int]] = self._sketch.note
        """Count a read of the chunk; how often it was read lately, about: 1 to 15."""
        self.note_many: Final[Callable[[list[ChunkId]], bytes]] = self._sketch.note_many
        """`note` of each, in order; a byte for each."""
        self.estimate: Final[Callable[[ChunkId], int]] = self._sketch.estimate
        """How often the chunk was read lately, about; 0 to 15."""

    def admits(self, chunk: ChunkId, victim: ChunkId | None) -> bool:
        """Whether the chunk is worth a place: that of `victim`, when there is none free."""
        count = self.estimate(chunk)
        return count >= READS_FOR_ADMISSION and (victim is None or count > self.estimate(victim) + MARGIN)
