"""The owner of the shared index: the only writer of the table in which clients look up places of chunks.

    start   makes a table, or takes the kept one again; a new one is then filled from all chunk records
    life    puts and removes the entries of each durable group's records, before the group's waiters run
    growth  replaces a full table, unless its size was configured, by one of twice the size, and fills that
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
- A full table, short memory or an unusable file is counted or logged; it never fails a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import structlog
import trio

from engine.format.layouts import (
    CHECKSUM_CRC32C_GRANULE,
    CHUNK_RECORD,
    ChunkRecord,
    Mutation,
    Op,
    StoreIdentity,
    Table,
    chunk_id_of_key,
)
from engine.memory.backing import Backing, open_backing
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing, Writers
from lakefs.errors import EngineBusy, LakeError, StoreDamaged
from lakefs.host.memory_limits import memory_bytes
from lakefs.ids import Birth, BootId, ChunkId, SegmentId, Sequence
from lakefs.limits import GC_BATCH, HOT_INDEX_MEMORY_SHARE, HOT_INDEX_SLOTS_MIN, MIB
from lakefs.ports import Offload
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import (
    HEADER_PAGE_BYTES,
    NOT_CLEAN,
    SUPERSEDED,
    Found,
    TableHeader,
    entries_max,
    table_bytes,
    unpack_header,
)
from lakefs.wire.grants import MEDIUM_NONE, MEDIUM_SEGMENT, Grant

NO_GRANT: Final = Grant(MEDIUM_NONE)
WATCHED: Final = frozenset((Table.CHUNKS, Table.QUARANTINE))
_NO_BIRTH: Final = Birth(0)
GATHERED_FROM_BYTES: Final = 32 * MIB
"""Smaller tables stay on small pages: the processor's TLBs reach about that far with them."""
GATHER_BYTES: Final = 16 * MIB
"""Bytes moved to huge pages in one call in a thread: some 10 ms."""
_KEYS_END: Final = b"\xff"
_PLAIN_KEY: Final = (b"\0\0", 255)
"""Domain and kind bytes of a key: default domain, whole chunk."""
_log: Final = structlog.get_logger(__name__)


def _nowhere(_: bytes) -> Found | None:
    return None


@dataclass
class _Counts:
    """Counts since the start, as status lists them."""

    refused: int = 0
    grown: int = 0
    found: int = 0
    missed: int = 0
    lent: int = 0


@dataclass
class SharedIndex:
    """One table and what keeps it true.  Used on the loop."""

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
    counts: _Counts = field(default_factory=_Counts)
    slab_place_of: Callable[[bytes], Found | None] = _nowhere
    """Returns a chunk's place in the DRAM tier as an entry holds it, or None."""
    in_slabs: dict[bytes, Found] = field(default_factory=dict)
    _full: trio.Event = field(default_factory=trio.Event)

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
            if place is None or place[0] != MEDIUM_SEGMENT
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
            None if place is None or place[0] != MEDIUM_SEGMENT else record_at(place)
            for place in self.places_of(chunks)
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
        return {
            "state": self.state,
            "backing": self.backing.kind,
            "note": self.backing.note,
            "huge_pages": self.backing.on_huge_pages,
            "native": True,
            "was_kept": self.was_kept,
            "entries": self.table.count,
            "entries_max": entries_max(self.table.capacity),
            "bytes": table_bytes(self.table.capacity),
            **asdict(self.counts),
            "in_slabs": len(self.in_slabs),
        }

    # --- writing -----------------------------------------------------------------------------------

    def put(self, chunk: bytes, place: Found) -> bool:
        """Put the chunk's durable place into the table; returns False if the table does not take it."""
        if self.table.put(chunk, *place):
            return True
        self.counts.refused += 1
        if self.table.count + self.table.dead >= entries_max(self.table.capacity):
            self.state = "full"
            self._full.set()
        return False

    def remove(self, chunk: bytes) -> None:
        """Remove the chunk's entry, if it has one."""
        self.in_slabs.pop(chunk, None)
        self.table.remove(chunk)

    def tell_slab(self, chunk: bytes) -> None:
        """Let the entry of a chunk that entered the DRAM tier, if it has one, name its cell."""
        place = self.in_slabs.get(chunk) or self.table.find(chunk)
        if place is not None and place[0] == MEDIUM_SEGMENT:
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
        assert place[0] == MEDIUM_SEGMENT, "`in_slabs` keeps places in segments"
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
            elif table is Table.CHUNKS or op is not Op.DELETE:
                self.remove(chunk_id_of_key(key))

    def _put_record(self, key: bytes, value: bytes) -> None:
        """Put the record's place; removes the entry if the table cannot hold the place, or the chunk is damaged."""
        chunk = chunk_id_of_key(key)
        place = _place_in(key, value)
        if place is None or self.is_quarantined(chunk) or not self._tell(chunk, place):
            self.remove(chunk)

    # --- life --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Fill the table, and grow it when it is full; until cancelled."""
        if self.state == "filling":
            await self._fill()
        await self._gather()
        while self.is_growing:
            await self._full.wait()
            if not await self._grow():
                return
            await self._fill()
            await self._gather()

    async def _fill(self) -> None:
        """Put all chunk records; a record that changes during the walk is put by its group."""
        pacing = Pacing(Writers(self.metadata))
        start = b""
        try:
            while True:
                start, seen, is_done = self._fill_page(start)
                if self._full.is_set():
                    return
                if is_done:
                    break
                await self.metadata.wait_durable(seen)
                await pacing.rest()
        except LakeError as error:
            self.state = "partly filled"
            _log.warning("the shared index is not filled", reason=error.message)
            return
        self.state = "ready"

    def _fill_page(self, start: bytes) -> tuple[bytes, Sequence, bool]:
        """Put the next records, up to one that is not durable.

        Returns the key to continue at, the sequence to wait for, and True if there are no more.
        """
        durable = self.metadata.durable_sequence
        with self.metadata.view() as view:
            for count, (key, value) in enumerate(view.scan(Table.CHUNKS, start, _KEYS_END)):
                if view.sequence > durable or count == GC_BATCH:
                    return start, view.sequence, False
                self._put_record(key, value)
                start = key + b"\0"
            return start, view.sequence, True

    async def _gather(self) -> None:
        """Move a large table to huge pages, a piece at a time: a random look-up then has one cache miss less."""
        if len(self.backing.memory) < GATHERED_FROM_BYTES or self.backing.on_huge_pages:
            return
        for begin in range(0, len(self.backing.memory), GATHER_BYTES):
            if self.is_growing and self._full.is_set():
                return  # a larger table will replace this one
            if not await self.offload.run(self.backing.gather, begin, GATHER_BYTES):
                return
        self.backing.on_huge_pages = True

    async def _grow(self) -> bool:
        """Take an empty table of twice the size; clears the old one, so that its readers ask the engine."""
        capacity = self.table.capacity * 2
        try:
            if capacity > capacity_allowed():
                raise EngineBusy("memory allows no larger one")
            backing = await self.offload.run(open_backing, "memory", table_bytes(capacity))
        except LakeError as error:
            _log.warning("the shared index is full", entries=self.table.count, reason=error.message)
            return False
        old, old_table = self.backing, self.table
        self.backing, self.table = backing, SharedTable(backing.memory, capacity)
        self.in_slabs.clear()
        self.state, self._full = "filling", trio.Event()
        self.counts.grown += 1
        self._write_header()
        old.memory[: len(SUPERSEDED)] = SUPERSEDED
        try:
            await self.offload.run(old_table.clear)
        finally:
            del old_table
            old.close()
        return True

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
        self._write_header()
        if self.backing.is_kept:
            self.backing.mark_in_use()

    def _write_header(self, clean_sequence: int = NOT_CLEAN) -> None:
        header = self._header(self.identity.boot_id, clean_sequence).pack()
        self.backing.memory[: len(header)] = header

    def _header(self, boot_id: BootId, clean_sequence: int) -> TableHeader:
        return TableHeader(self.table.capacity, self.identity.store_id, boot_id, clean_sequence, self.table.count)

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
        if header != self._header(BootId(self.identity.boot_before), clean_before):
            return "it is cut, or not that of the last clean stop of this store"
        return ""

    def keep(self, clean_sequence: Sequence) -> None:
        """Save a kept table with the sequence of the clean stop, for the next start.  Blocks."""
        for chunk in list(self.in_slabs):
            self.tell_segment(chunk)
        assert not self.in_slabs, "a kept table names no cell of the DRAM tier"
        if self.state != "ready":
            return
        self._write_header(clean_sequence)
        try:
            self.backing.save()
        except LakeError as error:
            _log.warning("the shared index is not kept", reason=error.message)

    def close(self) -> None:
        """Release the table, with a header that sends its readers to the engine.  No look-up may follow."""
        self.metadata.on_durable_records(frozenset(), None)
        del self.table
        self.backing.memory[: len(SUPERSEDED)] = SUPERSEDED
        self.backing.close()


def record_at(place: Found) -> ChunkRecord:
    """Return a place in a segment as a record, with a birth that no chunk has.

    So it is never taken for the store's own record: a reader that finds other bytes there looks that up again.
    """
    _, segment, offset, stored_bytes, crc = place
    return ChunkRecord(_NO_BIRTH, SegmentId(segment), offset, stored_bytes, stored_bytes, crc)


def capacity_allowed() -> int:
    """Return the capacity of the largest table within the index's share of memory."""
    capacity, most = HOT_INDEX_SLOTS_MIN, memory_bytes() // HOT_INDEX_MEMORY_SHARE
    while table_bytes(2 * capacity) <= most:
        capacity *= 2
    return capacity


def _place_in(key: bytes, value: bytes) -> Found | None:
    """Return the place in a chunk record, or None if a table cannot hold it."""
    if (key[1:3], key[35]) != _PLAIN_KEY or len(value) != CHUNK_RECORD.size:
        return None
    version, codec, cipher, kind, _, _, segment, offset, stored, logical, crc = CHUNK_RECORD.unpack(value)
    if (version, codec, cipher, kind) != (1, 0, 0, CHECKSUM_CRC32C_GRANULE):
        return None
    if stored != logical or offset >= 1 << 32:
        return None
    return MEDIUM_SEGMENT, segment, offset, stored, crc
