"""Sets of byte ranges of a file, kept as sorted ranges that neither overlap nor touch.

Adding at the end, as sequential writes do, is O(1) amortised; anything else is a bisection and one `memmove` of the
ranges behind.  A range costs 16 bytes.  The owner bounds the number of ranges: `ranges_added` returns the increase
beforehand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """Ranges [begin, end) in bytes.  Invariant: begins and ends, taken in turn, rise strictly."""

    __slots__ = ("_begins", "_ends", "byte_count")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._begins = array("q")
        self._ends = array("q")
        self.byte_count = 0
        """Number of bytes in the set."""
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._begins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"

    @property
    def end(self) -> int:
        """End of the last range; 0 if the set is empty."""
        return self._ends[-1] if self._ends else 0

    @property
    def last_begin(self) -> int:
        """Begin of the last range; 0 if the set is empty."""
        return self._begins[-1] if self._begins else 0

    def end_below(self, size: int) -> int:
        """Return the value that `end` would have after `cut(size)`."""
        at = bisect_left(self._begins, size) - 1
        return min(size, self._ends[at]) if at >= 0 else 0

    def copy(self) -> RangeSet:
        """Return an independent copy."""
        other = RangeSet()
        other._begins, other._ends = self._begins[:], self._ends[:]
        other.byte_count = self.byte_count
        return other

    def add(self, begin: int, end: int) -> None:
        """Add the bytes [begin, end)."""
        if begin >= end:
            return
        begins, ends = self._begins, self._ends
        if ends and begins[-1] <= begin <= ends[-1]:
            if end > ends[-1]:
                self.byte_count += end - ends[-1]
                ends[-1] = end
            return
        first = bisect_left(ends, begin)
        behind = bisect_right(begins, end, lo=first)
        if first == behind:
            begins.insert(first, begin)
            ends.insert(first, end)
            self.byte_count += end - begin
            return
        begin, end = min(begin, begins[first]), max(end, ends[behind - 1])
        self._replace(first, behind, [(begin, end)])

    def remove(self, begin: int, end: int) -> None:
        """Remove the bytes [begin, end)."""
        first = bisect_right(self._ends, begin)
        behind = bisect_left(self._begins, end, lo=first)
        if begin >= end or first >= behind:
            return
        left, right = (self._begins[first], begin), (end, self._ends[behind - 1])
        self._replace(first, behind, [part for part in (left, right) if part[0] < part[1]])

    def cut(self, size: int) -> None:
        """Remove all bytes from `size` on."""
        self.remove(size, max(size, self.end))

    def clear(self) -> None:
        """Remove all bytes."""
        del self._begins[:], self._ends[:]
        self.byte_count = 0

    def contains(self, begin: int, end: int) -> bool:
        """Return True if all of [begin, end) is in the set."""
        at = bisect_right(self._begins, begin) - 1
        return begin >= end or (at >= 0 and end <= self._ends[at])

    def overlaps(self, begin: int, end: int) -> bool:
        """Return True if any of [begin, end) is in the set."""
        at = bisect_right(self._ends, begin)
        return begin < end and at < len(self._begins) and self._begins[at] < end

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [begin, end) that are in the set, in order."""
        at = bisect_right(self._ends, begin)
        while begin < end and at < len(self._begins) and self._begins[at] < end:
            yield max(begin, self._begins[at]), min(end, self._ends[at])
            at += 1

    def gaps(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [begin, end) that are not in the set, in order."""
        for found_begin, found_end in self.within(begin, end):
            if begin < found_begin:
                yield begin, found_begin
            begin = found_end
        if begin < end:
            yield begin, end

    def bytes_added(self, begin: int, end: int) -> int:
        """Return the number of bytes that `add` would add."""
        if begin >= self.end:
            return max(0, end - begin)
        return sum(gap_end - gap_begin for gap_begin, gap_end in self.gaps(begin, end))

    def ranges_added(self, begin: int, end: int) -> int:
        """Return the number of ranges that `add` would add: at most 1; negative if it joins some."""
        first = bisect_left(self._ends, begin)
        behind = bisect_right(self._begins, end, lo=first)
        return 1 - (behind - first) if begin < end else 0

    def _replace(self, first: int, behind: int, ranges: list[tuple[int, int]]) -> None:
        for index in range(first, behind):
            self.byte_count -= self._ends[index] - self._begins[index]
        self._begins[first:behind] = array("q", [begin for begin, _ in ranges])
        self._ends[first:behind] = array("q", [end for _, end in ranges])
        self.byte_count += sum(end - begin for begin, end in ranges)
