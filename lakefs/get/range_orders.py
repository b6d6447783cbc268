"""Recognises the order in which a reader takes a file's ranges, and predicts the next ones.  No I/O.

A file may have a table of ranges, as a safetensors file has of its tensors, and a reader that takes them one by one: in
the order of the file, which is plain sequential reading, or in another order (by name, or the table's), so that the
next range lies anywhere.  Concatenated in that order, the ranges form a line, on which such a reader reads
sequentially.

The reads are grouped into runs: stretches read sequentially in the file.  The beginning of a run tells the order: if
the range there follows, in some order, a range that ended with the run before, that was a step of this order.  After
`STEPS_MIN` steps in a row the order is followed: the next bytes of its line are predicted, in a window that doubles.

Rules kept here:
- Predicted bytes lie in ranges of the table, and at most a window ahead of the reader.
- Wrong predictions end: a run that is no step of the followed order drops the order, and after `MISSES_MAX` such
  misses nothing more is predicted for this file.
- The reads seen here may be less or more than the reader takes: a buffered file in between has some bytes already,
  and reads on to fill its buffer.  `NEAR_BYTES` is the tolerance for that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from lakefs.grants.read_ahead import ReadAheadWindow
from lakefs.limits import GRANULE_BYTES, MIB, TABLE_RANGES_AHEAD_MAX

STEPS_MIN: Final = 2
MISSES_MAX: Final = 3
NEAR_BYTES: Final = 2 * MIB
"""Tolerance of positions: two buffers of the file that `Lake.open` returns."""
SKIPPED_RANGES_MAX: Final = 16
"""Most ranges that a step may skip because they were in a buffer; together at most `NEAR_BYTES`."""

Extent = tuple[int, int]
"""Begin and length in bytes."""


class RangeOrder:
    """An order of ranges, which are numbered as in the file, and the line that they form."""

    def __init__(self, lengths: Sequence[int], sequence: Sequence[int]) -> None:
        self.sequence = array("Q", sequence)
        self.ranks = array("Q", bytes(8 * len(sequence)))
        """Rank in this order, by number of the range."""
        for rank, number in enumerate(sequence):
            self.ranks[number] = rank
        self.starts = array("Q", accumulate((lengths[number] for number in sequence), initial=0))
        """Begin of each range on the line, by rank; and one more entry for the line's end."""

    @property
    def length(self) -> int:
        """Length of the line: bytes of all ranges."""
        return self.starts[-1]


class RangeTable:
    """Ranges of a file, not empty and not overlapping; and the orders to read them in, other than the file's."""

    def __init__(self, extents: Sequence[Extent], sequences: Iterable[Sequence[int]]) -> None:
        """Make a table of `extents`, in the order of the file; each sequence has all of their numbers."""
        self.begins = array("Q", [begin for begin, _ in extents])
        self.ends = array("Q", [begin + length for begin, length in extents])
        different = dict.fromkeys(tuple(sequence) for sequence in sequences)
        different.pop(tuple(range(len(extents))), None)
        lengths = [length for _, length in extents]
        self.orders = [RangeOrder(lengths, sequence) for sequence in different]

    def at(self, offset: int) -> int | None:
        """Return the number of the range that holds an offset, or None."""
        number = bisect_right(self.begins, offset) - 1
        return number if number >= 0 and offset < self.ends[number] else None

    def on_line(self, order: RangeOrder, place: int, length: int) -> list[Extent]:
        """Return the extents in the file of [place, place + length) of a line; the first `TABLE_RANGES_AHEAD_MAX`."""
        extents: list[Extent] = []
        end = min(place + length, order.length)
        rank = bisect_right(order.starts, place) - 1
        while place < end and len(extents) < TABLE_RANGES_AHEAD_MAX:
            stop = min(order.starts[rank + 1], end)
            begin = self.begins[order.sequence[rank]] + place - order.starts[rank]
            if extents and sum(extents[-1]) == begin:
                extents[-1] = (extents[-1][0], extents[-1][1] + stop - place)
            else:
                extents.append((begin, stop - place))
            place = stop
            rank += 1
        return extents


class OrderFollower:
    """Follows one reader of a file with a table.  Not for use by two threads at once."""

    def __init__(self, table: RangeTable) -> None:
        self._table = table
        self._steps = [0] * len(table.orders)
        """Count of steps in a row, for each order."""
        self._run = (-1, -1)
        """Begin and end of the current run in the file."""
        self._followed: int | None = None
        self._number = 0
        """Number of the range that the reader is in, by the followed order."""
        self._window = ReadAheadWindow()
        self._misses = 0

    def after(self, offset: int, length: int) -> list[Extent] | None:
        """Note that this range is read; return extents to bring in, or None while no order is followed."""
        begin, end = self._run
        if max(begin, end - NEAR_BYTES) <= offset <= end + GRANULE_BYTES:
            self._run = (begin, max(end, offset + length))
        else:
            self._begin_run(offset)
            self._run = (offset, offset + length)
        return None if self._followed is None else self._ahead(self._table.orders[self._followed])

    def _begin_run(self, offset: int) -> None:
        number = self._table.at(offset)
        if number is None or self._misses >= MISSES_MAX:
            self._follow(None)
            return
        self._steps = [
            steps + 1 if self._leads_to(order, number) else 0
            for steps, order in zip(self._steps, self._table.orders, strict=True)
        ]
        self._number = number
        if self._followed is not None and not self._steps[self._followed]:
            self._misses += 1
            self._follow(None)
        most = max(self._steps, default=0)
        if self._followed is None and most >= STEPS_MIN and self._misses < MISSES_MAX:
            self._follow(self._steps.index(most))

    def _follow(self, order: int | None) -> None:
        self._followed = order
        self._window = ReadAheadWindow()

    def _leads_to(self, order: RangeOrder, number: int) -> bool:
        """Return True if a step of the order leads from the run before to this range."""
        rank = order.ranks[number]
        for before in range(rank - 1, max(rank - 2 - SKIPPED_RANGES_MAX, -1), -1):
            if order.starts[rank] - order.starts[before + 1] > NEAR_BYTES:
                return False
            if self._ended(order.sequence[before]):
                return True
        return False

    def _ended(self, number: int) -> bool:
        """Return True if the run ended near the end of this range (within `NEAR_BYTES`)."""
        run_begin, run_end = self._run
        begin, end = self._table.begins[number], self._table.ends[number]
        return begin < run_end and run_begin < end and abs(run_end - end) <= NEAR_BYTES

    def _ahead(self, order: RangeOrder) -> list[Extent] | None:
        end = self._run[1]
        table, rank = self._table, order.ranks[self._number]
        while end >= table.ends[self._number] and self._next_lies_behind(order, rank):
            rank += 1
            self._number = order.sequence[rank]
        if end > table.ends[self._number] + NEAR_BYTES:  # the reader reads on sequentially in the file
            self._misses += 1
            self._follow(None)
            return None
        start, stop = order.starts[rank], order.starts[rank + 1]
        place = min(max(start + end - table.begins[self._number], start), stop)
        begin, wanted = self._window.on_to(place, order.length)
        return table.on_line(order, begin, wanted)

    def _next_lies_behind(self, order: RangeOrder, rank: int) -> bool:
        """Return True if the order's next range directly follows this one in the file: no run begins with it then."""
        if rank + 1 == len(order.sequence):
            return False
        gap = self._table.begins[order.sequence[rank + 1]] - self._table.ends[order.sequence[rank]]
        return 0 <= gap <= GRANULE_BYTES
