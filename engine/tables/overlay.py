"""The overlay: mutations that are in the journal, or on their way there, and not yet in the index, in two layers.

    current   takes every mutation the moment it is decided, with the sequence of its group
    applying  frozen; being written to the index; dropped in one step with the index's new snapshot

Rules kept here:
- An entry is (sequence, value or None for a tombstone, absent below).  *Absent below* means that nothing under this
  layer had the key when the layer began, so applying it needs no read.  The key's first mutation in the layer sets it;
  later ones keep it.
- `freeze` freezes the whole current layer, so it is called only between groups: when a group closes or while none is
  open.  Then `applying` holds whole groups, and may be applied up to its `last_sequence` once that is durable.
- Nothing here awaits or blocks.  The applying layer is not changed, so the writer thread may read it.

Keys are sorted lazily: a commit appends new keys to a list, and a scan sorts them in.  Measured with 16,384 keys: 0.04
us for a commit's key, against 0.6 to 1.0 us with a sorted container; a scan pays 2 us for each key added since the
last scan, or 0.2 to 3 ms when there are many.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Final

from engine.format.columns import Insertions
from engine.format.layouts import Mutation, Op, Table
from lakefs.ids import Sequence

Entry = tuple[Sequence, bytes | None, bool]
"""Sequence of the group; value, None for a tombstone; True if nothing below the layer has the key."""

_TABLE_SLOTS: Final = max(Table) + 1
_ENTRY_BYTES: Final = 300
"""Memory of an entry: dictionary slot, tuple, sequence, key and value objects without their bytes."""
_INSORT_KEYS_MAX: Final = 64


class Layer:
    """One sorted map per table.  `entry_count` and `nbytes` bound the memory; `last_sequence` is 0 when empty."""

    __slots__ = ("_sorted", "_unsorted", "entry_count", "last_sequence", "nbytes", "tables")

    def __init__(self) -> None:
        self.tables: list[dict[bytes, Entry]] = [{} for _ in range(_TABLE_SLOTS)]
        self._sorted: list[list[bytes]] = [[] for _ in range(_TABLE_SLOTS)]
        self._unsorted: list[list[bytes]] = [[] for _ in range(_TABLE_SLOTS)]
        self.entry_count = 0
        self.nbytes = 0
        self.last_sequence = Sequence(0)

    def publish(self, sequence: Sequence, mutations: Iterable[Mutation | Insertions]) -> None:
        """Add the mutations of a decision of group `sequence`; later mutations of a key replace earlier ones."""
        assert sequence >= self.last_sequence, "groups are published in order"
        tables, unsorted = self.tables, self._unsorted
        fresh_count = nbytes = 0
        for mutation in mutations:
            if isinstance(mutation, Insertions):
                self._insert(sequence, mutation)
                continue
            op, table, key, value = mutation
            entries = tables[table]
            previous = entries.get(key)
            if previous is None:
                absent = op is Op.INSERT
                unsorted[table].append(key)
                fresh_count += 1
                nbytes += len(key)
            else:
                absent = previous[2]
            nbytes += len(value)
            entries[key] = (sequence, None if op is Op.DELETE else value, absent)
        self.entry_count += fresh_count
        self.nbytes += nbytes + fresh_count * _ENTRY_BYTES
        self.last_sequence = sequence

    def _insert(self, sequence: Sequence, insertions: Insertions) -> None:
        """Add the insertions of a decision of group `sequence`."""
        entries, keys = self.tables[insertions.table], insertions.keys
        if not entries.keys().isdisjoint(keys):  # some were removed, and are not gone from the index
            self.publish(sequence, insertions.mutations())
            return
        entries.update(zip(keys, zip(repeat(sequence), insertions.values, repeat(True))))  # noqa: B905 - of no length
        self._unsorted[insertions.table] += keys
        self.entry_count += len(keys)
        self.nbytes += insertions.key_bytes + insertions.value_bytes + len(keys) * _ENTRY_BYTES

    def keys_between(self, table: Table, start: bytes, end: bytes) -> Iterator[bytes]:
        """Iterate over keys with start <= key < end, tombstones' too, ascending.  Valid until the next `publish`."""
        keys, fresh = self._sorted[table], self._unsorted[table]
        if fresh:
            if len(fresh) <= _INSORT_KEYS_MAX:
                for key in fresh:
                    insort(keys, key)
            else:
                keys += fresh
                keys.sort()
            fresh.clear()
        first = bisect_left(keys, start)
        return map(keys.__getitem__, range(first, bisect_left(keys, end, first)))

    def non_empty_tables(self) -> Iterator[tuple[Table, dict[bytes, Entry]]]:
        """Yield the tables that have entries, in order of their ids."""
        for table in Table:
            if self.tables[table]:
                yield table, self.tables[table]


class Overlay:
    """The two layers.  `applying` is None when nothing is frozen."""

    __slots__ = ("applying", "current")

    def __init__(self) -> None:
        self.current = Layer()
        self.applying: Layer | None = None

    @property
    def entry_count(self) -> int:
        """Entries of both layers."""
        return self.current.entry_count + (self.applying.entry_count if self.applying is not None else 0)

    @property
    def nbytes(self) -> int:
        """Estimated memory of both layers."""
        return self.current.nbytes + (self.applying.nbytes if self.applying is not None else 0)

    def has_reached(self, entries: int, nbytes: int) -> bool:
        """Return True if both layers together have so many entries, or take so much memory."""
        layer, below = self.current, self.applying
        if below is None:
            return layer.entry_count >= entries or layer.nbytes >= nbytes
        return layer.entry_count + below.entry_count >= entries or layer.nbytes + below.nbytes >= nbytes

    def freeze(self) -> Layer:
        """Make the current layer the applying one and begin a new one.  Only between groups."""
        assert self.applying is None, "one layer is applied at a time"
        self.applying = self.current
        self.current = Layer()
        return self.applying

    def drop_applied(self) -> None:
        """Drop the applying layer: the index's snapshot holds it now."""
        assert self.applying is not None, "a layer is dropped once, after it was applied"
        self.applying = None
