"""The DRAM tier in an engine: fills it after reads, serves reads from it before its source, and drops freed chunks.

The source (`engine.tiers.dram_source`) is an engine's segments, or at a head the members of its lake; "the disk" below
stands for either.

Rules kept here:
- A chunk is read from its source, checked by CRC32C, into a cell that no reader can see yet; it is published in the
  same step in which its record is looked up once more and found.  If a client's read has just brought and checked its
  bytes, those are copied instead, and the source is not read again.
- A chunk is forgotten in the step in which its record is removed or it is quarantined: before its place is punched.
- Bytes served from the tier are checked by CRC32C on the way, as are those from the disk.  On a mismatch the chunk is
  forgotten and read from the disk.
- No request waits for a fill.  A chunk that finds the queue full is left to its next read.

An engine without a tier has a `Dram` too, with `tier` None: it holds nothing and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
import trio
from crc32c import crc32c

from engine.format.checksums import check_payload, check_vector, vector_of
from engine.format.layouts import ChunkRecord
from engine.segments.reader import READ_STEP_BYTES
from engine.tiers.dram_source import DramSource
from engine.tiers.dram_tier import DramTier, Placement
from lakefs.content.verify import crcs_between, granules_around
from lakefs.errors import EngineBusy, LakeError
from lakefs.ids import Buffer, ChunkId, id_text
from lakefs.limits import (
    DRAM_FILLERS,
    DRAM_FILLS_QUEUED_MAX,
    DRAM_HELD_BYTES_MAX,
    DRAM_PAYLOAD_BYTES_MIN,
    GRANULE_BYTES,
)
from lakefs.ports import Offload
from lakefs.shared_index.table_format import Found
from lakefs.wire.messages import Grant

_COPIED_AT_ONCE_BYTES: Final = GRANULE_BYTES
"""Longest payload copied on the loop: 5 us.  Longer ones are copied in a thread."""
_log: Final = structlog.get_logger(__name__)


class _Payload(NamedTuple):
    """A whole chunk that was read and checked: its payload, its vector of CRCs if it has one, and its checksum."""

    payload: Buffer
    vector: bytes
    crc: int

    def copy_to(self, memory: memoryview) -> None:
        """Write it as in its segment: payload, then vector."""
        end = len(self.payload)
        memory[:end] = self.payload
        memory[end : end + len(self.vector)] = self.vector


class PinnedRange(NamedTuple):
    """Checked whole granules of a chunk in the arena: their offset in the payload, the bytes, the CRC32C of each.

    The bytes stay valid until `release`, which is called once.  `place` is that of the chunk.
    """

    begin: int
    payload: memoryview
    crcs: bytes
    release: Callable[[], None]
    place: Placement


class Dram:
    """The tier of one engine, if it has one.  Used on the loop."""

    def __init__(self, tier: DramTier | None, source: DramSource, offload: Offload) -> None:
        self.tier: Final = tier
        self._source = source
        self._offload = offload
        self._queued: set[ChunkId] = set()
        self._held: dict[ChunkId, _Payload] = {}
        """Bytes already read of some of the queued chunks."""
        self._held_bytes = 0
        self.offered = 0
        """Chunks brought in without another read of their segment."""
        self.client_reads = 0
        """Reads that clients reported: a sample of those they do without a request."""
        self.client_hits = 0
        """Reported reads whose chunk was in the tier."""
        self._wanted: trio.MemorySendChannel[ChunkId]
        self._wanted, self._wants = trio.open_memory_channel[ChunkId](DRAM_FILLS_QUEUED_MAX)
        if tier is not None:
            source.on_gone(tier.forget)

    # --- reads -------------------------------------------------------------------------------------

    def note_read(self, chunk: ChunkId, stored_bytes: int, *, by_client: bool = False) -> bool:
        """Count a read of the chunk's beginning.  Returns True if the chunk should be brought in: `offer` or `want` it.

        `by_client` is set for a read that a client did without a request, and reported.
        """
        if self.tier is None:
            return False
        if by_client:
            self.client_reads += 1
            self.client_hits += chunk in self.tier
        return self.tier.note_read(chunk, stored_bytes)

    def note_reads(self, chunks: Seq[ChunkId], grants: list[Grant], *, understood: bool) -> list[ChunkId]:
        """Call `note_read` for requested chunks; returns those worth bringing in.  With `understood`, replaces grants
        of chunks in the tier by grants of the arena."""
        return [] if self.tier is None else self.tier.note_reads(chunks, grants, understood=understood)

    def grant_remotely(self, chunks: Seq[ChunkId], grants: list[Grant]) -> None:
        """Replace grants of chunks in the tier by grants for READs over RDMA, for a client that has a queue pair."""
        if self.tier is not None:
            self.tier.grant_remotely(chunks, grants)

    def note_located(self, chunks: list[bytes], find: Callable[[bytes], Found | None], *, understood: bool) -> None:
        """Call `note_read` for chunks whose places were sent to a client, and `want` those worth it.

        None of them is too short for the tier.  `find` returns a chunk's place.
        """
        tier = self.tier
        if tier is None:
            return
        for chunk in tier.note_located(chunks, understood=understood):
            found = find(chunk)
            if found is not None and tier.may_fit(chunk, found[3]):
                self.want(chunk)

    def want(self, chunk: ChunkId) -> None:
        """Queue a chunk to be brought in from its segment; does nothing when the queue is full."""
        if chunk in self._queued:
            return
        try:
            self._wanted.send_nowait(chunk)
        except trio.WouldBlock:
            return
        self._queued.add(chunk)

    def offer(self, chunk: ChunkId, record: ChunkRecord, payload: Buffer, vector: bytes = b"") -> None:
        """Bring in a chunk just read whole and checked, or queue it.  Nothing may change its memory any more."""
        assert len(payload) == record.stored_bytes
        tier, read = self.tier, _Payload(payload, vector, record.crc)
        if tier is None or chunk in tier or chunk in self._queued:
            return
        if len(payload) > _COPIED_AT_ONCE_BYTES or tier.needs_slab(chunk, record.extent_bytes) is not None:
            self.want(chunk)
            if chunk in self._queued and self._held_bytes + len(payload) <= DRAM_HELD_BYTES_MAX:
                if len(payload) <= GRANULE_BYTES:  # a view of memory that many chunks share
                    read = _Payload(bytes(payload), vector, record.crc)
                self._held[chunk] = read
                self._held_bytes += len(payload)
            return
        cell = None if self._source.find(chunk) is None else tier.reserve(chunk, record.extent_bytes)
        if cell is not None:
            read.copy_to(tier.arena.memory(cell))
            self.offered += tier.publish(cell, record.stored_bytes, record.crc)

    def small_at_once(self, chunk: ChunkId, record: ChunkRecord) -> bytes | None:
        """Return the checked payload of a chunk of one granule; None if the arena does not have it.  Does not wait."""
        tier = self.tier
        if tier is None or record.stored_bytes < DRAM_PAYLOAD_BYTES_MIN:
            return None
        place = tier.find(chunk)
        if place is None:
            return None
        payload = bytes(tier.extent(place)[: place.stored_bytes])
        if check_payload(record, payload):
            return payload
        self._mismatch(chunk)
        return None

    async def read_range(self, chunk: ChunkId, record: ChunkRecord, offset: int, length: int) -> PinnedRange | None:
        """Return the checked granules that hold [offset, offset + length), or None if the disk has to serve them.

        That is when the chunk is not in the arena or cannot be pinned, or its bytes do not match.  They are checked on
        the loop, READ_STEP_BYTES between two checkpoints: its processor sends them next.
        """
        tier = self.tier
        if tier is None or record.stored_bytes < DRAM_PAYLOAD_BYTES_MIN or tier.find(chunk) is None:
            return None
        place = tier.pin(chunk)
        if place is None:
            return None
        found: PinnedRange | None = None
        try:
            found = await _checked_range(tier, place, record, offset, length)
        finally:
            if found is None:
                tier.unpin(place)
        if found is None:
            self._mismatch(chunk)
        return found

    def pin_whole(self, chunk: ChunkId) -> PinnedRange | None:
        """Return a whole chunk, and the CRC32C of each granule, for a reader that checks it; None if it is not here.

        Only the vector is checked here.
        """
        place = None if self.tier is None else self.tier.pin(chunk)
        if place is None or self.tier is None:
            return None
        extent, length = self.tier.extent(place), place.stored_bytes
        crcs = bytes(extent[length:]) or place.crc.to_bytes(4, "little")
        if len(extent) > length and crc32c(crcs) != place.crc:
            self.tier.unpin(place)
            self._mismatch(chunk)
            return None
        return PinnedRange(0, extent[:length], crcs, partial(self.tier.unpin, place), place)

    def _mismatch(self, chunk: ChunkId) -> None:
        """Log and forget a chunk whose bytes do not match: bad memory, or a bug.  The disk's bytes count."""
        _log.error("dram_mismatch", chunk=id_text(chunk))
        if self.tier is not None:
            self.tier.forget(chunk)

    # --- filling and forgetting ----------------------------------------------------------------------

    async def run(self) -> None:
        """Bring in queued chunks until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(DRAM_FILLERS):
                nursery.start_soon(self._fill)

    async def _fill(self) -> None:
        async for chunk in self._wants:
            read = self._held.pop(chunk, None)
            try:
                await self._bring_in(chunk, read)
            except LakeError as error:  # a client that reads the chunk gets the error
                _log.debug("dram_fill_failed", chunk=id_text(chunk), reason=error.message)
            except (MemoryError, OSError) as error:  # memory or descriptors are short: the disk serves
                _log.warning("dram_fill_failed", chunk=id_text(chunk), reason=repr(error))
            finally:
                self._queued.discard(chunk)
                self._held_bytes -= 0 if read is None else len(read.payload)
                del read

    async def _bring_in(self, chunk: ChunkId, read: _Payload | None) -> None:
        tier, record = self.tier, self._source.find(chunk)
        assert tier is not None, "only a tier queues fills"
        if record is None:
            return
        await self._grow_for(tier, chunk, record)
        cell = tier.reserve(chunk, record.extent_bytes)
        if cell is None:
            return
        is_in = False
        try:
            if read is None:
                crc = await self._source.read(chunk, record, tier.arena.memory(cell))
            else:
                crc = read.crc
                await self._offload.run(read.copy_to, tier.arena.memory(cell))
            if self._source.find(chunk) is not None:
                is_in = True
                self.offered += tier.publish(cell, record.stored_bytes, crc) and read is not None
        finally:
            if not is_in:
                tier.abandon(cell)

    async def _grow_for(self, tier: DramTier, chunk: ChunkId, record: ChunkRecord) -> None:
        size = tier.needs_slab(chunk, record.extent_bytes)
        if size is None:
            return
        try:
            memory = await self._offload.run(tier.arena.make_slab_memory)
        except EngineBusy as error:
            _log.warning("dram_tier_stops_growing", reason=error.message)
            tier.arena.grows = False
            return
        tier.add_slab(memory, size)

    def statistics(self) -> dict[str, Any]:
        """Figures for status; `limit_bytes` is 0 without a tier."""
        if self.tier is None:
            return {"limit_bytes": 0}
        return self.tier.statistics() | {
            "offered": self.offered,
            "client_reads": self.client_reads,
            "client_hits": self.client_hits,
        }


async def _checked_range(
    tier: DramTier, place: Placement, record: ChunkRecord, offset: int, length: int
) -> PinnedRange | None:
    """Return the granules of a pinned place around a range, or None when they do not match the record."""
    extent = tier.extent(place)
    payload = extent[: record.stored_bytes]
    release = partial(tier.unpin, place)
    if not record.vector_bytes:
        if not check_payload(record, payload):
            return None
        return PinnedRange(0, payload, record.crc.to_bytes(4, "little"), release, place)
    vector = extent[record.stored_bytes : record.extent_bytes]
    if not check_vector(record, vector):
        return None
    begin, stop = granules_around(offset, length, record.stored_bytes)
    crcs = crcs_between(vector, begin, stop)
    for at in range(0, stop - begin, READ_STEP_BYTES):
        if at:
            await trio.lowlevel.checkpoint()
        step = payload[begin:stop][at : at + READ_STEP_BYTES]
        if vector_of(step) != crcs_between(crcs, at, at + len(step)):
            return None
    return PinnedRange(begin, payload[begin:stop], crcs, release, place)
