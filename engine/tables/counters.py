"""Numbers that are never handed out twice: node ids, births, segment ids.

Rules kept here:
- Numbers are taken from memory.  The table COUNTERS holds a mark that no number handed out by a durable commit
  reaches; it is moved on by a block, in the same transaction as the first number that needs it.
- After a restart numbering goes on at the mark, so up to a block of numbers is skipped.  Numbers taken by a
  decision that failed are skipped too.
- Whoever takes a number depends on the group of the mark: a file named by it, say, may be made only when that
  group is durable, else a restart would hand the number out again.
"""

from __future__ import annotations

from typing import Final

from engine.format.layouts import COUNTER_RECORD
from lakefs.errors import IndexDamaged
from lakefs.ids import ROOT_NODE, Sequence


class Counter:
    """One sequence of numbers, kept in table COUNTERS under `key` in steps of `block`."""

    __slots__ = ("block", "key", "mark", "mark_sequence", "next")

    def __init__(self, key: bytes, first: int, block: int) -> None:
        self.key: Final = key
        self.block: Final = block
        self.next = first
        self.mark = first
        """Numbers below it may be handed out without writing; moved when a transaction that moves it joins."""
        self.mark_sequence = Sequence(0)
        """Group of the mark: a number may be used outside the journal once that is durable."""

    def restore(self, record: bytes | None) -> None:
        """Go on at the stored mark; `record` is None in a new store."""
        if record is None:
            return
        if len(record) != COUNTER_RECORD.size:
            raise IndexDamaged(
                f"counter {self.key.decode()} has {len(record)} bytes", subject=self.key.decode()
            )
        (self.mark,) = COUNTER_RECORD.unpack(record)
        self.next = self.mark


class Counters:
    """The counters of a store."""

    __slots__ = ("birth", "node", "segment")

    def __init__(self) -> None:
        self.node = Counter(b"node", ROOT_NODE + 1, 4096)
        self.birth = Counter(b"birth", 1, 4096)
        self.segment = Counter(b"segment", 1, 16)

    def all(self) -> tuple[Counter, ...]:
        """Every counter."""
        return (self.node, self.birth, self.segment)
