"""Views and transactions: the interfaces through which the engine's logic reads and changes the tables.

A view is one instant: the overlay and one snapshot of LMDB, opened together without `await`.  It is valid until the
task that opened it reaches a checkpoint of trio, so no view is held across an `await`.

A transaction is a view that also collects mutations and reads its own.  The function that decides on them runs without
`await`.  When it returns, its mutations join the open journal group as a whole; when it raises, none do.

An answer that depends on a view leaves only when the view's `sequence` is durable (`Metadata.wait_durable`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.format.layouts import Table
from lakefs.ids import Birth, NodeId, SegmentId, Sequence


class BucketUnassigned(Exception):
    """A decision would make a bucket that is not assigned to these names: assign it, and decide again."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.bucket = bucket


class View(Protocol):
    """A consistent read of all tables at one instant."""

    @property
    def sequence(self) -> Sequence:
        """Greatest sequence among the entries read so far through this view (absences included)."""
        ...

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value, verified and without its checksum; None when absent.  IndexDamaged."""
        ...

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        """The keys that have a value: as `get` of each, in one call.  IndexDamaged."""
        ...

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the entries with start <= key < end, ascending.  Close or exhaust it before the view ends."""
        ...


class Transaction(View, Protocol):
    """A view that collects mutations.  Keys and values are bytes; values have no checksum here."""

    def insert(self, table: Table, key: bytes, value: bytes) -> None:
        """Add an entry that the caller has seen to be absent."""
        ...

    def insert_many(self, table: Table, keys: list[bytes], values: list[bytes]) -> None:
        """Add entries, each key once, that the caller has seen to be absent.  The lists are not changed afterwards."""
        ...

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Add or replace an entry."""
        ...

    def delete(self, table: Table, key: bytes) -> None:
        """Remove an entry that the caller has seen."""
        ...

    def new_node_id(self) -> NodeId:
        """A node id never used before.  Ids taken by a transaction that fails are skipped."""
        ...

    def new_node_ids(self, count: int) -> NodeId:
        """The first of that many consecutive node ids, none used before."""
        ...

    def new_birth(self) -> Birth:
        """The next birth number."""
        ...

    def new_births(self, count: int) -> Birth:
        """The first of that many consecutive birth numbers, the next ones."""
        ...

    def new_segment_id(self) -> SegmentId:
        """A segment id never used before."""
        ...

    def making_bucket(self, bucket: str) -> None:
        """Say that a bucket is to be made.  BucketUnassigned: not here, or not yet."""
        ...

    def bucket_removed(self, bucket: str) -> None:
        """Say that a bucket is removed."""
        ...

    def note(self, *notes: object) -> None:
        """Add frozen values to the mutations: they join the group with them, and are dropped with them.

        Observers get them with the group's sequence: `on_joined` ones when they join, `on_durable` ones once durable.
        """
        ...
