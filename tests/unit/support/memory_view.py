"""An in-memory store of tables, for tests of code on `engine.tables.views`: real order, real atomicity, no disk.

Transactions change the tables in place and undo when they raise; each step is checked against its promise (insert of
the absent, delete of the present).  Reads are counted: a scan also steps over what was deleted, as it does in the
overlay until the index has taken the deletions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from sortedcontainers import SortedDict

from engine.format.layouts import Table
from engine.tables.views import Transaction, View
from lakefs.ids import Birth, NodeId, SegmentId, Sequence

T = TypeVar("T")


@dataclass
class MemoryStore:
    """All tables, the counters, and the notes of the transactions that succeeded, with their sequences."""

    tables: dict[Table, SortedDict[bytes, bytes]] = field(default_factory=lambda: {t: SortedDict() for t in Table})
    sequence: int = 0
    last_node: int = 1
    last_birth: int = 0
    last_segment: int = 0
    notes: list[tuple[Sequence, object]] = field(default_factory=list)
    tombstones: dict[Table, SortedDict[bytes, None]] = field(default_factory=lambda: {t: SortedDict() for t in Table})
    gets: int = 0
    scan_steps: int = 0

    def view(self) -> MemoryView:
        """Return a view of the present state; use it before the next transaction."""
        return MemoryView(self)

    def run(self, decide: Callable[[MemoryTransaction], T]) -> T:
        """Run one transaction, as a group of its own; when it raises, nothing has changed."""
        transaction = MemoryTransaction(self)
        try:
            result = decide(transaction)
        except BaseException:
            transaction.undo()
            raise
        self.sequence += 1
        self.notes.extend((Sequence(self.sequence), note) for note in transaction.notes)
        return result

    def reads(self) -> int:
        """Return the number of gets and scan steps so far."""
        return self.gets + self.scan_steps

    def dump(self) -> dict[Table, dict[bytes, bytes]]:
        """Return a copy of all tables, to compare states."""
        return {table: dict(entries) for table, entries in self.tables.items()}


class MemoryView:
    """A view; counts what is read through it in its store."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    @property
    def sequence(self) -> Sequence:
        return Sequence(self.store.sequence)

    def get(self, table: Table, key: bytes) -> bytes | None:
        assert 0 < len(key) <= 511, "LMDB refuses such a key"
        self.store.gets += 1
        return self.store.tables[table].get(key)

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        return {key for key in keys if self.get(table, key) is not None}

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        assert 0 < len(start) <= 511, "LMDB refuses such a key"
        entries = self.store.tables[table]
        tombstones = self.store.tombstones[table]
        size = len(entries)
        passed = tombstones.bisect_left(start)
        for key in entries.irange(start, end, inclusive=(True, False)):
            assert len(entries) == size, "the table changed under a scan"
            reached = tombstones.bisect_left(key)
            self.store.scan_steps += 1 + reached - passed
            passed = reached
            yield key, entries[key]
        self.store.scan_steps += tombstones.bisect_left(end) - passed


class MemoryTransaction(MemoryView):
    """A transaction; sees its own changes."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.notes: list[object] = []
        self.mutations = 0
        self._before: list[tuple[Table, bytes, bytes | None]] = []

    def insert(self, table: Table, key: bytes, value: bytes) -> None:
        assert key not in self.store.tables[table], "insert of a key that is there"
        self._set(table, key, value)

    def insert_many(self, table: Table, keys: list[bytes], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.insert(table, key, value)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self._set(table, key, value)

    def delete(self, table: Table, key: bytes) -> None:
        assert key in self.store.tables[table], "delete of a key that is not there"
        self._remember(table, key)
        del self.store.tables[table][key]
        self.store.tombstones[table][key] = None

    def new_node_id(self) -> NodeId:
        self.store.last_node += 1
        return NodeId(self.store.last_node)

    def new_node_ids(self, count: int) -> NodeId:
        self.store.last_node += count
        return NodeId(self.store.last_node - count + 1)

    def new_birth(self) -> Birth:
        return self.new_births(1)

    def new_births(self, count: int) -> Birth:
        self.store.last_birth += count
        return Birth(self.store.last_birth - count + 1)

    def new_segment_id(self) -> SegmentId:
        self.store.last_segment += 1
        return SegmentId(self.store.last_segment)

    def making_bucket(self, bucket: str) -> None:
        pass

    def bucket_removed(self, bucket: str) -> None:
        pass

    def note(self, *notes: object) -> None:
        self.notes += notes

    def undo(self) -> None:
        """Put everything back, last change first."""
        for table, key, value in reversed(self._before):
            if value is None:
                self.store.tables[table].pop(key, None)
            else:
                self.store.tables[table][key] = value
                self.store.tombstones[table].pop(key, None)

    def _set(self, table: Table, key: bytes, value: bytes) -> None:
        assert 0 < len(key) <= 511, "LMDB refuses such a key"
        self._remember(table, key)
        self.store.tables[table][key] = value
        self.store.tombstones[table].pop(key, None)

    def _remember(self, table: Table, key: bytes) -> None:
        self.mutations += 1
        self._before.append((table, key, self.store.tables[table].get(key)))


def _conforms(store: MemoryStore) -> tuple[View, Transaction]:
    """Never called: mypy checks the classes against the protocols here."""
    return MemoryView(store), MemoryTransaction(store)
