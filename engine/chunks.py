"""Chunks: payload in, payload located and read, on segments and the table `chunks`.

Rules kept here:
- The engine hashes for itself, bytes that no client can still change: pooled buffers and bytes of its own.
- A chunk's record is committed only after its payload is synced, or placed to be synced before the record's group is
  appended (small ones).  The same bytes stored twice at the same moment
  are written once where the second comes while the first is under way; if both were written, the commit that
  comes second keeps the first's record and gives its own extent up.
- A chunk that a session was told is there is held from the same synchronous step in which it was seen.
- Every checkpoint between seeing a record and using its place may see the chunk freed; readers therefore check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import trio
from crc32c import crc32c

from engine.format import ChunkRecord, Table, chunk_key, unpack_chunk_record
from engine.holds import Holds, Session
from engine.metadata import Metadata
from engine.quarantine import Quarantine
from engine.segments import Place, Segments, seal_payload
from engine.tasks import run_all
from engine.views import Transaction, View
from lakefs.errors import ChunkDamaged, LakeError, StaleGrant, StoreDamaged
from lakefs.ids import EMPTY_CHUNK, ChunkId, ChunkKind, Sequence, chunk_id_of, id_text, kind_of
from lakefs.limits import SMALL_PAYLOAD_BYTES
from lakefs.ports import Offload


@dataclass
class Payload:
    """Bytes to store, in memory of the engine's own: `area` (65,536 bytes and more) or `small`.

    An area is page-aligned and has room for what is written behind the payload (`large_extent_bytes`).

    `fill`, when given, blocks and brings the bytes; it is called once, in a thread, before they are hashed.
    """

    kind: ChunkKind
    length: int
    area: memoryview | None = None
    small: memoryview | None = None
    fill: Callable[[memoryview], None] | None = None


@dataclass(frozen=True)
class Hashed:
    """A payload with the id and record checksum that the engine computed."""

    payload: Payload
    chunk: ChunkId
    crc: int


@dataclass(frozen=True)
class Written:
    """A payload on the medium, synced, or small and placed, and not yet recorded; in flight until settled."""

    hashed: Hashed
    place: Place


def find_chunk(view: View, chunk: ChunkId) -> ChunkRecord | None:
    """The chunk's record, or None."""
    value = view.get(Table.CHUNKS, chunk_key(chunk))
    return None if value is None else unpack_chunk_record(value)


class Chunks:
    """The chunk store of one engine."""

    def __init__(
        self,
        metadata: Metadata,
        segments: Segments,
        offload: Offload,
        holds: Holds,
        quarantine: Quarantine,
    ) -> None:
        self._metadata = metadata
        self._quarantine = quarantine
        self._segments = segments
        self.offload = offload
        self._holds = holds
        self._under_way: dict[ChunkId, trio.Event] = {}

    def find_good(self, view: View, chunk: ChunkId) -> ChunkRecord | None:
        """The chunk's record; None when there is none, or its bytes are known to be damaged."""
        return None if chunk in self._quarantine else find_chunk(view, chunk)

    def is_quarantined(self, chunk: ChunkId) -> bool:
        """Whether the chunk's bytes are known to be damaged."""
        return chunk in self._quarantine

    # --- storing -----------------------------------------------------------------------------------

    async def store(self, session: Session, payloads: Seq[Payload]) -> list[tuple[ChunkId, bool]]:
        """Store payloads for a session: (id, whether it was new) in order.  Durable and held on return.

        StoreFull, StoreReadOnly, DiskFailed.  On cancellation nothing is recorded; extents written are given up.
        """
        hashed = await self.hash(payloads)
        fresh = [False] * len(hashed)
        claimed: dict[ChunkId, int] = {}
        waited: dict[ChunkId, int] = {}
        seen = Sequence(0)
        try:
            for index, item in enumerate(hashed):
                if item.chunk == EMPTY_CHUNK or item.chunk in claimed:
                    continue
                present = self._hold_present(session, item.chunk)
                if present is not None:
                    seen = max(seen, present)
                elif item.chunk in self._under_way:
                    waited[item.chunk] = index
                else:
                    claimed[item.chunk] = index
                    self._under_way[item.chunk] = trio.Event()
            written = await self.write([hashed[index] for index in claimed.values()])
            await self._record(session, written)
            for index in claimed.values():
                fresh[index] = True
        finally:
            for chunk in claimed:
                self._under_way.pop(chunk).set()
        for index in waited.values():
            fresh[index] = await self._await_other(session, hashed[index])
        await self._metadata.wait_durable(seen)
        return [(item.chunk, is_fresh) for item, is_fresh in zip(hashed, fresh, strict=True)]

    async def offer(self, session: Session, chunks: Seq[ChunkId]) -> list[bool]:
        """Which chunks are there (durably); those are held."""
        with self._metadata.view() as view:
            present: list[bool] = []
            for chunk in chunks:
                record = self.find_good(view, chunk)
                if record is not None:
                    self._holds.hold(session, record.birth)
                present.append(record is not None or chunk == EMPTY_CHUNK)
            sequence = view.sequence
        await self._metadata.wait_durable(sequence)
        return present

    async def hash(self, payloads: Seq[Payload]) -> list[Hashed]:
        """Ids and record checksums, computed here; large ones in threads, several at once."""
        results: list[Hashed | None] = [None] * len(payloads)
        threaded: list[int] = []
        for index, payload in enumerate(payloads):
            if payload.area is None and payload.fill is None:
                results[index] = _hash(payload)
            else:
                threaded.append(index)

        async def hash_one(index: int) -> None:
            results[index] = await self.offload.run(_hash, payloads[index])

        await run_all(hash_one, threaded)
        return [result for result in results if result is not None]

    async def write(self, items: Seq[Hashed], *, into_headroom: bool = False) -> list[Written]:
        """Write and sync payloads, and place small ones; their extents are in flight until `settle`.

        `into_headroom`: small ones may take half of what payload leaves free, for who gives more room back at once.
        A write or sync that fails, but for want of room, makes the whole store read-only.
        """
        written: list[Written] = []
        small = [item for item in items if item.payload.area is None]
        large = [item for item in items if item.payload.area is not None]

        async def write_one(item: Hashed) -> None:
            assert item.payload.area is not None
            place = await self._segments.write_large(item.payload.area, item.payload.length)
            written.append(Written(item, place))

        async def write_small() -> None:
            payloads = [item.payload.small for item in small if item.payload.small is not None]
            places = await self._segments.place_small(payloads, into_headroom=into_headroom)
            written.extend(Written(item, place) for item, place in zip(small, places, strict=True))

        try:
            if small:
                await write_small()
            await run_all(write_one, large)
            await self._segments.sync(
                {item.place.segment for item in written if item.hashed.payload.area is not None}
            )
        except BaseException:
            self.settle(written)
            if self._segments.failure:
                self._metadata.stop_writing(self._segments.failure)
            raise
        return written

    def record_in(self, txn: Transaction, items: Seq[Written]) -> list[Written]:
        """Add records for written payloads; those whose chunk has a record by now are returned, unused."""
        unused: list[Written] = []
        for item in items:
            key = chunk_key(item.hashed.chunk)
            present = txn.get(Table.CHUNKS, key)
            if present is not None and item.hashed.chunk not in self._quarantine:
                self._holds.keep(unpack_chunk_record(present).birth)
                unused.append(item)
                continue
            length = item.hashed.payload.length
            birth = txn.new_birth()
            record = ChunkRecord(
                birth, item.place.segment, item.place.offset, length, length, item.hashed.crc
            )
            (txn.insert if present is None else txn.put)(Table.CHUNKS, key, record.pack())
            self._quarantine.drop_in(txn, item.hashed.chunk)
            self._holds.keep(birth)
        return unused

    def settle(self, items: Seq[Written]) -> None:
        """The extents are recorded, or given up."""
        for item in items:
            self._segments.settle(item.place)

    async def _record(self, session: Session, written: list[Written]) -> None:
        if not written:
            return

        def decide(txn: Transaction) -> list[Written]:
            unused = self.record_in(txn, written)
            for item in written:
                record = find_chunk(txn, item.hashed.chunk)
                assert record is not None
                self._holds.hold(session, record.birth)
            return unused

        try:
            _, sequence = await self._metadata.commit(decide, grows=True)
            await self._metadata.wait_durable(sequence)
        finally:
            self.settle(written)

    def _hold_present(self, session: Session, chunk: ChunkId) -> Sequence | None:
        """Hold the chunk when it is there; the sequence that this rests on."""
        with self._metadata.view() as view:
            record = self.find_good(view, chunk)
            sequence = view.sequence
        if record is None:
            return None
        self._holds.hold(session, record.birth)
        return sequence

    async def _await_other(self, session: Session, item: Hashed) -> bool:
        """Another request is storing the same chunk: wait for it; when it failed, store it ourselves (true)."""
        chunk = item.chunk
        while (event := self._under_way.get(chunk)) is not None:
            await event.wait()
        present = self._hold_present(session, chunk)
        if present is not None:
            await self._metadata.wait_durable(present)
            return False
        self._under_way[chunk] = trio.Event()
        try:
            await self._record(session, await self.write([item]))
        finally:
            self._under_way.pop(chunk).set()
        return True

    # --- reading -----------------------------------------------------------------------------------

    async def read(self, chunk: ChunkId, record: ChunkRecord) -> bytes:
        """The whole payload, checked by CRC32C.  ChunkDamaged, StoreDamaged; what is damaged is noted."""
        try:
            return bytes(await self._segments.read_chunk(record))
        except LakeError as error:
            raise await self.judged(chunk, record, error) from error

    async def judged(self, chunk: ChunkId, record: ChunkRecord, error: LakeError) -> LakeError:
        """What it means that reading the chunk at its record's place failed; damage is noted.

        StaleGrant when the chunk was freed or stored anew meanwhile: what was read is another's room, or zeros.
        """
        with self._metadata.view() as view:
            if find_chunk(view, chunk) != record:
                return StaleGrant(
                    f"chunk {id_text(chunk)} was freed while it was read", subject=id_text(chunk)
                )
        if isinstance(error, StaleGrant):
            path = f"segment {record.segment:016x}"
            error = StoreDamaged(f"{path} is missing; put its file back", subject=path)
        await self._quarantine.note(chunk, record, error)
        return error

    async def verify(self, chunk: ChunkId, record: ChunkRecord) -> None:
        """Read the payload, and compare it with its CRC32C and its id; what is damaged is noted.  ChunkDamaged, ..."""
        payload = await self.read(chunk, record)
        if await self.offload.run(chunk_id_of, kind_of(chunk), payload) != chunk:
            error = ChunkDamaged(
                "its bytes match their checksum and do not hash to its id", subject=id_text(chunk)
            )
            await self._quarantine.note(chunk, record, error)
            raise error


def _hash(payload: Payload) -> Hashed:
    """Fill, digest, vector and padding in one call, while the bytes are in the cache."""
    if payload.area is None:
        assert payload.small is not None
        if payload.fill is not None:
            payload.fill(payload.small)
        return Hashed(payload, chunk_id_of(payload.kind, payload.small), crc32c(payload.small))
    view = payload.area
    if payload.fill is not None:
        payload.fill(view[: payload.length])
    chunk = chunk_id_of(payload.kind, view[: payload.length])
    return Hashed(payload, chunk, seal_payload(view, payload.length))


def is_small(length: int) -> bool:
    """Whether a payload is packed into a small segment."""
    return length < SMALL_PAYLOAD_BYTES
