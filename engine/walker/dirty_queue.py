"""Dirty partitions that wait for the walker: which are walked next, how many at once, and when those it left are again.

Rules kept here:
- Partitions of which a stripe may be short are before those of which shards have to be moved.
- So many are walked at once as take `AT_ONCE_S`, by the time that the last ones took: on a lake with few chunks soon
  all, on a dense one a few.
- Members list what lies between the partitions of one walk too.  So between two of them is never more than `GAP_CHUNKS`
  stand for, by the density of what was walked before.
- A partition that was left because members were away is due when one of them is up, after `RETRY_FIRST_S` at the
  soonest, and after four times as long for each such walk that did not help: a member that fails whenever it is asked
  is not asked all the time.
- Everything that was left is due after `retry_s`, or by a newer table, however often a writer notes it: a lake that
  cannot be healed is not walked all the time.

Pure.  Times are of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from engine.coordinator.lake_state import Dirty
from lakefs.ids import MemberId, Partition, RingEpoch

AT_ONCE_S: Final = 0.5
"""A walk takes about that long: what becomes dirty, and is more urgent, waits for its end."""
GROWTH_MAX: Final = 4.0
GAP_CHUNKS: Final = 64
"""Chunks that cost as much to list in vain as another request to each member."""
RETRY_FIRST_S: Final = 1.0
RETRY_GROWTH: Final = 4
TRIES_MAX: Final = 8
"""More are not counted: 4^8 s are a day."""

IsUp = Callable[[MemberId], bool]


class Width:
    """The number of partitions that are walked at once."""

    def __init__(self) -> None:
        self._width = 1.0
        self._chunks_each = float(GAP_CHUNKS)

    @property
    def partitions(self) -> int:
        """The number of partitions, from the first to the last, that the next walk may be of."""
        return int(self._width)

    @property
    def gap(self) -> int:
        """The number of partitions between two of one walk that may be listed in vain."""
        return int(GAP_CHUNKS / max(self._chunks_each, 1 / GAP_CHUNKS))

    def walked(self, span: int, walked: int, chunks: int, took_s: float) -> None:
        """Note that a walk of so many partitions, in a span of so many, found these chunks and took so long."""
        self._chunks_each = chunks / walked
        self._width = max(1.0, min(GROWTH_MAX * span, span * AT_ONCE_S / max(took_s, 1e-6)))


class _Left(NamedTuple):
    """A partition that a walk left dirty."""

    epoch: RingEpoch
    """The table of the walk."""
    retry_at: float
    soon_at: float
    """When it is walked again if the members that it was left for are up."""
    away: frozenset[MemberId]
    """The ones among these members that were away when the walk ended."""
    tries: int

    def is_due(self, now: float, is_up: IsUp) -> bool:
        """Return True if it is to be walked again now."""
        return now >= self.retry_at or (now >= self.soon_at and (not self.away or any(map(is_up, self.away))))


class DirtyQueue:
    """The dirty partitions, as they were read last."""

    def __init__(self, retry_s: float) -> None:
        self.count = 0
        """Dirty partitions, also those that are not due."""
        self._retry_s = retry_s
        self._due: list[Dirty] = []
        self._left: dict[Partition, _Left] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    def read(self, notes: Sequence[Dirty], newest: RingEpoch, now: float, is_up: IsUp) -> None:
        """Take all notes as they are now; `newest` is that of the tables that this process knows."""
        self.count = len(notes)
        present = {note.partition for note in notes}
        self._left = {partition: left for partition, left in self._left.items() if partition in present}
        waiting = {p for p, left in self._left.items() if left.epoch >= newest and not left.is_due(now, is_up)}
        due = [note for note in notes if note.partition not in waiting]
        self._due = sorted(due, key=lambda note: (note.is_moving, note.partition))

    def is_any_due(self, now: float, is_up: IsUp) -> bool:
        """Return True if one that was read last has to be walked now."""
        return bool(self._due) or any(left.is_due(now, is_up) for left in self._left.values())

    def take(self, width: Width) -> list[Dirty]:
        """Remove and return the notes that are walked next, ascending; at least one of those that are due."""
        first = self._due[0]
        count = 1
        for last, note in pairwise(self._due):
            is_near = note.partition - last.partition - 1 <= width.gap
            if note.is_moving != first.is_moving or not is_near or note.partition - first.partition >= width.partitions:
                break
            count += 1
        taken, self._due = self._due[:count], self._due[count:]
        return taken

    def cleared(self, partitions: Iterable[Partition]) -> None:
        """Note that partitions are clean."""
        for partition in partitions:
            self.count -= 1
            self._left.pop(partition, None)

    def leave(
        self, partition: Partition, epoch: RingEpoch, missing: Iterable[MemberId], now: float, is_up: IsUp
    ) -> None:
        """Note that a walk by that table left a partition dirty, and which members did not answer it."""
        before = self._left.get(partition)
        is_in_vain = before is not None and (now < before.retry_at or not before.away)
        tries = min(before.tries + 1, TRIES_MAX) if before is not None and is_in_vain else 0
        missing = frozenset(missing)
        away = frozenset([member for member in missing if not is_up(member)])
        soon_s = RETRY_FIRST_S * RETRY_GROWTH**tries if missing else self._retry_s
        self._left[partition] = _Left(epoch, now + self._retry_s, now + soon_s, away, tries)
