"""Requests that stream chunks: ranges of payload, from the arena or the segments, checked by CRC32C before sending.

Rules kept here:
- Memory of the arena is pinned until the reply is sent; other long content lies in `AnswerMemory` until then, which
  bounds what slow clients hold.  Bytes that the DRAM tier takes over have memory of their own.
- A chunk that compaction moved during the read is located again; a mismatch at its present place is damage.
- Places are taken from the shared index where it knows them, in one look-up for all.  On a mismatch at such a place the
  chunk is looked up in the store before an error is returned.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack
from typing import Final

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.format.layouts import ChunkRecord
from engine.requests.answer_memory import AnswerMemory
from engine.requests.answers import failure_of
from engine.requests.chunk_ranges import absent, memory_for, planned_ranges, room_of
from engine.requests.handlers import handles
from engine.requests.shard_reads import ShardReads
from engine.segments.batch_reader import Range
from engine.segments.reader import READ_AT_ONCE_BYTES, RangeRead
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tiers.shared_index import record_at
from lakefs.errors import InvalidArgument, LakeError, StaleGrant
from lakefs.ids import ChunkId, Sequence
from lakefs.limits import DRAM_PAYLOAD_BYTES_MIN, GRANULE_BYTES
from lakefs.shared_index.table_format import Found
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from lakefs.wire.media import IN_FILES

READ_ATTEMPTS: Final = 4
"""Times that a moved chunk is located and read again; compaction moves a chunk at most once in minutes."""


class ChunkReads:
    """Handler of ReadChunks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metadata = store.metadata
        self._segments = store.segments
        self._dram = store.dram
        self._memory = AnswerMemory()
        self._shards = ShardReads(store, self._memory)

    @handles(m.ReadChunks)
    async def read_chunks(self, client: Client, request: m.ReadChunks) -> Reply:
        if request.shards:
            return await self._shards.read(client, request)
        chunks = checked_chunks(request.chunks)
        if not len(chunks) == len(request.offsets) == len(request.lengths):
            raise InvalidArgument("chunks, offsets and lengths go together")
        reply = await self._read_known(chunks, request)
        if reply is not None:
            return reply
        records, sequence = self._find(chunks)
        await self._metadata.wait_durable(sequence)
        planned = planned_ranges(chunks, records, request)
        pieces: list[m.ReadPiece] = []
        parts: list[bytes | bytearray | memoryview] = []
        with ExitStack() as releases:
            for read in await self._read_planned(client, chunks, planned, releases):
                if isinstance(read, LakeError):
                    pieces.append(m.ReadPiece(0, 0, b"", failure_of(read)))
                    continue
                begin, payload, crcs = read
                pieces.append(m.ReadPiece(begin, len(payload), crcs))
                parts.append(payload)
            return Reply(m.ReadChunksReply(pieces), Body(parts, releases.pop_all().close))

    async def _read_known(self, chunks: list[ChunkId], request: m.ReadChunks) -> Reply | None:
        """Return the reply if the shared index knows all chunks, and they are short and in segments; else None.

        The fast path for requests for many small chunks, with little work for each.  On None the caller looks the
        chunks up in the store, and reports any error.
        """
        shared, tier = self._store.shared_index, self._dram.tier
        places = [] if shared is None else _plain(shared.find_many(chunks), request)
        if not places or (tier is not None and any(chunk in tier for chunk in chunks)):
            return None
        memory = await self._segments.batches.read_packed(places)
        if memory is None:
            return None
        if tier is not None:
            self._note_read(chunks, request.offsets, places, memory)
            tier.note_misses(sum(place[3] >= DRAM_PAYLOAD_BYTES_MIN for place in places))
        pieces = [m.ReadPiece(0, place[3], place[4].to_bytes(4, "little")) for place in places]
        return Reply(m.ReadChunksReply(pieces), Body([memory]))

    def _note_read(self, chunks: Seq[ChunkId], offsets: Seq[int], places: Seq[Found], memory: memoryview) -> None:
        """Note reads of whole chunks, back to back in `memory`; offer the DRAM tier those that it wants."""
        end = 0
        for chunk, offset, place in zip(chunks, offsets, places, strict=True):
            begin, end = end, end + place[3]
            if not offset and self._dram.note_read(chunk, place[3]):
                self._dram.offer(chunk, record_at(place), memory[begin:end])

    def _find(self, chunks: list[ChunkId]) -> tuple[list[ChunkRecord | None], Sequence]:
        """Return the chunks' records, and the sequence that must be durable before they are used."""
        shared = self._store.shared_index
        records: list[ChunkRecord | None]
        records = [None] * len(chunks) if shared is None else shared.records(chunks)
        missing = [index for index, record in enumerate(records) if record is None]
        if not missing:
            return records, Sequence(0)
        with self._metadata.view() as view:
            for index in missing:
                records[index] = find_chunk(view, chunks[index])
            return records, view.sequence

    async def _read_planned(
        self, client: Client, chunks: Seq[ChunkId], planned: Seq[Range | LakeError], releases: ExitStack
    ) -> list[RangeRead | LakeError]:
        """Read each piece from the arena or the segments; `releases` gives memory back, and unpins the arena's."""
        done: list[RangeRead | LakeError | None] = [item if isinstance(item, LakeError) else None for item in planned]
        worth_it: set[int] = set()
        if self._dram.tier is not None:
            for index, item in enumerate(planned):
                if isinstance(item, tuple):
                    record, offset, _ = item
                    if not offset and self._dram.note_read(chunks[index], record.stored_bytes):
                        worth_it.add(index)  # a client that reads on, piece by piece, counts as one read
                    done[index] = await self._read_in_arena(chunks[index], item, releases)
        missing = [
            (index, item) for index, item in enumerate(planned) if done[index] is None and isinstance(item, tuple)
        ]
        rooms = [0 if index in worth_it else room_of(item) for index, item in missing]
        targets = await memory_for(self._memory, client, rooms, releases)
        if any(rooms):
            missing, targets = self._still_present(chunks, missing, targets, done)
        found = await self._segments.batches.read_ranges([item for _, item in missing], targets)
        for (index, item), read in zip(missing, found, strict=True):
            if isinstance(read, LakeError):
                read = await self._read_elsewhere(chunks[index], item, read)
            elif index in worth_it:
                self._admit(chunks[index], item[0], read)
            done[index] = read
        answers = [read for read in done if read is not None]
        assert len(answers) == len(planned), "each piece has an answer"
        return answers

    def _still_present(
        self,
        chunks: Seq[ChunkId],
        missing: Seq[tuple[int, Range]],
        targets: Seq[memoryview | None],
        done: list[RangeRead | LakeError | None],
    ) -> tuple[list[tuple[int, Range]], list[memoryview | None]]:
        """Return the pieces at their present places, after a wait for memory; those that are gone are `done`."""
        present: list[tuple[int, Range]] = []
        memory: list[memoryview | None] = []
        records, _ = self._find([chunks[index] for index, _ in missing])
        for (index, (_, offset, length)), record, target in zip(missing, records, targets, strict=True):
            if record is None:
                done[index] = absent(chunks[index])
            else:
                present.append((index, (record, offset, length)))
                memory.append(target)
        return present, memory

    async def _read_in_arena(self, chunk: ChunkId, wanted: Range, releases: ExitStack) -> RangeRead | None:
        pinned = await self._dram.read_range(chunk, *wanted)
        if pinned is None:
            return None
        releases.callback(pinned.release)
        return pinned.begin, pinned.payload, pinned.crcs

    def _admit(self, chunk: ChunkId, record: ChunkRecord, read: RangeRead) -> None:
        """Offer a chunk to the DRAM tier with the bytes just read, or have it read again if they are only a part."""
        begin, payload, crcs = read
        if begin or len(payload) < record.stored_bytes:
            self._dram.want(chunk)
        else:
            self._dram.offer(chunk, record, payload, crcs if record.vector_bytes else b"")

    async def _read_elsewhere(self, chunk: ChunkId, wanted: Range, error: LakeError) -> RangeRead | LakeError:
        """Read a failed piece at the chunk's new place if it was moved; else return the error to report."""
        record, offset, length = wanted
        for _ in range(READ_ATTEMPTS):
            judged = await self._store.chunks.judged(chunk, record, error)
            if not isinstance(judged, StaleGrant):
                return judged
            with self._metadata.view() as view:
                now = find_chunk(view, chunk)
            if now is None:
                return judged
            record = now
            [read] = await self._segments.batches.read_ranges([(record, offset, length)])
            if not isinstance(read, LakeError):
                return read
            error = read
        return judged


def _plain(places: Seq[Found | None], request: m.ReadChunks) -> list[Found]:
    """Return the places if all are known, in segments, one granule each at most, and hold the ranges; else []."""
    plain: list[Found] = []
    left = READ_AT_ONCE_BYTES
    for place, offset, length in zip(places, request.offsets, request.lengths, strict=True):
        if place is None or place[0] not in IN_FILES or place[3] > GRANULE_BYTES:
            return []
        if (offset or length) and not 0 <= offset < (offset + length if length else place[3]) <= place[3]:
            return []
        left -= place[3]
        plain.append(place)
    return plain if left >= 0 else []
