"""Puts the parts of groups together, as they are read or as a watch brings them.  No I/O.

Rules kept here:
- Groups leave in order, each once, when their last part is here and all match their checksums.
- Parts of groups that have left are ignored: a watch that follows a range brings them again.
- A part that was removed before its group was whole is forgotten: the next leader removes what the last one left.
- A part of a later group than the next one, which is not whole, means that groups are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.format.group_parts import LogKeys, Part, joined, unpack_part
from lakefs.errors import StoreUnusable
from lakefs.ids import Sequence


class ReplicaIsBehind(StoreUnusable):
    """The log begins behind the groups that this replica has: it begins anew from another one's checkpoint."""


class LogGroup(NamedTuple):
    """A whole group of the log.  `part_count`: of its keys."""

    sequence: Sequence
    body: bytes
    record_count: int
    part_count: int


class Assembly:
    """Groups in the making, from `next_sequence` on."""

    def __init__(self, keys: LogKeys, next_sequence: Sequence) -> None:
        self.next_sequence = next_sequence
        self._keys = keys
        self._parts: dict[int, Part] = {}

    @property
    def first_key(self) -> bytes:
        """Where to read from: at or before the next group's first part."""
        return self._keys.group(self.next_sequence)

    @property
    def left_over(self) -> list[bytes]:
        """Keys of the parts of a group that is not whole."""
        return [self._keys.part(self.next_sequence, number) for number in sorted(self._parts)]

    def read_anew(self) -> None:
        """Forget parts: they are read again."""
        self._parts.clear()

    def put(self, key: bytes, value: bytes) -> Iterator[LogGroup]:
        """Take a part; yields its group if that is whole now.  ReplicaIsBehind, StoreDamaged, StoreUnusable."""
        place = self._keys.place(key)
        if place is None or place[0] < self.next_sequence:
            return
        sequence, number = place
        if sequence > self.next_sequence:
            raise ReplicaIsBehind(
                f"the log of the names has group {sequence}, and this replica still needs {self.next_sequence}"
            )
        part = self._parts[number] = unpack_part(key, value)
        if part.end is None:
            return
        parts = [self._parts[number] for number in sorted(self._parts)]
        body = joined(key, parts)
        self._parts.clear()
        self.next_sequence = Sequence(sequence + 1)
        yield LogGroup(sequence, body, part.end.record_count, len(parts))

    def remove(self, key: bytes) -> None:
        """Forget a part that was removed."""
        place = self._keys.place(key)
        if place is not None and place[0] == self.next_sequence:
            self._parts.pop(place[1], None)
