"""A view that notes the records which it reads, so that their stamps can go with an answer.

Rules kept here:
- Noted are the keys that were asked for, present or not, in the tables of names: a later change of any of them turns
  its stamp.
- Chunk records are not noted: the content of a chunk never changes under its id, and its place is only a hint.
- What was read from a range of a table, or from any other table, has no stamps: it may not be repeated.
- Readers that want no stamps use a plain view, and pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from engine.format.layouts import Table
from engine.tables.merged_tables import Tables, TableView

STAMPED: Final = (Table.NODES, Table.NAMES, Table.BUCKETS, Table.VERSIONS)
"""The tables whose records have stamps: all that names, attributes and settings of buckets are in."""
Record = tuple[Table, bytes]
"""A table, and a key in it."""
StampsOf = Callable[[list[Record]], bytes]
"""Returns the set of stamps of records, as they are now."""
_stamped: Final = frozenset(STAMPED)


class RecordedView(TableView):
    """A view of all tables at one instant, and the list of the records that were read from it."""

    __slots__ = ("_is_whole", "_records", "_stamps_of")

    def __init__(self, tables: Tables, stamps_of: StampsOf) -> None:
        """`stamps_of` returns the set of stamps of records, as they are now."""
        super().__init__(tables)
        self._stamps_of = stamps_of
        self._records: list[Record] = []
        self._is_whole = True

    def __enter__(self) -> RecordedView:
        super().__enter__()
        return self

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the checked value; None when absent.  IndexDamaged."""
        if table in _stamped:
            self._records.append((table, key))
        elif table is not Table.CHUNKS:
            self._is_whole = False
        return super().get(table, key)

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        """Return the keys that have a value, as `get` of each."""
        return {key for key in keys if self.get(table, key) is not None}

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over entries as `TableView.scan` does."""
        self._is_whole = False
        return super().scan(table, start, end)

    def noted(self) -> list[Record]:
        """Return the records that were noted since the last `take_stamps`."""
        return list(self._records)

    def note(self, records: list[Record]) -> None:
        """Note records that were read from this view before."""
        self._records += records

    def take_stamps(self) -> bytes:
        """Return the set of stamps of all that was read since the last call; b"" if it may not be repeated."""
        is_whole = self._is_whole
        records = self._take()
        return self._stamps_of(records) if is_whole else b""

    def take_records(self) -> list[Record]:
        """Return the records that were read since the last call, all by their keys."""
        assert self._is_whole, "nothing but records with stamps was read"
        return self._take()

    def stamps_of(self, records: list[Record]) -> bytes:
        """Return the set of stamps of records."""
        return self._stamps_of(records)

    def _take(self) -> list[Record]:
        records = self._records
        self._records, self._is_whole = [], True
        return records
