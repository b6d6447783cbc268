"""Chunks: stores, finds and reads payload, on segments and the table `chunks`.

Rules kept here:
- The engine computes the hash itself, over bytes that no client can change any more (`engine.chunks.ingest`).
- A chunk's record is committed only after its payload is synced, or placed to be synced before the record's group is
  appended (small ones).  If two requests store the same bytes, the second waits while the first writes them.
  If both wrote them, the second commit keeps the first's record and gives up its own extent.
- A chunk reported as present to a session is held (gc does not free it) from the step in which its record was read.
- At every `await` between reading a record and using its place the chunk may be freed; so readers check the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

import trio

from engine.chunks.ingest import Ingest
from engine.chunks.payload import Hashed, Payload, Written
from engine.chunks.quarantine import Quarantine
from engine.format.columns import ChunkColumns, pack_chunks
from engine.format.layouts import ChunkRecord, Table, chunk_key, unpack_chunk_record
from engine.format.shards import shard_key
from engine.metadata.metadata_store import Metadata
from engine.segments.segment_store import Segments
from engine.sessions.references import References, Session
from engine.tables.views import Transaction, View
from lakefs.content.verify import matches_id
from lakefs.errors import ChunkDamaged, LakeError, StaleGrant, StoreDamaged
from lakefs.findings import Finding
from lakefs.ids import EMPTY_CHUNK, WHOLE_CHUNK, Birth, ChunkId, Sequence, ShardNumber, id_text, shard_text
from lakefs.ports import Offload

_MANY: Final = 8
"""Fewer chunks are looked up and recorded one by one: columns would cost as much, or more."""


@dataclass(frozen=True)
class ChunkFreed:
    """Note on the transaction that removes a chunk's record; the place is punched when that is durable."""

    chunk: ChunkId


def find_chunk(view: View, chunk: ChunkId) -> ChunkRecord | None:
    """Return the chunk's record, or None."""
    value = view.get(Table.CHUNKS, chunk_key(chunk))
    return None if value is None else unpack_chunk_record(value)


def find_shard(view: View, chunk: ChunkId, shard: ShardNumber) -> ChunkRecord | None:
    """Return the shard's record, or None; the chunk's own for WHOLE_CHUNK."""
    value = view.get(Table.CHUNKS, shard_key(chunk, shard))
    return None if value is None else unpack_chunk_record(value)


def hash_wrong(chunk: ChunkId) -> ChunkDamaged:
    """Return the error for stored bytes that do not hash to the chunk's id, though their checksum matches."""
    problem = "its bytes match their checksum and do not hash to its id"
    return ChunkDamaged(problem, subject=id_text(chunk), finding=Finding.CHUNK_HASH_WRONG)


class Chunks:
    """The chunk store of one engine."""

    def __init__(
        self,
        metadata: Metadata,
        segments: Segments,
        offload: Offload,
        references: References,
        quarantine: Quarantine,
        write_ahead_bytes: int,
    ) -> None:
        self._metadata = metadata
        self._quarantine = quarantine
        self._damaged = quarantine.chunks
        self._segments = segments
        self.offload = offload
        self._references = references
        self.ingest = Ingest(segments, offload, metadata.stop_writing, write_ahead_bytes)
        self._under_way: dict[ChunkId, trio.Event] = {}

    def find_good(self, view: View, chunk: ChunkId) -> ChunkRecord | None:
        """Return the chunk's record; None if it has none, or its bytes are known to be damaged."""
        return None if chunk in self._damaged else find_chunk(view, chunk)

    def absent(self, view: View, items: Seq[Hashed]) -> list[Hashed]:
        """Return those whose chunk has no record, or one whose bytes are known to be damaged."""
        if len(items) < _MANY:
            return [item for item in items if self.find_good(view, item.chunk) is None]
        present = view.present(Table.CHUNKS, [chunk_key(item.chunk) for item in items])
        if not present:
            return list(items)
        return [item for item in items if chunk_key(item.chunk) not in present or item.chunk in self._damaged]

    def is_quarantined(self, chunk: ChunkId) -> bool:
        """Return True if the chunk's bytes are known to be damaged."""
        return chunk in self._damaged

    def is_damaged(self, chunk: ChunkId, shard: ShardNumber) -> bool:
        """Return True if the bytes of the shard, or of the chunk for WHOLE_CHUNK, are known to be damaged."""
        return self._quarantine.has(chunk, shard)

    # --- storing -----------------------------------------------------------------------------------

    async def store(self, session: Session, payloads: Seq[Payload]) -> list[tuple[ChunkId, bool]]:
        """Store payloads for a session: (id, True if it was new) in order.  Durable and held on return.

        StoreFull, StoreReadOnly, DiskFailed.  On cancellation nothing is recorded; extents written are given up.
        """
        claims = _Claims()

        def choose(items: Seq[Hashed]) -> list[Hashed]:
            return [item for item in items if self._is_claimed(session, item.chunk, claims)]

        try:
            hashed, written = await self.ingest.take_in(payloads, choose)
            await self._record(session, written)
        finally:
            for chunk in claims.claimed:
                self._under_way.pop(chunk).set()
        fresh = claims.claimed
        for item in hashed:
            if item.chunk in claims.waited:
                claims.waited.remove(item.chunk)
                if await self._await_other(session, item):
                    fresh.add(item.chunk)
        await self._metadata.wait_durable(claims.seen)
        return [(item.chunk, is_new) for item, is_new in zip(hashed, first_of_each(hashed, fresh), strict=True)]

    def _is_claimed(self, session: Session, chunk: ChunkId, claims: _Claims) -> bool:
        """Return True if the caller must write the chunk; else it is held, or will be waited for."""
        if chunk == EMPTY_CHUNK or chunk in claims.claimed:
            return False
        held = self.hold(session, chunk)
        if held is not None:
            claims.seen = max(claims.seen, held[1])
        elif chunk in self._under_way:
            claims.waited.add(chunk)
        else:
            claims.claimed.add(chunk)
            self._under_way[chunk] = trio.Event()
            return True
        return False

    async def offer(self, session: Session, chunks: Seq[ChunkId]) -> list[bool]:
        """Return True for each chunk that is stored (durably), and hold it."""
        with self._metadata.view() as view:
            present: list[bool] = []
            for chunk in chunks:
                record = self.find_good(view, chunk)
                if record is not None:
                    self._references.hold(session, record.birth)
                present.append(record is not None or chunk == EMPTY_CHUNK)
            sequence = view.sequence
        await self._metadata.wait_durable(sequence)
        return present

    def record_in(self, txn: Transaction, items: Seq[Written], absent_at: Birth | None = None) -> list[Written]:
        """Add records for written payloads; returns, unused, the payloads whose chunk has a good record by now.

        `absent_at`: the next birth at a time since when each was seen to have no good record.
        """
        if len(items) >= _MANY and self._record_new(txn, items, absent_at):
            return []
        unused: list[Written] = []
        for item in items:
            key = chunk_key(item.hashed.chunk)
            present = txn.get(Table.CHUNKS, key)
            if present is not None and item.hashed.chunk not in self._damaged:
                self._references.keep(unpack_chunk_record(present).birth)
                unused.append(item)
                continue
            length = item.hashed.payload.length
            assert length > 0, "the empty chunk has no record"
            birth = txn.new_birth()
            record = ChunkRecord(birth, item.place.segment, item.place.offset, length, length, item.hashed.crc)
            (txn.insert if present is None else txn.put)(Table.CHUNKS, key, record.pack())
            self._quarantine.drop_in(txn, item.hashed.chunk)
            self._references.keep(birth)
        return unused

    def _record_new(self, txn: Transaction, items: Seq[Written], absent_at: Birth | None) -> bool:
        """Add the records as columns if every chunk is new; else do nothing, and return False."""
        keys = [chunk_key(item.hashed.chunk) for item in items]
        if len(set(keys)) < len(keys):
            return False
        if self._damaged and any(item.hashed.chunk in self._damaged for item in items):
            return False
        is_known = absent_at == self._metadata.next_birth  # no chunk was recorded since
        if not is_known and txn.present(Table.CHUNKS, keys):
            return False
        chunks = ChunkColumns(
            segments=[item.place.segment for item in items],
            offsets=[item.place.offset for item in items],
            lengths=[item.hashed.payload.length for item in items],
            crcs=[item.hashed.crc for item in items],
        )
        assert min(chunks.lengths) > 0, "the empty chunk has no record"
        first = txn.new_births(len(keys))
        txn.insert_many(Table.CHUNKS, keys, pack_chunks(first, chunks))
        for birth in range(first, first + len(keys)):
            self._references.keep(Birth(birth))
        return True

    async def _record(self, session: Session, written: list[Written]) -> None:
        if not written:
            return

        def decide(txn: Transaction) -> list[Written]:
            unused = self.record_in(txn, written)
            for item in written:
                record = find_chunk(txn, item.hashed.chunk)
                assert record is not None
                self._references.hold(session, record.birth)
            return unused

        try:
            _, sequence = await self._metadata.commit(decide, grows=True)
            await self._metadata.wait_durable(sequence)
        finally:
            self.ingest.settle(written)

    def hold(self, session: Session, chunk: ChunkId) -> tuple[ChunkRecord, Sequence] | None:
        """Hold the chunk if it has a good record; returns that, and the sequence that makes it durable, else None."""
        with self._metadata.view() as view:
            record = self.find_good(view, chunk)
            sequence = view.sequence
        if record is None:
            return None
        self._references.hold(session, record.birth)
        return record, sequence

    def held_bytes(self, session: Session, chunk: ChunkId) -> int | None:
        """Hold the chunk if it has a good record, and return its length; else None."""
        held = self.hold(session, chunk)
        return None if held is None else held[0].logical_bytes

    async def _await_other(self, session: Session, item: Hashed) -> bool:
        """Wait for another request that stores the chunk; if that failed, store it here and return True."""
        chunk = item.chunk
        while (event := self._under_way.get(chunk)) is not None:
            await event.wait()
        held = self.hold(session, chunk)
        if held is not None:
            await self._metadata.wait_durable(held[1])
            return False
        assert chunk not in self._under_way, "one request at a time writes a chunk"
        self._under_way[chunk] = trio.Event()
        try:
            await self._record(session, await self.ingest.write([item]))
        finally:
            self._under_way.pop(chunk).set()
        return True

    # --- reading -----------------------------------------------------------------------------------

    async def read(self, chunk: ChunkId, record: ChunkRecord, shard: ShardNumber = WHOLE_CHUNK) -> bytes:
        """Return the whole payload, checked by CRC32C.  ChunkDamaged, StoreDamaged; damage is noted."""
        try:
            return bytes(await self._segments.reader.read_chunk(record))
        except LakeError as error:
            raise await self.judged(chunk, record, error, shard) from error

    async def judged(
        self, chunk: ChunkId, record: ChunkRecord, error: LakeError, shard: ShardNumber = WHOLE_CHUNK
    ) -> LakeError:
        """Return the error to report after a failed read of the chunk or shard at its record's place; damage is noted.

        StaleGrant when it was freed, moved or stored anew since: the place holds zeros or other bytes.
        """
        with self._metadata.view() as view:
            if find_shard(view, chunk, shard) != record:
                text = shard_text(chunk, shard)
                return StaleGrant(f"chunk {text} was freed while it was read", subject=text)
        if isinstance(error, StaleGrant):
            path = f"segment {record.segment:016x}"
            message = f"{path} is missing; put its file back"
            error = StoreDamaged(message, subject=path, finding=Finding.SEGMENT_MISSING)
        await self._quarantine.note(chunk, record, error, shard)
        return error

    async def verify(self, chunk: ChunkId, record: ChunkRecord, shard: ShardNumber = WHOLE_CHUNK) -> None:
        """Read the payload and compare it with its CRC32C, and a whole chunk's with its id; damage is noted.

        ChunkDamaged, ...
        """
        payload = await self.read(chunk, record, shard)
        if shard == WHOLE_CHUNK and not await self.offload.run(matches_id, chunk, payload):
            error = hash_wrong(chunk)
            await self._quarantine.note(chunk, record, error)
            raise error


@dataclass
class _Claims:
    """The chunks of one request, by what the request does about each."""

    claimed: set[ChunkId] = field(default_factory=set)
    """Written by this request."""
    waited: set[ChunkId] = field(default_factory=set)
    """Written by another request, which is waited for."""
    seen: Sequence = Sequence(0)
    """Sequence that must be durable before chunks are reported as present."""


def first_of_each(hashed: Seq[Hashed], fresh: set[ChunkId]) -> list[bool]:
    """Return of each payload True if it is new: where an id occurs twice, only its first occurrence is."""
    left = set(fresh)
    results: list[bool] = []
    for item in hashed:
        results.append(item.chunk in left)
        left.discard(item.chunk)
    return results
