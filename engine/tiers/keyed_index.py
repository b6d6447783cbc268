"""The owner of the keyed index: the only writer of the table in which clients find keyed blobs without a request.

    start   fills a new table from the records of all values and spaces
    life    puts and removes the entries of each durable group's records, before the group's waiters run
    use     a request about a key whose entry is not what the store says sets the entry right

The table has the format of the shared index (`lakefs.shared_index.key_format` says what is in it).

Rules kept here:
- A value has an entry from the step in which its record is durable to the step in which its removal is: before a task
  that waits for that group frees a chunk of it.  If the table does not take it, its space is SPACE_PARTIAL.
- A space has an entry from the step in which it is durable to that in which its removal is: so no value of a removed
  space is found, although upkeep removes the values later.
- A place in an entry was durable when it was entered.  The chunk of an entry has a record: its bytes are there, or in
  another place.  Nobody tells this table of a chunk that was moved: readers find other bytes, or none, and ask.  An
  extent is never used again, so those bytes are never another value's.
- A space's entry says if values of it expire, from before the first such value has an entry.
- Expired values and damaged ones keep their entries until they are removed.  A request that meets one marks it as
  DOUBTFUL; from then on readers ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import trio

from engine.format.keyed import (
    KEYED_HEAD,
    KEYED_PART,
    SPACES_BEGIN,
    SPACES_END,
    VALUES_BEGIN,
    VALUES_END,
    number_of_space,
    space_and_key,
    unpack_space,
    value_key,
)
from engine.format.layouts import Mutation, Op, StoreIdentity, Table, chunk_key
from engine.memory.backing import Backing
from engine.metadata.metadata_store import Metadata
from engine.tables.views import View
from engine.tiers.owned_table import OwnedTable, TableCounts, place_in
from lakefs.ids import ChunkId, ChunkKind, Sequence as GroupSequence
from lakefs.limits import GC_BATCH
from lakefs.ports import Offload
from lakefs.shared_index.key_format import (
    DOUBTFUL,
    KEYED_MAGIC,
    PLACED,
    SOME_EXPIRE,
    SPACE_PARTIAL,
    SPACE_WHOLE,
    UNPLACED,
    id_of_record,
    id_of_space,
)
from lakefs.shared_index.keyed_index import KeyFinder, key_id
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import Found, entries_max, table_bytes

KEYED_WATCHED: Final = frozenset((Table.KEYED,))
_DATA: Final = bytes([ChunkKind.DATA])
_ASK: Final[Found] = (DOUBTFUL, 0, 0, 0, 0)


@dataclass
class KeyedIndex(OwnedTable):
    """The table of keys and what keeps it true.  Used on the loop."""

    magic: ClassVar[bytes] = KEYED_MAGIC
    name: ClassVar[str] = "keyed index"
    walk_begins: ClassVar[bytes] = VALUES_BEGIN
    metadata: Metadata
    places_of: Callable[[list[ChunkId]], list[Found | None]]
    """Returns the durable place in a segment of each chunk, None where it is not known at once."""
    is_absent: Callable[[bytes], bool]
    """Returns True if the value in a record counts as absent: it has expired, or is damaged."""
    offload: Offload
    identity: StoreIdentity
    backing: Backing
    table: SharedTable
    is_growing: bool = True
    state: str = "filling"
    """`filling`, `ready`, `full`, or `partly filled` when the tables could not be walked."""
    counts: TableCounts = field(default_factory=TableCounts)
    corrected: int = 0
    """Entries that a request has set right."""
    full: trio.Event = field(default_factory=trio.Event)
    _spaces: dict[int, bool] | None = None
    """Spaces that exist, and if all their keys are known to have entries; None until the walk has begun."""
    _finder: tuple[SharedTable, KeyFinder] | None = None
    """Looks keys up in this table."""
    _expiring: set[int] = field(default_factory=set)
    """Spaces of which a value that expires has had an entry in this table."""

    # --- what is durable -----------------------------------------------------------------------------

    def records_durable(self, mutations: list[Mutation]) -> None:
        """Apply a durable group's records of values and spaces to the table."""
        last = {key: None if op is Op.DELETE else value for op, _, key, value in mutations}
        put: list[tuple[bytes, bytes]] = []
        for key, value in last.items():
            if SPACES_BEGIN <= key < SPACES_END:
                self._space_durable(number_of_space(key), value)
            elif not VALUES_BEGIN <= key < VALUES_END:
                continue
            elif value is None:
                self.table.remove(id_of_record(key))
            else:
                put.append((key, value))
        chunks = [_only_chunk(value) for _, value in put]
        places = iter(self.places_of([chunk for chunk in chunks if chunk is not None]))
        for (key, value), chunk in zip(put, chunks, strict=True):
            self._enter(key, value, None if chunk is None else next(places))

    def _enter(self, key: bytes, value: bytes, place: Found | None) -> None:
        """Put the entry of a value, by key and value of its record; `place`: of its only chunk, if it is known."""
        self._note_expiry(key, value)
        entry = place if place is not None and place[0] == PLACED else _somewhere(value)
        if not self.put_entry(id_of_record(key), entry):
            self._lacks_a_key(space_and_key(key)[0])

    def _note_expiry(self, key: bytes, value: bytes) -> None:
        """Say of a value that expires, before it has an entry, that its space has such values."""
        number = space_and_key(key)[0]
        if KEYED_HEAD.unpack_from(value)[-1] and number not in self._expiring:
            self._expiring.add(number)
            entry = self.table.find(id_of_space(number))
            if entry is not None:
                self._enter_space(number, entry[0])

    def _lacks_a_key(self, number: int) -> None:
        if self._spaces is not None and number in self._spaces:
            self._spaces[number] = False
            self._enter_space(number, SPACE_PARTIAL)

    def _space_durable(self, number: int, record: bytes | None) -> None:
        """Note a space that exists, or does not, or no more; most records only have new settings or usage."""
        if record is None or unpack_space(record).removed:
            self.table.remove(id_of_space(number))
            self._expiring.discard(number)
            if self._spaces is not None:
                self._spaces.pop(number, None)
        elif self._spaces is not None and number not in self._spaces:  # it is new, so its keys come after it
            self._spaces[number] = True
            self._enter_space(number, SPACE_WHOLE)

    def _enter_space(self, number: int, tier: int) -> None:
        expiring = SOME_EXPIRE if number in self._expiring else 0
        self.put_entry(id_of_space(number), (tier, 0, 0, expiring, 0))  # a space without entry is asked for

    # --- filling -------------------------------------------------------------------------------------

    def begin_fill(self) -> None:
        """Put all spaces, as partial ones.

        One whose making is not durable yet is among them: nobody has heard its number, and its keys come after it.
        """
        with self.metadata.view() as view:
            records = list(view.scan(Table.KEYED, SPACES_BEGIN, SPACES_END))
        self._spaces = {number_of_space(key): True for key, value in records if not unpack_space(value).removed}
        for number in self._spaces:
            self._enter_space(number, SPACE_PARTIAL)

    def end_fill(self) -> None:
        """Put the spaces all of whose keys have entries as whole ones."""
        for number, has_all in list((self._spaces or {}).items()):
            if has_all:
                self._enter_space(number, SPACE_WHOLE)

    def fill_page(self, start: bytes) -> tuple[bytes, GroupSequence, bool]:
        """See `OwnedTable.fill_page`."""
        durable = self.metadata.durable_sequence
        with self.metadata.view() as view:
            for count, (key, value) in enumerate(view.scan(Table.KEYED, start, VALUES_END)):
                place = None if count == GC_BATCH else self._place_of(view, value)
                if view.sequence > durable or count == GC_BATCH:
                    return start, view.sequence, False
                self._enter(key, value, place)
                start = key + b"\0"
            return start, view.sequence, True

    def _place_of(self, view: View, value: bytes) -> Found | None:
        """Return the place of a value's only chunk, as the view has it."""
        chunk = _only_chunk(value)
        key = None if chunk is None else chunk_key(chunk)
        record = None if key is None else view.get(Table.CHUNKS, key)
        return None if key is None or record is None else place_in(key, record)

    def emptied(self) -> None:
        """See `OwnedTable.emptied`."""
        self._spaces = None
        self._expiring.clear()

    # --- use -----------------------------------------------------------------------------------------

    def match(self, number: int, keys: list[bytes], sizes: Sequence[int]) -> list[bool | None]:
        """Return for each key of a space if it has a value, of that size if there are `sizes`; None: ask the tables.

        Each key is one that a value may have.  In a space of which values expire, that is None for all.
        """
        if number in self._expiring:
            return [None] * len(keys)
        if self._finder is None or self._finder[0] is not self.table:
            self._finder = self.table, KeyFinder(self.table)
        return self._finder[1].match(number, keys, list(sizes) or None)

    def correct(self, number: int, answers: Iterable[tuple[bytes, Sequence[ChunkId]]]) -> None:
        """Set entries right that are not as a request was answered: keys of a space, with the chunks of their values.

        Only what the store says now, and is durable, is entered.
        """
        if self._spaces is None or number not in self._spaces:
            return
        asked = list(answers)
        entries = self.table.find_many([key_id(number, key) for key, _ in asked])
        singles = [chunks[0] for _, chunks in asked if len(chunks) == 1]
        places = iter(self.places_of(singles))
        for (key, chunks), entry in zip(asked, entries, strict=True):
            place = next(places) if len(chunks) == 1 else None
            if chunks:
                is_right = entry is None or (entry == place if place else entry[0] == UNPLACED)
            else:
                is_right = entry is None or entry == _ASK
            if not is_right:
                self._correct(value_key(number, key))

    def _correct(self, key: bytes) -> None:
        with self.metadata.view() as view:
            record = view.get(Table.KEYED, key)
            if record is None:  # its removal is on its way
                return
            place = _ASK if self.is_absent(record) else self._place_of(view, record) or _somewhere(record)
            if view.sequence > self.metadata.durable_sequence:
                return
        self._note_expiry(key, record)
        self.put_entry(id_of_record(key), place)
        self.corrected += 1

    def statistics(self) -> dict[str, Any]:
        """For people and scripts; JSON-able."""
        return {
            "state": self.state,
            "entries": self.table.count,
            "entries_max": entries_max(self.table.capacity),
            "bytes": table_bytes(self.table.capacity),
            "huge_pages": self.backing.on_huge_pages,
            "refused": self.counts.refused,
            "grown": self.counts.grown,
            "lent": self.counts.lent,
            "corrected": self.corrected,
        }

    def close(self) -> None:
        """Release the table, with a header that sends its readers to the engine.  No look-up may follow."""
        self.metadata.off_durable_records(self.records_durable)
        self.end_table()


def _somewhere(value: bytes) -> Found:
    """Return the entry of a value without a place of its own, from its record: it has the value's length."""
    parts = KEYED_PART.struct.iter_unpack(value[KEYED_HEAD.size :])
    return UNPLACED, 0, 0, sum(length for _, length in parts), 0


def _only_chunk(value: bytes) -> ChunkId | None:
    """Return the chunk of a value of one part, from its record; None if it has several."""
    if KEYED_HEAD.unpack_from(value)[3] != 1:
        return None
    return ChunkId(_DATA + KEYED_PART.unpack_from(value, KEYED_HEAD.size)[0])
