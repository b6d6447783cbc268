"""The shared index's owner: the one writer of the table that clients read places of chunks from.

    start   a table is made, or the kept one is taken again; behind it all records are walked and put in
    life    each durable group's records go in and out, before its waiters run
    growth  a table that is full, and sized by itself, is replaced by one of twice the size, filled behind
    stop    a kept table gets the last sequence of the clean stop, after which nothing was written

An entry tells the place in a segment, or that in the DRAM tier while the chunk is there.

Rules kept here:
- An entry is put when its record is durable, so an answer from the table needs no waiting.
- An entry goes in the step in which the group that frees, moves or quarantines its chunk has become durable: before
  whoever waits for that group punches the place.
- Only what the record says of a raw chunk of the default domain goes in; what is not there is asked of the store.
- `in_slabs` has the place in a segment of exactly those chunks whose entry tells the DRAM tier.  The engine's own
  look-ups answer that one.  A kept table tells nothing of the tier after a clean stop.
- A kept table is taken again when store, boot and sequence are those of the last clean stop, and every entry is
  whole; else it is made anew.  While it is in use, its header says so.
- Table full, memory short, files that cannot be used by themselves: counted or said, never an error of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
from engine.host.memory_limits import memory_bytes
from engine.memory.backing import Backing, open_backing
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing, Writers
from lakefs.errors import EngineBusy, LakeError, StoreDamaged
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
"""The processor's caches of addresses reach about as far with small pages."""
GATHER_BYTES: Final = 16 * MIB
"""In one call beside the loop: some 10 ms."""
_KEYS_END: Final = b"\xff"
_PLAIN_KEY: Final = (b"\0\0", 255)
"""Default domain, whole chunk."""
_log: Final = structlog.get_logger(__name__)


def _nowhere(_: bytes) -> Found | None:
    return None


@dataclass
class _Counts:
    """Since the start."""

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
    """Whether its size is its own choice."""
    state: str = "filling"
    """`filling`, `ready`, `full`, or `partly filled` when the index could not be walked."""
    was_kept: bool = False
    """Whether the table is that of the last clean stop."""
    counts: _Counts = field(default_factory=_Counts)
    slab_place_of: Callable[[bytes], Found | None] = _nowhere
    """Where a chunk is in the DRAM tier, as an entry tells it; None: nowhere."""
    in_slabs: dict[bytes, Found] = field(default_factory=dict)
    _full: trio.Event = field(default_factory=trio.Event)

    # --- asking ------------------------------------------------------------------------------------

    def places_of(self, chunks: list[ChunkId]) -> list[Found | None]:
        """Durable places in segments of those that are known here; not counted."""
        found = self.table.find_many(chunks)
        if self.in_slabs:
            in_slabs = self.in_slabs
            return [in_slabs.get(chunk, place) for chunk, place in zip(chunks, found, strict=True)]
        return found

    def find_many(self, chunks: list[ChunkId]) -> list[Found | None]:
        """As `places_of`, for clients."""
        found = self.places_of(chunks)
        missed = found.count(None)
        self.counts.missed += missed
        self.counts.found += len(found) - missed
        return found

    def grants(self, chunks: list[ChunkId]) -> tuple[list[Grant], list[int]]:
        """Grants of what is known here to lie in segments, durably; and the indexes of all others."""
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
        """What the store's records say, of chunks known here to lie in segments, durably; see `record_at`."""
        return [
            None if place is None or place[0] != MEDIUM_SEGMENT else record_at(place)
            for place in self.places_of(chunks)
        ]

    def packed_grants(self, chunks: list[bytes], least_bytes: int, *, understood: bool) -> bytes | None:
        """As `grants`, encoded; None when not all is known here, or a chunk has less than `least_bytes`.

        `understood`: of what is in the DRAM tier its place there is told.
        """
        instead = None if understood or not self.in_slabs else list(map(self.in_slabs.get, chunks))
        try:
            packed = self.table.pack_grants(chunks, instead)
        except ValueError:  # an id that is none
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
            "refused": self.counts.refused,
            "grown": self.counts.grown,
            "found": self.counts.found,
            "missed": self.counts.missed,
            "lent": self.counts.lent,
            "in_slabs": len(self.in_slabs),
        }

    # --- writing -----------------------------------------------------------------------------------

    def put(self, chunk: bytes, place: Found) -> bool:
        """The chunk is at this place, durably; False when the table does not take it."""
        if self.table.put(chunk, *place):
            return True
        self.counts.refused += 1
        if self.table.count + self.table.dead >= entries_max(self.table.capacity):
            self.state = "full"
            self._full.set()
        return False

    def remove(self, chunk: bytes) -> None:
        """The chunk is not at any place that the table could tell."""
        self.in_slabs.pop(chunk, None)
        self.table.remove(chunk)

    def tell_slab(self, chunk: bytes) -> None:
        """The chunk has come into the DRAM tier: its entry, if it has one, tells that."""
        place = self.in_slabs.get(chunk) or self.table.find(chunk)
        if place is not None and place[0] == MEDIUM_SEGMENT:
            self._tell(chunk, place)

    def tell_segment(self, chunk: bytes) -> None:
        """The chunk leaves the DRAM tier: its entry tells its segment again."""
        place = self.in_slabs.pop(chunk, None)
        if place is not None:
            self.put(chunk, place)

    def _tell(self, chunk: bytes, place: Found) -> bool:
        """The chunk is at this place of a segment, durably: its entry tells that, or where it is in the DRAM tier.

        False when the table does not take it.
        """
        slab_place = self.slab_place_of(chunk)
        if slab_place is None or slab_place[3:] != place[3:]:
            self.in_slabs.pop(chunk, None)
            return self.put(chunk, place)
        is_taken = self.put(chunk, slab_place)
        if is_taken:
            self.in_slabs[chunk] = (*place[:3], slab_place[3], slab_place[4])  # numbers that are kept once
        return is_taken

    def records_durable(self, mutations: list[Mutation]) -> None:
        """A group is durable: what it says of chunks is so now."""
        for op, table, key, value in mutations:
            if table is Table.CHUNKS and op is not Op.DELETE:
                self._put_record(key, value)
            elif table is Table.CHUNKS or op is not Op.DELETE:
                self.remove(chunk_id_of_key(key))

    def _put_record(self, key: bytes, value: bytes) -> None:
        """What the record says; nothing when the table cannot say it, or the chunk is damaged."""
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
        """Walk all chunk records; what changes meanwhile is put by its group."""
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

        Where to go on, what to wait for, and whether there are no more.
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
        """Have a large table on huge pages, a piece at a time: a look at random then misses one cache less."""
        if len(self.backing.memory) < GATHERED_FROM_BYTES or self.backing.on_huge_pages:
            return
        for begin in range(0, len(self.backing.memory), GATHER_BYTES):
            if self.is_growing and self._full.is_set():
                return  # another one takes its place
            if not await self.offload.run(self.backing.gather, begin, GATHER_BYTES):
                return
        self.backing.on_huge_pages = True

    async def _grow(self) -> bool:
        """Take a table of twice the size; the old one is emptied, so that its readers come and ask."""
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
        """Take what is kept, or an empty table; from now on the header says that it is in use.  Blocks.  DiskFailed.

        `clean_before`: where the last boot stopped cleanly, if it did.
        """
        reason = self._why_anew(clean_before)
        self.was_kept = not reason
        if self.was_kept:
            self.state = "ready"
        elif self.backing.is_old:
            _log.info("the kept shared index is made anew", reason=reason)
            self.backing.erase()
            self.table = SharedTable(
                self.backing.memory, self.table.capacity
            )  # the audit counted what is gone
        self._write_header()
        if self.backing.is_kept:
            self.backing.mark_in_use()

    def _write_header(self, clean_sequence: int = NOT_CLEAN) -> None:
        header = self._header(self.identity.boot_id, clean_sequence).pack()
        self.backing.memory[: len(header)] = header

    def _header(self, boot_id: BootId, clean_sequence: int) -> TableHeader:
        return TableHeader(
            self.table.capacity, self.identity.store_id, boot_id, clean_sequence, self.table.count
        )

    def _why_anew(self, clean_before: Sequence | None) -> str:
        """Why the table is not the one of the last clean stop, whole; empty when it is."""
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
        """The store stops cleanly here: note it, for the next start.  Blocks."""
        for chunk in list(self.in_slabs):
            self.tell_segment(chunk)
        if self.state != "ready":
            return
        self._write_header(clean_sequence)
        try:
            self.backing.save()
        except LakeError as error:
            _log.warning("the shared index is not kept", reason=error.message)

    def close(self) -> None:
        """Nobody asks any more, and readers are told that nothing keeps the table true."""
        self.metadata.on_durable_records(frozenset(), None)
        del self.table
        self.backing.memory[: len(SUPERSEDED)] = SUPERSEDED
        self.backing.close()


def record_at(place: Found) -> ChunkRecord:
    """A place in a segment as a record, with a birth that none has.

    So it is not taken for the store's own: whoever finds other bytes at its place looks there again.
    """
    _, segment, offset, stored_bytes, crc = place
    return ChunkRecord(_NO_BIRTH, SegmentId(segment), offset, stored_bytes, stored_bytes, crc)


def capacity_allowed() -> int:
    """The largest table within the memory's share."""
    capacity, most = HOT_INDEX_SLOTS_MIN, memory_bytes() // HOT_INDEX_MEMORY_SHARE
    while table_bytes(2 * capacity) <= most:
        capacity *= 2
    return capacity


def _place_in(key: bytes, value: bytes) -> Found | None:
    """What a chunk record says, when a table can say it."""
    if (key[1:3], key[35]) != _PLAIN_KEY or len(value) != CHUNK_RECORD.size:
        return None
    version, codec, cipher, kind, _, _, segment, offset, stored, logical, crc = CHUNK_RECORD.unpack(value)
    if (version, codec, cipher, kind) != (1, 0, 0, CHECKSUM_CRC32C_GRANULE):
        return None
    if stored != logical or offset >= 1 << 32:
        return None
    return MEDIUM_SEGMENT, segment, offset, stored, crc
