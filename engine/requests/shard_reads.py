"""ReadChunks with shards: ranges of a member's shards, checked by CRC32C before sending.

A shard is neither in the DRAM tier nor in the shared index: heads have tiers, of whole chunks.  A shard known to be
damaged is not read: its head decodes the bytes from other shards.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack

from engine.chunks.chunk_store import find_shard
from engine.chunks.shards import Name
from engine.format.layouts import ChunkRecord
from engine.memory.lent_memory import LentMemory
from engine.requests.answer_memory import AnswerMemory
from engine.requests.answers import failure_of
from engine.requests.chunk_ranges import absent, memory_for, planned_ranges, room_of
from engine.requests.shards import checked_names, member_of
from engine.segments.batch_reader import Range
from engine.segments.reader import RangeRead
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.content.verify import granules_around
from lakefs.errors import ChunkDamaged, InvalidArgument, LakeError, StaleGrant
from lakefs.ids import WHOLE_CHUNK, Sequence, shard_text
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

_ATTEMPTS = 4
"""Times that a moved shard is located and read again."""


class ShardReads:
    """Replies to ReadChunks that name shards."""

    def __init__(self, store: Store, memory: AnswerMemory) -> None:
        self._store = store
        self._metadata = store.metadata
        self._memory = memory

    async def read(self, client: Client, request: m.ReadChunks) -> Reply:
        """Return the reply.  PermissionDenied, InvalidArgument; a shard that cannot be read is its piece's failure."""
        member_of(self._store)
        names = checked_names(request.chunks, request.shards, up_to=WHOLE_CHUNK)
        if not len(names) == len(request.offsets) == len(request.lengths):
            raise InvalidArgument("chunks, shards, offsets and lengths go together")
        if request.targets:
            with self._store.lent.using(client, request.memory, writable=True) as memory:
                return await self._read_to(names, request, memory)
        records, failures, sequence = self._find(names)
        await self._metadata.wait_durable(sequence)
        planned = planned_ranges([chunk for chunk, _ in names], records, request)
        pieces: list[m.ReadPiece] = []
        parts: list[bytes | bytearray | memoryview] = []
        with ExitStack() as releases:
            for read in await self._read_planned(client, names, _with(failures, planned), releases):
                if isinstance(read, LakeError):
                    pieces.append(m.ReadPiece(0, 0, b"", failure_of(read)))
                    continue
                begin, payload, crcs = read
                pieces.append(m.ReadPiece(begin, len(payload), crcs))
                parts.append(payload)
            lengths = [0 if record is None else record.logical_bytes for record in records]
            return Reply(m.ReadChunksReply(pieces, lengths), Body(parts, releases.pop_all().close))

    async def _read_to(self, names: Seq[Name], request: m.ReadChunks, memory: LentMemory) -> Reply:
        """Read pieces to where the request wants them in lent memory."""
        targets = targets_of(request, memory)
        records, failures, sequence = self._find(names)
        await self._metadata.wait_durable(sequence)
        planned = planned_ranges([chunk for chunk, _ in names], records, request)
        planned = [_fitting(item, target) for item, target in zip(_with(failures, planned), targets, strict=True)]
        pieces: list[m.ReadPiece] = []
        wanted = [target for item, target in zip(planned, targets, strict=True) if not isinstance(item, LakeError)]
        for read, target in zip(await self._read_all(names, planned, wanted), targets, strict=True):
            if isinstance(read, LakeError):
                pieces.append(m.ReadPiece(0, 0, b"", failure_of(read)))
                continue
            begin, payload, crcs = read
            if payload.obj is not target.obj:  # it was short, or read again
                target[:] = payload
            pieces.append(m.ReadPiece(begin, len(payload), crcs))
        return Reply(m.ReadChunksReply(pieces, [0 if record is None else record.logical_bytes for record in records]))

    def _find(self, names: Seq[Name]) -> tuple[list[ChunkRecord | None], list[LakeError | None], Sequence]:
        """Return the shards' records, the failures of those without a usable one, and the sequence to wait for."""
        with self._metadata.view() as view:
            records = [find_shard(view, *name) for name in names]
            failures: list[LakeError | None] = []
            for index, name in enumerate(names):
                if self._store.chunks.is_damaged(*name):
                    records[index] = None
                    text = shard_text(*name)
                    failures.append(ChunkDamaged(f"chunk {text} was found damaged", subject=text))
                else:
                    failures.append(absent(*name) if records[index] is None else None)
            return records, failures, view.sequence

    async def _read_planned(
        self, client: Client, names: Seq[Name], planned: Seq[Range | LakeError], releases: ExitStack
    ) -> list[RangeRead | LakeError]:
        wanted = [item for item in planned if not isinstance(item, LakeError)]
        targets = await memory_for(self._memory, client, [room_of(item) for item in wanted], releases)
        return await self._read_all(names, planned, targets)

    async def _read_all(
        self, names: Seq[Name], planned: Seq[Range | LakeError], targets: Seq[memoryview | None]
    ) -> list[RangeRead | LakeError]:
        """Read what is planned; `targets`: memory for each range, or None."""
        wanted = [item for item in planned if not isinstance(item, LakeError)]
        read = iter(await self._store.segments.batches.read_ranges(wanted, targets))
        done: list[RangeRead | LakeError] = []
        for name, item in zip(names, planned, strict=True):
            if isinstance(item, LakeError):
                done.append(item)
            else:
                found = next(read)
                done.append(await self._read_elsewhere(name, item, found) if isinstance(found, LakeError) else found)
        return done

    async def _read_elsewhere(self, name: Name, wanted: Range, error: LakeError) -> RangeRead | LakeError:
        """Read a failed piece at the shard's new place if it was moved; else return the error to report."""
        chunk, shard = name
        record, offset, length = wanted
        for _ in range(_ATTEMPTS):
            judged = await self._store.chunks.judged(chunk, record, error, shard)
            if not isinstance(judged, StaleGrant):
                return judged
            with self._metadata.view() as view:
                now = find_shard(view, chunk, shard)
            if now is None or (now.stored_bytes, now.logical_bytes) != (record.stored_bytes, record.logical_bytes):
                return absent(chunk, shard)
            record = now
            [read] = await self._store.segments.batches.read_ranges([(record, offset, length)])
            if not isinstance(read, LakeError):
                return read
            error = read
        return judged


def targets_of(request: m.ReadChunks, memory: LentMemory) -> list[memoryview]:
    """Return the memory for each range of a request.  InvalidArgument."""
    if len(request.targets) != len(request.chunks) or not all(request.lengths):
        raise InvalidArgument("ranges and targets go together, and each range has a length")
    if not memory.cannot_shrink:
        raise InvalidArgument("shards are read into memory that is sealed against shrinking")
    for offset, length in zip(request.targets, request.lengths, strict=True):
        memory.check_range(offset, length)
    ranges = zip(request.targets, request.lengths, strict=True)
    return [memory.mapping[offset : offset + length] for offset, length in ranges]


def _fitting(planned: Range | LakeError, target: memoryview) -> Range | LakeError:
    """Return a range that is as wide as its target, or the failure."""
    if isinstance(planned, LakeError):
        return planned
    record, offset, length = planned
    begin, end = granules_around(offset, length, record.stored_bytes)
    if end - begin == len(target):
        return planned
    return InvalidArgument(f"the range has {end - begin} bytes, its target {len(target)}")


def _with(failures: Seq[LakeError | None], planned: Seq[Range | LakeError]) -> list[Range | LakeError]:
    """Return what is planned, with the failures of shards that have no usable record."""
    return [item if failure is None else failure for failure, item in zip(failures, planned, strict=True)]
