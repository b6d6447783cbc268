"""The owner of the shared index: the only writer of the table in which clients look up places of chunks.

    start   makes a table, or takes the kept one again; a new one is then filled from all chunk records
    life    puts and removes the entries of each durable group's records, before the group's waiters run
    growth  replaces a full table, unless its size was configured (`engine.tiers.owned_table`), and fills the new one
    stop    writes the sequence of the clean stop into the header of a kept table

An entry holds the chunk's place in a segment, or its place in the DRAM tier while the chunk is in it.

Rules kept here:
- An entry is put when its record is durable, so an answer from the table needs no waiting.
- An entry is removed in the step in which the group that frees, moves or quarantines its chunk becomes durable: before
  a task that waits for the group punches the place.
- The table holds only raw chunks of the default domain, as their records say; other chunks are looked up in the store.
- `in_slabs` has the place in a segment of exactly those chunks whose entry names the DRAM tier.  The engine's own
  look-ups return that place.  After a clean stop no entry of a kept table names the tier.
- A kept table is used again only if store, boot and sequence are those of the last clean stop and every entry is
  whole; else a new one is made.  While it is in use, its header says so, and its file is empty.
- An unusable file is logged; it never fails a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import trio

from engine.format.layouts import ChunkRecord, Mutation, Op, StoreIdentity, Table, chunk_id_of_key
from engine.format.shards import is_whole
from engine.memory.backing import Backing
from engine.metadata.metadata_store import Metadata
from engine.tiers.owned_table import OwnedTable, TableCounts, place_in
from lakefs.errors import LakeError, StoreDamaged
from lakefs.ids import Birth, BootId, ChunkId, SegmentId, Sequence
from lakefs.limits import GC_BATCH
from lakefs.ports import Offload
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import HEADER_PAGE_BYTES, Found, unpack_header
from lakefs.wire.grants import Grant
from lakefs.wire.media import IN_FILES, MEDIUM_NONE, MEDIUM_SEGMENT

NO_GRANT: Final = Grant(MEDIUM_NONE)
WATCHED: Final = frozenset((Table.CHUNKS, Table.QUARANTINE))
_NO_BIRTH: Final = Birth(0)
_KEYS_END: Final = b"\xff"
_log: Final = structlog.get_logger(__name__)


def _nowhere(_: bytes) -> Found | None:
    return None


@dataclass
class SharedIndex(OwnedTable):
    """The table of chunks and what keeps it true.  Used on the loop."""

    metadata: Metadata
    is_quarantined: Callable[[ChunkId], bool]
    offload: Offload
    identity: StoreIdentity
    backing: Backing
    table: SharedTable
    is_growing: bool
    """True if the table may grow: its size was not configured."""
    state: str = "filling"
    """`filling`, `ready`, `full`, or `partly filled` when the index could not be walked."""
    was_kept: bool = False
    """True if the table of the last clean stop was taken again."""
    counts: TableCounts = field(default_factory=TableCounts)
    slab_place_of: Callable[[bytes], Found | None] = _nowhere
    """Returns a chunk's place in the DRAM tier as an entry holds it, or None."""
    in_slabs: dict[bytes, Found] = field(default_factory=dict)
    full: trio.Event = field(default_factory=trio.Event)

    # --- asking ------------------------------------------------------------------------------------

    def places_of(self, chunks: list[ChunkId]) -> list[Found | None]:
        """Return the durable place in a segment of each chunk, None for one that has no entry; not counted."""
        found = self.table.find_many(chunks)
        if self.in_slabs:
            in_slabs = self.in_slabs
            return [in_slabs.get(chunk, place) for chunk, place in zip(chunks, found, strict=True)]
        return found

    def find_many(self, chunks: list[ChunkId]) -> list[Found | None]:
        """Return `places_of` the chunks for clients: hits and misses are counted."""
        found = self.places_of(chunks)
        missed = found.count(None)
        self.counts.missed += missed
        self.counts.found += len(found) - missed
        return found

    def grants(self, chunks: list[ChunkId]) -> tuple[list[Grant], list[int]]:
        """Return grants of the chunks' places in segments, NO_GRANT for unknown ones, and the indexes of those."""
        grants = [
            NO_GRANT
            if place is None or place[0] not in IN_FILES
            else Grant(MEDIUM_SEGMENT, place[1], place[2], place[3], place[3], 0, place[4])
            for place in self.places_of(chunks)
        ]
        unknown = [index for index, grant in enumerate(grants) if grant is NO_GRANT]
        self.counts.missed += len(unknown)
        self.counts.found += len(grants) - len(unknown)
        return grants, unknown

    def records(self, chunks: list[ChunkId]) -> list[ChunkRecord | None]:
        """Return each chunk's place in a segment as a record (see `record_at`), None for one without an entry."""
        return [
            None if place is None or place[0] not in IN_FILES else record_at(place) for place in self.places_of(chunks)
        ]

    def packed_grants(self, chunks: list[bytes], least_bytes: int, *, understood: bool) -> bytes | None:
        """Return `grants` of the chunks, encoded; None if one has no entry or is shorter than `least_bytes`.

        With `understood`, a chunk in the DRAM tier gets its place there instead.
        """
        instead = None if understood or not self.in_slabs else list(map(self.in_slabs.get, chunks))
        try:
            packed = self.table.pack_grants(chunks, instead)
        except ValueError:  # not a chunk id
            return None
        if packed is None or packed[1] < least_bytes:
            return None
        self.counts.found += len(chunks)
        return packed[0]

    def statistics(self) -> dict[str, Any]:
        """For people and scripts; JSON-able."""
        return self.figures(was_kept=self.was_kept, in_slabs=len(self.in_slabs))

    # --- writing -----------------------------------------------------------------------------------

    def put(self, chunk: bytes, place: Found) -> bool:
        """Put the chunk's durable place into the table; returns False if the table does not take it."""
        return self.put_entry(chunk, place)

    def remove(self, chunk: bytes) -> None:
        """Remove the chunk's entry, if it has one."""
        self.in_slabs.pop(chunk, None)
        self.table.remove(chunk)

    def tell_slab(self, chunk: bytes) -> None:
        """Let the entry of a chunk that entered the DRAM tier, if it has one, name its cell."""
        place = self.in_slabs.get(chunk) or self.table.find(chunk)
        if place is not None and place[0] in IN_FILES:
            self._tell(chunk, place)

    def tell_segment(self, chunk: bytes) -> None:
        """Let the entry of a chunk that leaves the DRAM tier name its segment again."""
        place = self.in_slabs.pop(chunk, None)
        if place is not None:
            self.put(chunk, place)

    def _tell(self, chunk: bytes, place: Found) -> bool:
        """Put an entry for a chunk at this durable place in a segment: that place, or its cell in the DRAM tier.

        Returns False if the table does not take it.
        """
        assert place[0] in IN_FILES, "`in_slabs` keeps places in segments"
        slab_place = self.slab_place_of(chunk)
        if slab_place is None or slab_place[3:] != place[3:]:
            self.in_slabs.pop(chunk, None)
            return self.put(chunk, place)
        is_taken = self.put(chunk, slab_place)
        if is_taken:
            self.in_slabs[chunk] = (*place[:3], slab_place[3], slab_place[4])  # shares number objects
        return is_taken

    def records_durable(self, mutations: list[Mutation]) -> None:
        """Apply a durable group's records of chunks and quarantine to the table."""
        for op, table, key, value in mutations:
            if table is Table.CHUNKS and op is not Op.DELETE:
                self._put_record(key, value)
            elif (table is Table.CHUNKS or op is not Op.DELETE) and is_whole(key):
                self.remove(chunk_id_of_key(key))

    def _put_record(self, key: bytes, value: bytes) -> None:
        """Put the record's place; removes the entry if the table cannot hold the place, or the chunk is damaged.

        Shards have no entries.
        """
        chunk = chunk_id_of_key(key)
        place = place_in(key, value)
        if place is None:
            if is_whole(key):
                self.remove(chunk)
        elif self.is_quarantined(chunk) or not self._tell(chunk, place):
            self.remove(chunk)

    # --- life --------------------------------------------------------------------------------------

    def fill_page(self, start: bytes) -> tuple[bytes, Sequence, bool]:
        """See `OwnedTable.fill_page`."""
        durable = self.metadata.durable_sequence
        with self.metadata.view() as view:
            for count, (key, value) in enumerate(view.scan(Table.CHUNKS, start, _KEYS_END)):
                if view.sequence > durable or count == GC_BATCH:
                    return start, view.sequence, False
                self._put_record(key, value)
                start = key + b"\0"
            return start, view.sequence, True

    def emptied(self) -> None:
        """See `OwnedTable.emptied`."""
        self.in_slabs.clear()

    # --- kept tables -------------------------------------------------------------------------------

    def begin(self, clean_before: Sequence | None) -> None:
        """Take the kept table, or an empty one, and mark its header as in use.  Blocks.  DiskFailed.

        `clean_before` is the sequence of the last boot's clean stop, None if it did not stop cleanly.
        """
        reason = self._why_anew(clean_before)
        self.was_kept = not reason
        if self.was_kept:
            self.state = "ready"
        elif self.backing.is_old:
            _log.info("the kept shared index is made anew", reason=reason)
            self.backing.erase()
            # The audit counted entries that were erased.
            self.table = SharedTable(self.backing.memory, self.table.capacity)
        self.write_header()
        if self.backing.is_kept:
            self.backing.mark_in_use()

    def _why_anew(self, clean_before: Sequence | None) -> str:
        """Return why the table is not the whole one of the last clean stop; "" if it is."""
        if not self.backing.is_old:
            return "there was none"
        if clean_before is None:
            return "the store was not stopped cleanly"
        try:
            header = unpack_header(self.backing.memory[:HEADER_PAGE_BYTES])
        except StoreDamaged as error:
            return error.message
        if header.capacity != self.table.capacity:
            return "it has another size"
        if not self.table.audit():
            return "an entry is torn"
        if header != self.header(BootId(self.identity.boot_before), clean_before):
            return "it is cut, or not that of the last clean stop of this store"
        return ""

    def keep(self, clean_sequence: Sequence) -> None:
        """Save a kept table with the sequence of the clean stop, for the next start.  Blocks."""
        for chunk in list(self.in_slabs):
            self.tell_segment(chunk)
        assert not self.in_slabs, "a kept table names no cell of the DRAM tier"
        if self.state != "ready":
            return
        self.write_header(clean_sequence)
        try:
            self.backing.save()
        except LakeError as error:
            _log.warning("the shared index is not kept", reason=error.message)

    def close(self) -> None:
        """Release the table, with a header that sends its readers to the engine.  No look-up may follow."""
        self.metadata.off_durable_records(self.records_durable)
        self.end_table()


def record_at(place: Found) -> ChunkRecord:
    """Return a place in a segment as a record, with a birth that no chunk has.

    So it is never taken for the store's own record: a reader that finds other bytes there looks that up again.
    """
    _, segment, offset, stored_bytes, crc = place
    return ChunkRecord(_NO_BIRTH, SegmentId(segment), offset, stored_bytes, stored_bytes, crc)
