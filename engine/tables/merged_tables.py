"""The tables as the engine's logic sees them: overlay and index merged, at one instant.

Rules kept here:
- A view reads, in this order: a transaction's own mutations, the overlay's current layer, its applying layer, the
  index's snapshot.  The first that has the key decides; a tombstone means absent.
- A view is used without `await`.  The snapshot moves on only in steps in which no view is open (`open_views` is
  asserted), and mutations are published only after the transaction ended: so a view is one instant without locks.
- A scan merges the four in key order.  It does not see mutations that its transaction makes after the scan began.
- Scans that were neither closed nor exhausted are closed with their view: no cursor outlives its snapshot.

Numbers that are never handed out twice (node ids, births, segment ids) are taken from counters:
- Numbers are taken from memory.  The table COUNTERS holds a mark above every number handed out by a durable commit.
  The transaction that takes the first number at the mark moves it up by a block.
- After a restart numbering continues at the mark, so up to a block of numbers is skipped.  Numbers taken by a failed
  decision are skipped, too.
- A user of a number depends on the group of its mark.  For example, a file may be named by the number only when that
  group is durable; else a restart would hand the number out again.

It decides nothing about groups and durability: `engine.metadata.group_commit` assigns sequences, publishes mutations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Final, Protocol

from engine.format.columns import Insertions
from engine.format.layouts import COUNTER_RECORD, RECORD_HEADER, Mutation, Op, Table
from engine.tables.lmdb_index import Index
from engine.tables.overlay import Layer, Overlay
from lakefs.errors import IndexDamaged
from lakefs.ids import ROOT_NODE, Birth, NodeId, SegmentId, Sequence

_KEY_BYTES_MAX: Final = 511
_RECORD_HEADER_BYTES: Final = RECORD_HEADER.size
_MANY_KEYS: Final = 4
"""Fewer keys are looked up one by one: that costs less than a cursor."""
_Scan = Generator[tuple[bytes, bytes], None, None]


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


class BucketRule(Protocol):
    """The owner's word on buckets that are made and removed; called in the step of a decision."""

    def making(self, bucket: str) -> None:
        """Raise BucketUnassigned if the bucket may not be made here now."""
        ...

    def removed(self, bucket: str) -> None:
        """Note that a bucket is removed."""
        ...


class AnyBucket:
    """`BucketRule` of names that have all buckets."""

    def making(self, bucket: str) -> None:
        """See `BucketRule`."""

    def removed(self, bucket: str) -> None:
        """See `BucketRule`."""


class Tables:
    """Overlay, index and counters of one store.  Used on the loop only."""

    def __init__(self, index: Index, overlay: Overlay) -> None:
        """The overlay holds groups behind `index.applied`, or nothing; the counters are read from both."""
        self.index = index
        self.overlay = overlay
        self.counters = Counters()
        self.bucket_rule: BucketRule = AnyBucket()
        self.open_views = 0
        self.restore_counters()

    def restore_counters(self) -> None:
        """Continue at the stored marks: at an opening, and when groups of others were taken."""
        with TableView(self) as view:
            for counter in (self.counters.node, self.counters.birth, self.counters.segment):
                counter.restore(view.get(Table.COUNTERS, counter.key))

    def use_bucket_rule(self, rule: BucketRule) -> None:
        """Ask `rule` of each bucket that is made or removed from now on."""
        self.bucket_rule = rule

    def drop_applied(self) -> None:
        """Move the snapshot and drop the applying layer, in one step; called after its commit to the index."""
        assert self.open_views == 0, "a view is held across an await"
        self.index.refresh()
        self.overlay.drop_applied()

    def replace_index(self, index: Index) -> Index:
        """Read from another index with the same applied sequence from now on; returns the old one, open."""
        assert self.open_views == 0, "a view is held across an await"
        old, self.index = self.index, index
        return old


class TableView:
    """A consistent read of all tables (`engine.tables.views.View`); a context manager, open for its `with` block."""

    __slots__ = ("_applying", "_current", "_index_get", "_index_present", "_scans", "_sequence", "_tables")

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._current = tables.overlay.current
        self._applying = tables.overlay.applying
        self._index_get: Callable[[Table, bytes], bytes | None] = tables.index.get
        self._index_present: Callable[[Table, list[bytes]], set[bytes]] = tables.index.present
        self._sequence = Sequence(0)
        self._scans: list[_Scan] = []

    def __enter__(self) -> TableView:
        self._tables.open_views += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tables.open_views -= 1
        assert self._tables.open_views >= 0, "each view is closed once"
        for scan in self._scans:
            scan.close()

    @property
    def sequence(self) -> Sequence:
        """Greatest sequence among the entries read so far; 0 when all came from the index and so are durable."""
        return self._sequence

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the checked value; None when absent.  IndexDamaged."""
        entry = self._current.tables[table].get(key)
        if entry is None and self._applying is not None:
            entry = self._applying.tables[table].get(key)
        if entry is None:
            return self._index_get(table, key)
        if entry[0] > self._sequence:
            self._sequence = entry[0]
        return entry[1]

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        """Return the keys that have a value; as `get` of each, in one call.  IndexDamaged."""
        layers = (self._current, self._applying)
        if len(keys) < _MANY_KEYS or not all(
            layer is None or layer.tables[table].keys().isdisjoint(keys) for layer in layers
        ):
            return {key for key in keys if self.get(table, key) is not None}
        return self._index_present(table, keys)

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the entries with start <= key < end, ascending.  IndexDamaged when a record is damaged."""
        scan = self._merge(table, start, end, None, [])
        self._scans.append(scan)
        return scan

    def _merge(
        self, table: Table, start: bytes, end: bytes, own: dict[bytes, bytes | None] | None, own_keys: list[bytes]
    ) -> _Scan:
        """Merge index and overlay (and a transaction's own keys, sorted) into one ascending run."""
        stored = self._tables.index.scan(table, start, end)
        layers = [layer for layer in (self._current, self._applying) if layer is not None]
        sources = [layer.keys_between(table, start, end) for layer in layers]
        if own_keys:
            sources.append(iter(own_keys))
        exhausted = (b"", b"")
        record = next(stored, exhausted)
        previous = b""
        for key in heapq.merge(*sources) if len(sources) > 1 else sources[0]:
            if key == previous:
                continue
            previous = key
            while record is not exhausted and record[0] < key:
                yield record
                record = next(stored, exhausted)
            if record[0] == key:
                record = next(stored, exhausted)
            value = own[key] if own is not None and key in own else self._overlaid(table, key, layers)
            if value is not None:
                yield key, value
        while record is not exhausted:
            yield record
            record = next(stored, exhausted)

    def _overlaid(self, table: Table, key: bytes, layers: list[Layer]) -> bytes | None:
        """Return the value of a key that one of the layers has, None for a tombstone."""
        for layer in layers:
            entry = layer.tables[table].get(key)
            if entry is not None:
                if entry[0] > self._sequence:
                    self._sequence = entry[0]
                return entry[1]
        raise AssertionError("the key came from a layer")


class TableTransaction(TableView):
    """A view that collects mutations and reads its own (`engine.tables.views.Transaction`).

    `mutations` are in the order they were made; `Committer` publishes them.  `body_bytes` is their size in a group's
    body, `record_count` the count of their records there.
    """

    __slots__ = ("_marks", "_own", "body_bytes", "mutations", "notes", "record_count")

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.mutations: list[Mutation | Insertions] = []
        self.notes: list[object] = []
        self.body_bytes = 0
        self.record_count = 0
        self._own: dict[Table, dict[bytes, bytes | None]] = {}
        self._marks: dict[Counter, int] = {}

    def __enter__(self) -> TableTransaction:
        super().__enter__()
        return self

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the value, this transaction's own mutations included."""
        own = self._own.get(table)
        if own is not None and key in own:
            return own[key]
        return super().get(table, key)

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        """Return the keys that have a value, this transaction's own mutations included."""
        own = self._own.get(table)
        if own is not None and not own.keys().isdisjoint(keys):
            return {key for key in keys if self.get(table, key) is not None}
        return super().present(table, keys)

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over entries with start <= key < end, ascending, own mutations before the first `next` included."""
        scan = self._merge_own(table, start, end)
        self._scans.append(scan)
        return scan

    def insert(self, table: Table, key: bytes, value: bytes) -> None:
        """Add an entry that the caller has seen to be absent."""
        self._mutate(Op.INSERT, table, key, value)

    def insert_many(self, table: Table, keys: list[bytes], values: list[bytes]) -> None:
        """Add entries, each key once, that the caller has seen to be absent; the lists are this transaction's now."""
        insertions = Insertions(table, keys, values)
        self.mutations.append(insertions)
        self.body_bytes += insertions.body_bytes
        self.record_count += len(keys)
        self._own.setdefault(table, {}).update(zip(keys, values, strict=True))

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Add or replace an entry."""
        self._mutate(Op.PUT, table, key, value)

    def delete(self, table: Table, key: bytes) -> None:
        """Remove an entry that the caller has seen."""
        self._mutate(Op.DELETE, table, key, b"")

    def making_bucket(self, bucket: str) -> None:
        """Say that a bucket is to be made.  BucketUnassigned."""
        self._tables.bucket_rule.making(bucket)

    def bucket_removed(self, bucket: str) -> None:
        """Say that a bucket is removed."""
        self._tables.bucket_rule.removed(bucket)

    def note(self, *notes: object) -> None:
        """Add frozen values to the mutations; they are dropped with them when the decision raises."""
        self.notes += notes

    def new_node_id(self) -> NodeId:
        """Return a node id never used before."""
        return NodeId(self._take(self._tables.counters.node))

    def new_node_ids(self, count: int) -> NodeId:
        """Return the first of that many consecutive node ids, none used before."""
        return NodeId(self._take(self._tables.counters.node, count))

    def new_birth(self) -> Birth:
        """Return the next birth number."""
        return Birth(self._take(self._tables.counters.birth))

    def new_births(self, count: int) -> Birth:
        """Return the first of that many consecutive birth numbers, the next ones."""
        return Birth(self._take(self._tables.counters.birth, count))

    def new_segment_id(self) -> SegmentId:
        """Return a segment id never used before."""
        return SegmentId(self._take(self._tables.counters.segment))

    def settle_counters(self, sequence: Sequence) -> None:
        """Keep the marks that this transaction moved; called when its mutations joined group `sequence`."""
        for counter, mark in self._marks.items():
            assert counter.next <= mark, "numbers handed out lie below the mark"
            counter.mark = mark
            counter.mark_sequence = sequence

    def _take(self, counter: Counter, count: int = 1) -> int:
        taken = counter.next
        counter.next = taken + count
        mark = self._marks.get(counter, counter.mark)
        if taken < mark and counter.mark_sequence > self._sequence:
            self._sequence = counter.mark_sequence
        if counter.next > mark:
            mark = max(mark, taken)  # the first number that is not below the mark moves it up by whole blocks
            mark += -(-(counter.next - mark) // counter.block) * counter.block
            self._marks[counter] = mark
            self._mutate(Op.PUT, Table.COUNTERS, counter.key, COUNTER_RECORD.pack(mark))
        return taken

    def _mutate(self, op: Op, table: Table, key: bytes, value: bytes) -> None:
        assert 0 < len(key) <= _KEY_BYTES_MAX, "the index takes keys of 1 to 511 bytes"
        self.mutations.append((op, table, key, value))
        self.record_count += 1
        self.body_bytes += _RECORD_HEADER_BYTES + len(key) + len(value)
        own = self._own.get(table)
        if own is None:
            own = self._own[table] = {}
        own[key] = None if op is Op.DELETE else value

    def _merge_own(self, table: Table, start: bytes, end: bytes) -> _Scan:
        own = dict(self._own.get(table, ()))
        yield from self._merge(table, start, end, own, sorted(key for key in own if start <= key < end))
