"""One table that the engine shares, in the format of the shared index, and what both its owners do alike.

    run     fills the table, moves it to huge pages, and replaces it when it is full
    growth  takes an empty table of twice the size, and clears the old one: its readers ask for the new one

Rules kept here:
- A full table or short memory is counted and logged; it never fails a request.
- A replaced table's magic is zeros from the step in which the new one begins: so it has no entry that is older than
  its magic says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import structlog
import trio

from engine.format.layouts import CHECKSUM_CRC32C_GRANULE, CHUNK_RECORD, StoreIdentity
from engine.memory.backing import Backing, open_backing
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from lakefs.errors import EngineBusy, LakeError
from lakefs.host.memory_limits import memory_bytes
from lakefs.ids import WHOLE_CHUNK, BootId, Sequence
from lakefs.limits import HOT_INDEX_MEMORY_SHARE, HOT_INDEX_SLOTS_MIN, MIB
from lakefs.ports import Offload
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import MAGIC, NOT_CLEAN, SUPERSEDED, Found, TableHeader, entries_max, table_bytes
from lakefs.wire.media import MEDIUM_SEGMENT

GATHERED_FROM_BYTES: Final = 32 * MIB
"""Smaller tables stay on small pages: the processor's TLBs reach about that far with them."""
GATHER_BYTES: Final = 16 * MIB
"""Bytes moved to huge pages in one call in a thread: some 10 ms."""
_PLAIN_KEY: Final = (b"\0\0", WHOLE_CHUNK)
"""Domain and shard of a key: default domain, whole chunk."""
_log: Final = structlog.get_logger(__name__)


@dataclass
class TableCounts:
    """Counts since the start, as status lists them."""

    refused: int = 0
    grown: int = 0
    found: int = 0
    missed: int = 0
    lent: int = 0


class OwnedTable:
    """The table of one owner, which alone writes it.  Used on the loop."""

    magic: ClassVar[bytes] = MAGIC
    name: ClassVar[str] = "shared index"
    walk_begins: ClassVar[bytes] = b""
    """The key from which the records are walked to fill the table."""
    metadata: Metadata
    offload: Offload
    identity: StoreIdentity
    backing: Backing
    table: SharedTable
    is_growing: bool
    """True if the table may grow: its size was not configured."""
    state: str
    counts: TableCounts
    full: trio.Event
    """Set when the table has refused an entry for want of room."""

    def begin_fill(self) -> None:
        """Put what the walk does not."""

    def fill_page(self, start: bytes) -> tuple[bytes, Sequence, bool]:
        """Put the entries of the next records, up to one that is not durable.

        Returns the key to continue at, the sequence to wait for, and True if there are no more.
        """
        raise NotImplementedError

    def end_fill(self) -> None:
        """Note that all records have been walked."""

    def emptied(self) -> None:
        """Note that an empty table has replaced the old one."""
        raise NotImplementedError

    def figures(self, *, was_kept: bool, in_slabs: int) -> dict[str, Any]:
        """Return the statistics of any such table, JSON-able."""
        return {
            "state": self.state,
            "backing": self.backing.kind,
            "note": self.backing.note,
            "huge_pages": self.backing.on_huge_pages,
            "native": True,
            "was_kept": was_kept,
            "entries": self.table.count,
            "entries_max": entries_max(self.table.capacity),
            "bytes": table_bytes(self.table.capacity),
            **asdict(self.counts),
            "in_slabs": in_slabs,
        }

    def put_entry(self, identifier: bytes, place: Found) -> bool:
        """Put an entry; returns False if the table does not take it."""
        if self.table.put(identifier, *place):
            return True
        self.counts.refused += 1
        if self.table.count + self.table.dead >= entries_max(self.table.capacity):
            self.state = "full"
            self.full.set()
        return False

    async def fill(self) -> None:
        """Put all that the table is to have; returns early when it is full.

        A record that changes during the walk is put, or removed, by its group.
        """
        pacing = Pacing(self.metadata)
        start = self.walk_begins
        try:
            self.begin_fill()
            while True:
                start, seen, is_done = self.fill_page(start)
                if self.full.is_set():
                    return
                if is_done:
                    break
                await self.metadata.wait_durable(seen)
                await pacing.rest()
        except LakeError as error:
            self.state = "partly filled"
            _log.warning(f"the {self.name} is not filled", reason=error.message)
            return
        self.state = "ready"
        self.end_fill()

    async def run(self) -> None:
        """Fill the table, and grow it when it is full; until cancelled."""
        if self.state == "filling":
            await self.fill()
        await self._gather()
        while self.is_growing:
            await self.full.wait()
            if not await self._grow():
                return
            await self.fill()
            await self._gather()

    async def _gather(self) -> None:
        """Move a large table to huge pages, a piece at a time: a random look-up then has one cache miss less."""
        if len(self.backing.memory) < GATHERED_FROM_BYTES or self.backing.on_huge_pages:
            return
        for begin in range(0, len(self.backing.memory), GATHER_BYTES):
            if self.is_growing and self.full.is_set():
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
            _log.warning(f"the {self.name} is full", entries=self.table.count, reason=error.message)
            return False
        old, old_table = self.backing, self.table
        self.backing, self.table = backing, SharedTable(backing.memory, capacity)
        self.state, self.full = "filling", trio.Event()
        self.counts.grown += 1
        self.write_header()
        self.emptied()
        old.memory[: len(SUPERSEDED)] = SUPERSEDED
        try:
            await self.offload.run(old_table.clear)
        finally:
            del old_table
            old.close()
        return True

    def write_header(self, clean_sequence: int = NOT_CLEAN) -> None:
        """Write the header of a table of this boot."""
        header = self.header(self.identity.boot_id, clean_sequence).pack(self.magic)
        self.backing.memory[: len(header)] = header

    def header(self, boot_id: BootId, clean_sequence: int) -> TableHeader:
        """Return the header of the table."""
        return TableHeader(self.table.capacity, self.identity.store_id, boot_id, clean_sequence, self.table.count)

    def end_table(self) -> None:
        """Release the table, with a header that sends its readers to the engine.  No look-up may follow."""
        del self.table
        self.backing.memory[: len(SUPERSEDED)] = SUPERSEDED
        self.backing.close()


def capacity_allowed() -> int:
    """Return the capacity of the largest table within its share of memory."""
    capacity, most = HOT_INDEX_SLOTS_MIN, memory_bytes() // HOT_INDEX_MEMORY_SHARE
    while table_bytes(2 * capacity) <= most:
        capacity *= 2
    return capacity


def place_in(key: bytes, value: bytes) -> Found | None:
    """Return the place in a chunk record, or None if a table cannot hold it."""
    if (key[1:3], key[35]) != _PLAIN_KEY or len(value) != CHUNK_RECORD.size:
        return None
    version, codec, cipher, kind, _, _, segment, offset, stored, logical, crc = CHUNK_RECORD.unpack(value)
    if (version, codec, cipher, kind) != (1, 0, 0, CHECKSUM_CRC32C_GRANULE):
        return None
    if stored != logical or offset >= 1 << 32:
        return None
    return MEDIUM_SEGMENT, segment, offset, stored, crc
