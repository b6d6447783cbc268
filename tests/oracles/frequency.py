"""The count-min sketch in Python: the same counts as `engine.tables._frequency.Sketch`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

ROWS: Final = 4
COUNT_MAX: Final = 15
"""The most that a counter of four bits can hold.  Here each has a byte: that is faster than to split bytes."""
_HALVES: Final = bytes(count >> 1 for count in range(256))
_EIGHTHS: Final = struct.Struct("<4Q")


class TwinSketch:
    """Four rows of `width` counters (a power of two), halved each time that `sample` reads were counted."""

    def __init__(self, width: int, sample: int, step: int = 1) -> None:
        if width <= 0 or width & (width - 1) or sample <= 0:
            raise ValueError("a sketch is a power of two wide, and halved at times")
        self._step = step
        self.halvings = 0
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(ROWS)]
        self._sample = sample
        self._counted = 0

    def halve_after(self, sample: int) -> None:
        """See `engine.tables._frequency.Sketch`."""
        self._sample = sample

    def note(self, chunk: bytes) -> int:
        """See `engine.tables._frequency.Sketch`."""
        cells = self._cells(chunk)
        counts = [row[cell] for row, cell in zip(self._rows, cells, strict=True)]
        estimate = min(counts)
        if estimate < COUNT_MAX:
            estimate = min(COUNT_MAX, estimate + self._step)
            for row, cell, count in zip(self._rows, cells, counts, strict=True):
                row[cell] = max(count, estimate)  # only the least counters grow: fewer estimates are too high
        self._counted += 1
        if self._counted >= self._sample:
            self._halve()
        return estimate

    def note_many(self, chunks: Sequence[bytes]) -> bytes:
        """See `engine.tables._frequency.Sketch`."""
        return bytes(map(self.note, chunks))

    def estimate(self, chunk: bytes) -> int:
        """See `engine.tables._frequency.Sketch`."""
        return min(row[cell] for row, cell in zip(self._rows, self._cells(chunk), strict=True))

    def _cells(self, chunk: bytes) -> tuple[int, int, int, int]:
        if len(chunk) < _EIGHTHS.size:
            raise ValueError("a chunk's id ends with its digest")
        first, second, third, fourth = _EIGHTHS.unpack(chunk[-_EIGHTHS.size :])
        mask = self._mask
        return first & mask, second & mask, third & mask, fourth & mask

    def _halve(self) -> None:
        for row in self._rows:
            row[:] = row.translate(_HALVES)
        self._counted //= 2
        self.halvings += 1
