"""LoadSlots: loads payloads of many chunks into slots of memory that the client has lent, or registered for RDMA.

The engine names source and slot, and the kernel copies; the client checks the bytes, by ids or by the checksums in the
reply.  If that read failed, or the chunk is quarantined, the engine reads and checks the payload, then copies it.

Rules kept here:
- Every chunk of a request has a result: its length, or its failure.  A failure says nothing about the other slots; the
  failed slot may hold any bytes.
- A chunk that was moved or freed during the read is located again: a slot reported as loaded holds that chunk's bytes
  as the disk has them, never the zeros of a punched place.
- Payload is written to [offset, offset + length) of the memory and nowhere else; no two payloads overlap.
- At most AT_ONCE_BYTES are copied on the loop before other tasks may run, and INLINE_BYTES for one request; threads or
  io_uring copy the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence as Seq
from typing import Final, Protocol

import trio

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.format.checksums import check_vector, vector_of
from engine.format.layouts import ChunkRecord
from engine.memory.lent_memory import put_into
from engine.memory.while_lent import WhileLent, always
from engine.requests.answers import failure_of
from engine.requests.fabric_loads import load_by_fabric
from engine.requests.handlers import handles
from engine.segments.lent_reader import SlotLoad
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.errors import (
    ChunkDamaged,
    ChunkNotFound,
    CorruptionError,
    InvalidArgument,
    LakeError,
    OperationalError,
    SessionLost,
    StaleGrant,
    UserError,
)
from lakefs.ids import EMPTY_CHUNK, Buffer, ChunkId, SegmentId, id_text
from lakefs.limits import GRANULE_BYTES, KIB, MIB, PAGE_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.shared_index.table_format import Found
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import IN_FILES

AT_ONCE_BYTES: Final = 512 * KIB
"""Most bytes copied on the loop between two checkpoints: about 0.1 ms."""
INLINE_BYTES: Final = MIB
"""Most bytes copied on the loop for one request."""
RUN_CHUNKS_MAX: Final = 1024
"""Most pieces of memory that one read fills: IOV_MAX of Linux."""
LOAD_ATTEMPTS: Final = 4
"""Times that a moved chunk is located and read; compaction moves a chunk at most once in minutes."""


class SlotMemory(Protocol):
    """Memory with slots that system calls fill: lent by a client, or a registered buffer of the engine."""

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        ...

    @property
    def mapping(self) -> memoryview:
        """The memory, writable, for system calls to copy into."""
        ...

    def has_range(self, offset: int, length: int) -> bool:
        """Return True if [offset, offset + length) is inside the memory."""
        ...


class _Loading:
    """One request, and the results so far."""

    def __init__(self, request: m.LoadSlots, chunks: Seq[ChunkId], memory: SlotMemory, ask: Callable[[], None]) -> None:
        self.request = request
        self.ask = ask
        """Called before each write to the memory; raises SessionLost if it is not lent any more."""
        self.chunks = chunks
        self.memory = memory
        self.lengths = [0] * len(chunks)
        self.crcs = [b""] * len(chunks)
        self.failures: dict[int, m.Failure] = {}
        """Failures by index, as messages: an error's traceback would keep the memory mapped."""

    def load_of(self, index: int, record: ChunkRecord | None) -> SlotLoad | None:
        """Return the load for a chunk; None when nothing is read, because it failed or is empty."""
        if record is None:
            if self.chunks[index] != EMPTY_CHUNK:
                text = id_text(self.chunks[index])
                self.fail(index, ChunkNotFound(f"chunk {text} is not in the store", subject=text))
            return None
        offset, length = self.request.offsets[index], record.stored_bytes
        if self.request.lengths and length > self.request.lengths[index]:
            room = self.request.lengths[index]
            self.fail(index, InvalidArgument(f"the chunk has {length} bytes, its slot {room}"))
            return None
        if not self.memory.has_range(offset, length):
            size = self.memory.size_bytes
            self.fail(index, InvalidArgument(f"{offset}+{length} is outside a lent memory of {size} bytes"))
            return None
        return SlotLoad(
            index,
            record,
            self.memory.mapping[offset : offset + length],
            is_aligned=length >= SMALL_PAYLOAD_BYTES and not (offset | record.offset) % PAGE_BYTES,
            with_vector=self.request.checksums,
            ask=self.ask,
        )

    def is_plain(self, lengths: Seq[int]) -> bool:
        """See `are_plain`."""
        return are_plain(self.request, lengths, self.memory.size_bytes)

    def targets(self, begin: int, end: int, lengths: Seq[int]) -> list[memoryview]:
        """Return the slots of chunks [begin, end), as parts of the mapping."""
        mapping, offsets = self.memory.mapping, self.request.offsets
        return [mapping[offsets[index] : offsets[index] + lengths[index]] for index in range(begin, end)]

    def refuse_overlaps(self, loads: list[SlotLoad]) -> list[SlotLoad]:
        """Fail each load whose slot overlaps the one before it; return the others."""
        offsets = self.request.offsets
        end, kept = -1, []
        for load in sorted(loads, key=lambda load: offsets[load.index]):
            begin = offsets[load.index]
            if begin < end:
                self.fail(load.index, InvalidArgument(f"the slot at {begin} overlaps the one before it"))
                continue
            end = begin + load.record.stored_bytes
            kept.append(load)
        return kept

    def fail(self, index: int, error: LakeError) -> None:
        """Record that a chunk was not loaded."""
        self.failures[index] = failure_of(error)

    def done(self, load: SlotLoad, crcs: bytes) -> None:
        """Record that a payload is in its slot."""
        assert load.index not in self.failures, "a chunk has one result"
        self.lengths[load.index] = load.record.stored_bytes
        self.crcs[load.index] = crcs

    def answer(self) -> m.SlotsLoaded:
        """Return the answer."""
        failures: list[m.Failure | None] = []
        if self.failures:
            failures = [self.failures.get(index) for index in range(len(self.chunks))]
        return m.SlotsLoaded(self.lengths, self.crcs if self.request.checksums else [], failures)


def are_plain(request: m.LoadSlots, lengths: Seq[int], memory_bytes: int) -> bool:
    """Return True if chunks of these lengths are one granule each at most, few bytes in all, and fit disjoint slots."""
    if sum(lengths) > INLINE_BYTES or max(lengths) > GRANULE_BYTES:
        return False
    if request.lengths and any(map(operator.gt, lengths, request.lengths)):
        return False
    end = 0
    for offset, length in sorted(zip(request.offsets, lengths, strict=True)):
        if offset < end:
            return False
        end = offset + length
    return end <= memory_bytes


class Loads:
    """Handler of LoadSlots."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metadata = store.metadata
        self._segments = store.segments
        self._slots = store.segments.lent

    @handles(m.LoadSlots)
    async def load_slots(self, client: Client, request: m.LoadSlots) -> Reply:
        chunks = checked_chunks(request.chunks)
        if len(request.offsets) != len(chunks) or len(request.lengths) not in (0, len(chunks)):
            raise InvalidArgument("chunks and offsets go together, and lengths with them when there are any")
        return Reply(await self.load(client, request, chunks))

    async def load(self, client: Client, request: m.LoadSlots, chunks: Seq[ChunkId]) -> m.SlotsLoaded:
        """Load the checked `chunks` of the request, and return its answer.  SessionLost, InvalidArgument."""
        if request.fabric is not None:
            return await load_by_fabric(self._store.fabric, client, request, chunks, self._lengths_of, self._load_into)
        client.check_its_memory()
        with self._store.lent.using(client, request.memory, writable=True) as memory:
            ask = WhileLent(client.check_its_memory, self._store.clock)
            try:
                return await self._load_into(request, chunks, memory, ask)
            except SessionLost as error:
                lost = error.with_traceback(None)  # which would keep the memory mapped
        raise lost

    async def _lengths_of(self, chunks: Seq[ChunkId]) -> list[int | None]:
        """See `LengthsOf`."""
        with self._metadata.view() as view:
            records = [find_chunk(view, chunk) for chunk in chunks]
            sequence = view.sequence
        await self._metadata.wait_durable(sequence)
        return [None if record is None else record.stored_bytes for record in records]

    async def _load_into(
        self, request: m.LoadSlots, chunks: Seq[ChunkId], memory: SlotMemory, ask: Callable[[], None] = always
    ) -> m.SlotsLoaded:
        loading = _Loading(request, chunks, memory, ask)
        wanted: Seq[int] = range(len(chunks))
        if await self._load_directly(loading):
            return loading.answer()
        for attempt in range(LOAD_ATTEMPTS):
            wanted = await self._load(loading, wanted)
            if not wanted:
                break
            if attempt == LOAD_ATTEMPTS - 1:
                for index in wanted:
                    loading.fail(index, _moved(chunks[index]))
        return loading.answer()

    async def _load_directly(self, loading: _Loading) -> bool:
        """Load short chunks that the shared index knows and whose bytes are in memory; True if all were loaded.

        The fast path for most requests of a running cache, with little work for each chunk; adjacent chunks are one
        read.  On False, `_load` handles the request.
        """
        shared = self._store.shared_index
        if shared is None or not loading.chunks:
            return False
        found = shared.find_many(list(loading.chunks))
        places = [place for place in found if place is not None and place[0] in IN_FILES]
        lengths = [place[3] for place in places]
        if len(places) < len(loading.chunks) or not loading.is_plain(lengths):
            return False
        punched = self._segments.room.punch_count
        begin = at_once = 0
        while begin < len(places):
            if at_once >= AT_ONCE_BYTES:
                await trio.lowlevel.checkpoint()
                at_once = 0
            end = _end_of_run(places, begin)
            _, segment, offset, _, _ = places[begin]
            targets = loading.targets(begin, end, lengths)
            loading.ask()
            try:
                if not self._slots.read_cached_run(SegmentId(segment), offset, targets, probe=not begin):
                    return False
            except (UserError, OperationalError):  # `_load` reports it
                return False
            begin = end
            at_once += sum(map(len, targets))
        if self._segments.room.punch_count != punched:
            return False
        loading.lengths = lengths
        loading.crcs = [crc.to_bytes(4, "little") for *_, crc in places]
        return True

    async def _load(self, loading: _Loading, wanted: Seq[int]) -> list[int]:
        """Load chunks from where they are now; returns those that were moved or freed during the read."""
        punched = self._segments.room.punch_count
        with self._metadata.view() as view:
            found = [loading.load_of(index, find_chunk(view, loading.chunks[index])) for index in wanted]
            sequence = view.sequence
        loads = loading.refuse_overlaps([load for load in found if load is not None])
        await self._metadata.wait_durable(sequence)
        for load in loads:
            if self._store.chunks.is_quarantined(loading.chunks[load.index]):
                load.error = _suspect(loading.chunks[load.index])  # it is read with all checks, or fails
        await self._slots.read(await self._read_cached([load for load in loads if load.error is None]))
        loading.ask()  # a read that might not be done any more ends the load
        moved = self._moved(loading, loads) if self._segments.room.punch_count != punched else set()
        return [load.index for load in loads if load.index in moved or not await self._settled(loading, load)]

    async def _read_cached(self, loads: Seq[SlotLoad]) -> Seq[SlotLoad]:
        """Copy cached loads on the loop, up to the first that is not cached; returns the loads left to read."""
        room, at_once, left = INLINE_BYTES, AT_ONCE_BYTES, list[SlotLoad]()
        for position, load in enumerate(loads):
            length = load.record.stored_bytes
            if length > min(room, AT_ONCE_BYTES):
                left.append(load)
                continue
            if length > at_once:
                await trio.lowlevel.checkpoint()
                at_once = AT_ONCE_BYTES
            load.ask()
            try:
                found = self._slots.read_cached(load, probe=room == INLINE_BYTES)
            except (UserError, OperationalError):  # the second attempt reports it
                found = False
            if not found:
                return [*left, *loads[position:]]
            room -= length
            at_once -= length
        return left

    def _moved(self, loading: _Loading, loads: Seq[SlotLoad]) -> set[int]:
        """Return the loads whose place is no longer their chunk's: they may have read zeros."""
        with self._metadata.view() as view:
            return {load.index for load in loads if find_chunk(view, loading.chunks[load.index]) != load.record}

    async def _settled(self, loading: _Loading, load: SlotLoad) -> bool:
        """Record a load's result; returns False if the chunk has moved and must be located and read again."""
        record = load.record
        if load.error is None:
            if not record.vector_bytes:
                loading.done(load, record.crc.to_bytes(4, "little"))
                return True
            if not load.vector or check_vector(record, load.vector):
                loading.done(load, bytes(load.vector))
                return True
        elif isinstance(load.error, UserError):
            loading.fail(load.index, load.error)
            return True
        try:
            crcs = await self._checked(load)
        except (UserError, OperationalError, CorruptionError) as error:
            failure = await self._judged(loading.chunks[load.index], record, error)
            if failure is None:
                return False
            loading.failures[load.index] = failure
        else:
            loading.done(load, crcs)
        return True

    async def _checked(self, load: SlotLoad) -> bytes:
        """Load a payload whose read failed or whose vector does not match, checked, past the page cache too."""
        payload = await self._segments.reader.read_chunk(load.record)
        await self._store.offload.run(_put_if_lent, load, payload)
        return vector_of(payload)

    async def _judged(self, chunk: ChunkId, record: ChunkRecord, error: LakeError) -> m.Failure | None:
        """Return the failure to reply with; None when the chunk is at another place now."""
        if isinstance(error, UserError):
            return failure_of(error)
        judged = await self._store.chunks.judged(chunk, record, error)
        return None if isinstance(judged, StaleGrant) else failure_of(judged)


def _end_of_run(places: Seq[Found], begin: int) -> int:
    """Return the end of the run of adjacent places from `begin`: RUN_CHUNKS_MAX and AT_ONCE_BYTES at most."""
    _, segment, offset, length, _ = places[begin]
    behind, end = offset + length, begin + 1
    while end < min(len(places), begin + RUN_CHUNKS_MAX):
        _, next_segment, next_offset, length, _ = places[end]
        if (next_segment, next_offset) != (segment, behind) or behind + length - offset > AT_ONCE_BYTES:
            break
        behind += length
        end += 1
    return end


def _put_if_lent(load: SlotLoad, payload: Buffer) -> None:
    load.ask()
    put_into(load.target, payload)


def _suspect(chunk: ChunkId) -> LakeError:
    text = id_text(chunk)
    return ChunkDamaged(f"chunk {text} was found damaged before", subject=text)


def _moved(chunk: ChunkId) -> LakeError:
    text = id_text(chunk)
    return StaleGrant(f"chunk {text} was moved each time that it was read; ask again", subject=text)
