"""The tail of the log as one replica has seen it: groups that are in the coordinator, and their numbers of parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lakefs.ids import Sequence


class TailGroup(NamedTuple):
    """A group in the log: the length of its body, and its number of parts."""

    sequence: Sequence
    body_bytes: int
    part_count: int


class Tail:
    """Groups behind the last one that was trimmed, as far as this replica has seen them, in order."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._groups: deque[TailGroup] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[TailGroup]:
        return iter(self._groups)

    @property
    def last(self) -> Sequence:
        """The last group; 0 if there is none."""
        return self._groups[-1].sequence if self._groups else Sequence(0)

    def begins_by(self, sequence: Sequence) -> bool:
        """Return True if the first group is this one, or one before it."""
        return bool(self._groups) and self._groups[0].sequence <= sequence

    def add(self, sequence: Sequence, body_bytes: int, part_count: int) -> None:
        """Note the next group."""
        self._groups.append(TailGroup(sequence, body_bytes, part_count))
        self.nbytes += body_bytes

    def add_part(self, sequence: Sequence, part_bytes: int, number: int) -> None:
        """Note a part of a group that this replica has; parts come in order, and some once more."""
        last = self._groups[-1] if self._groups else None
        if last is None or sequence > last.sequence:
            self.add(sequence, part_bytes, number + 1)
        elif sequence == last.sequence and number == last.part_count:
            self._groups[-1] = TailGroup(sequence, last.body_bytes + part_bytes, number + 1)
            self.nbytes += part_bytes

    def trim(self, upto: Sequence) -> None:
        """Forget groups that were trimmed."""
        while self._groups and self._groups[0].sequence <= upto:
            self.nbytes -= self._groups.popleft().body_bytes
