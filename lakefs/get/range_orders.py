"""Which order a reader of a file's ranges follows, by what it read; and so what it is going to read.  No I/O.

A file may have a table of ranges, as a safetensors file has of its tensors, and readers that take them one by one: in
the order of the file, which shows by itself, or in another one (of their names, of the table), so that the next range
lies anywhere.  Laid one behind the other in that order the ranges are a line, on which such a reader reads on.

What is seen of a reader is runs: stretches that it read on in the file.  A run tells nothing of orders, where it
begins does: when the range there is the next one, in some order, of a range that ended with the run before, that was a
step of this order.  `STEPS_MIN` steps in a row, and the order is followed: what comes on its line is told, by a window
that doubles.

Rules kept here:
- What is told lies in the ranges of the table, and is at most a window ahead of the reader.
- Guesses that miss end: a run that no step of the followed order explains drops it, and after `MISSES_MAX` of those
  nothing more is told of this file.
- What is seen may be less than the reader takes, and more: a buffered file between has some of it already, and reads
  on to fill itself.  `NEAR_BYTES` is how far that may be off.
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
"""Two buffers of the file that `Lake.open` gives."""
SKIPPED_RANGES_MAX: Final = 16
"""Ranges that a step may leave out, since they were in a buffer: up to `NEAR_BYTES` of them."""

Extent = tuple[int, int]
"""Where it begins, and how long it is."""


class RangeOrder:
    """Ranges, by their numbers in the file, laid one behind the other in an order."""

    def __init__(self, lengths: Sequence[int], sequence: Sequence[int]) -> None:
        self.sequence = array("Q", sequence)
        self.ranks = array("Q", bytes(8 * len(sequence)))
        """Rank of each range."""
        for rank, number in enumerate(sequence):
            self.ranks[number] = rank
        self.starts = array("Q", accumulate((lengths[number] for number in sequence), initial=0))
        """By rank, where a range begins on the line; one more for the line's end."""

    @property
    def length(self) -> int:
        """Of the line: bytes of all ranges."""
        return self.starts[-1]


class RangeTable:
    """Ranges of a file that are not empty and do not overlap; orders to read them in, other than the file's."""

    def __init__(self, extents: Sequence[Extent], sequences: Iterable[Sequence[int]]) -> None:
        """`extents` in the order of the file; each sequence has all of their numbers."""
        self.begins = array("Q", [begin for begin, _ in extents])
        self.ends = array("Q", [begin + length for begin, length in extents])
        different = dict.fromkeys(tuple(sequence) for sequence in sequences)
        different.pop(tuple(range(len(extents))), None)
        lengths = [length for _, length in extents]
        self.orders = [RangeOrder(lengths, sequence) for sequence in different]

    def at(self, offset: int) -> int | None:
        """The number of the range that holds an offset."""
        number = bisect_right(self.begins, offset) - 1
        return number if number >= 0 and offset < self.ends[number] else None

    def on_line(self, order: RangeOrder, place: int, length: int) -> list[Extent]:
        """Where [place, place + length) of an order's line lies in the file; the first `TABLE_RANGES_AHEAD_MAX`."""
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
    """Follows one reader of a file with a table.  Not for two threads at once."""

    def __init__(self, table: RangeTable) -> None:
        self._table = table
        self._steps = [0] * len(table.orders)
        """Of each order, in a row."""
        self._run = (-1, -1)
        """Begin and end in the file."""
        self._followed: int | None = None
        self._number = 0
        """The range that the reader is in, by the order that is followed."""
        self._window = ReadAheadWindow()
        self._misses = 0

    def after(self, offset: int, length: int) -> list[Extent] | None:
        """What to bring in, now that this is read; None while no order is followed."""
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
        """Whether a step of the order leads from the run before to this range."""
        rank = order.ranks[number]
        for before in range(rank - 1, max(rank - 2 - SKIPPED_RANGES_MAX, -1), -1):
            if order.starts[rank] - order.starts[before + 1] > NEAR_BYTES:
                return False
            if self._ended(order.sequence[before]):
                return True
        return False

    def _ended(self, number: int) -> bool:
        """Whether the reader came to the end of a range at the end of its run, more or less."""
        run_begin, run_end = self._run
        begin, end = self._table.begins[number], self._table.ends[number]
        return begin < run_end and run_begin < end and abs(run_end - end) <= NEAR_BYTES

    def _ahead(self, order: RangeOrder) -> list[Extent] | None:
        end = self._run[1]
        table, rank = self._table, order.ranks[self._number]
        while end >= table.ends[self._number] and self._next_lies_behind(order, rank):
            rank += 1
            self._number = order.sequence[rank]
        if end > table.ends[self._number] + NEAR_BYTES:  # it reads on in the file
            self._misses += 1
            self._follow(None)
            return None
        start, stop = order.starts[rank], order.starts[rank + 1]
        place = min(max(start + end - table.begins[self._number], start), stop)
        begin, wanted = self._window.on_to(place, order.length)
        return table.on_line(order, begin, wanted)

    def _next_lies_behind(self, order: RangeOrder, rank: int) -> bool:
        """Whether the next range of an order lies right behind this one in the file: then no run begins with it."""
        if rank + 1 == len(order.sequence):
            return False
        gap = self._table.begins[order.sequence[rank + 1]] - self._table.ends[order.sequence[rank]]
        return 0 <= gap <= GRANULE_BYTES
