"""Numbers that are never handed out twice: node ids, births, segment ids.

Rules kept here:
- Numbers are taken from memory.  The table COUNTERS holds a mark above every number handed out by a durable commit.
  The transaction that takes the first number at the mark moves it up by a block.
- After a restart numbering continues at the mark, so up to a block of numbers is skipped.  Numbers taken by a failed
  decision are skipped, too.
- A user of a number depends on the group of its mark.  For example, a file may be named by the number only when that
  group is durable; else a restart would hand the number out again.
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
        """Numbers below it are handed out without writing; raised when the mutations of a transaction join a group."""
        self.mark_sequence = Sequence(0)
        """Group of the mark: numbers below it may be used outside the journal once that group is durable."""

    def restore(self, record: bytes | None) -> None:
        """Continue at the stored mark; `record` is None in a new store."""
        if record is None:
            return
        if len(record) != COUNTER_RECORD.size:
            raise IndexDamaged(f"counter {self.key.decode()} has {len(record)} bytes", subject=self.key.decode())
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
