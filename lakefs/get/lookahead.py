"""Prediction of one reader's next ranges in one object, from the ranges it has read.

The reader is expected to read on sequentially, or in an order of the object's table (`lakefs.get.range_orders`).  A
table is only wanted for a reader that began at the object's first byte, where a header is, and then jumped.  No request
is sent and nothing is read here; `lakefs.get.prefetch` does that.
"""

from __future__ import annotations

from lakefs.get.range_orders import Extent, OrderFollower, RangeTable
from lakefs.grants.read_ahead import SKIPPED_BYTES_MAX, ReadAheadWindow
from lakefs.limits import TABLE_OBJECT_BYTES_MIN


class Lookahead:
    """Prediction for one reader.  Not for use by two threads at once."""

    def __init__(self, size_bytes: int) -> None:
        self.wants_table = False
        """True when the object's table, if it has one, would help now.  Wanted at most once: see `learn`."""
        self._size_bytes = size_bytes
        self._window = ReadAheadWindow()
        self._follower: OrderFollower | None = None
        self._last = (-1, 0)
        self._saw_begin = False
        self._was_asked = size_bytes < TABLE_OBJECT_BYTES_MIN

    def after(self, offset: int, length: int) -> list[Extent]:
        """Note that this range is read; return extents of the object to bring in, at most a window of them."""
        length = max(0, min(length, self._size_bytes - offset))
        if not self._was_asked:
            self._look_for_jump(offset)
        self._last = (offset, length)
        if self._follower is not None:
            extents = self._follower.after(offset, length)
            if extents is not None:
                return extents
        begin, wanted = self._window.after(offset, length, self._size_bytes)
        return [(begin, wanted)] if wanted else []

    def learn(self, table: RangeTable | None) -> None:
        """Take the table that `wants_table` asked for, or None if there is none; it is not wanted again."""
        self.wants_table = False
        self._was_asked = True
        if table is not None and table.orders:
            self._follower = OrderFollower(table)
            self._follower.after(*self._last)

    def _look_for_jump(self, offset: int) -> None:
        end = sum(self._last)
        self._saw_begin = self._saw_begin or not offset
        self.wants_table = self._saw_begin and end >= 0 and not 0 <= offset - end <= SKIPPED_BYTES_MAX
