"""LoadSlots and KeyedLoad at a head: chunks are read, checked, and copied into memory that a client has lent.

For memory that a client has registered for RDMA they are copied to registered buffers of this machine, and written from
there (`engine.requests.fabric_loads`).

Chunks in the DRAM tier are copied by the kernel, from their slab, and checked by the client alone, as from an engine's
page cache: one that does not match is asked for anew, then as a stream, which is checked here.  Others are read over
the members, and checked.

Rules kept here:
- Every chunk has a result: its length, or its failure.  A slot reported as loaded holds that chunk's bytes.
- Payload is written to [offset, offset + length) of the memory and nowhere else; no two payloads overlap.
- Before each write the head asks if the client is still connected: afterwards its memory is its own.
- Chunks are read a few at once: BODY_BYTES_MAX for one request.  By RDMA, a buffer's at once; parts of values that are
  read with their keys count as an answer until all are written (`AnswerMemory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

import trio
from msgspec.structs import replace

from engine.chunks.manifests import checked_chunks
from engine.fabric.bounce_memory import Bounce
from engine.fabric.engine_fabric import EngineFabric
from engine.head.head_chunks import HeadChunks
from engine.head.head_clients import HeadClient
from engine.head.head_keyed import Found, KeyMatches
from engine.head.head_tier import HeadTier, InSlab
from engine.head.home_reads import Sent
from engine.members.ports import Got, Wanted
from engine.memory.lent_memory import copy_into, put_into
from engine.memory.while_lent import WhileLent, always
from engine.requests.answer_memory import AnswerMemory
from engine.requests.answers import failure_of
from engine.requests.fabric_loads import load_by_fabric
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys, divided
from engine.requests.keyed_load import WantedValues, check_lists
from engine.requests.load_ranges import AT_ONCE_BYTES, SlotMemory, are_plain
from engine.sessions.lendings import Lendings
from engine.tiers.dram_tier import Placement
from lakefs.errors import InvalidArgument, LakeError, SessionLost, SourceChanged
from lakefs.ids import EMPTY_CHUNK, ChunkId
from lakefs.limits import BODY_BYTES_MAX, CHUNK_BYTES
from lakefs.ports import Clock, Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

NOT_SENT: Final[Mapping[ChunkId, Sent]] = MappingProxyType({})
"""No chunk was sent already."""


class LoadingParts(Protocol):
    """The parts of a head that are used here."""

    lent: Lendings
    fabric: EngineFabric
    offload: Offload
    clock: Clock
    chunks: HeadChunks
    tier: HeadTier


class HeadLoads:
    """Handler of LoadSlots."""

    def __init__(self, parts: LoadingParts) -> None:
        self._tier = parts.tier
        self._lengths = parts.chunks.lengths
        self._lent = parts.lent
        self._fabric = parts.fabric
        self._offload = parts.offload
        self._clock = parts.clock

    @handles(m.LoadSlots)
    async def load_slots(self, client: HeadClient, request: m.LoadSlots) -> Reply:
        return Reply(await self.load(client, request))

    async def load(
        self, client: HeadClient, request: m.LoadSlots, parts: Mapping[ChunkId, Sent] = NOT_SENT
    ) -> m.SlotsLoaded:
        """Load chunks into slots.  Each fails by itself; InvalidArgument, SessionLost for the request.

        `parts`: chunks that were sent already; those that are not what was asked for are read anew.
        """
        chunks = checked_chunks(request.chunks)
        if len(request.offsets) != len(chunks) or len(request.lengths) not in (0, len(chunks)):
            raise InvalidArgument("chunks and offsets go together, and lengths with them when there are any")
        if request.fabric is not None:
            lengths_of, into = partial(self._lengths_of, parts), partial(self._load_into_buffer, parts)
            return await load_by_fabric(self._fabric, client, request, chunks, lengths_of, into)
        client.check_its_memory()
        with self._lent.using(client, request.memory, writable=True) as memory:
            ask = WhileLent(client.check_its_memory, self._clock)
            try:
                return await self._load_all(partial(_Load, request, chunks, memory, ask), parts)
            except SessionLost as error:
                lost = error.with_traceback(None)  # which would keep the memory mapped
        raise lost

    async def _lengths_of(self, parts: Mapping[ChunkId, Sent], chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        """See `LengthsOf`."""
        left = [chunk for chunk in chunks if chunk not in parts]
        found = iter(await self._tier.lengths_of(left))
        return [parts[chunk].wanted.chunk_bytes if chunk in parts else next(found) for chunk in chunks]

    async def _load_into_buffer(
        self, parts: Mapping[ChunkId, Sent], request: m.LoadSlots, chunks: Sequence[ChunkId], buffer: Bounce
    ) -> m.SlotsLoaded:
        """See `LoadInto`."""
        return await self._load_all(partial(_Load, request, chunks, buffer, always, _copy), parts)

    async def _load_all(self, begin: Callable[[], _Load], parts: Mapping[ChunkId, Sent]) -> m.SlotsLoaded:
        load = begin()
        if not await self._load_from_memory(load):
            while wrong := await self._load(load, parts):
                parts = {chunk: part for chunk, part in parts.items() if chunk not in wrong}
                load = begin()
        return load.answer()

    async def _load_from_memory(self, load: _Load) -> bool:
        """Load short chunks that are all in the tier; True if that was done.  On False, `_load` does it, and reports.

        The loop copies at most INLINE_BYTES, and at most AT_ONCE_BYTES before other tasks may run.
        """
        places = self._tier.places_of(load.chunks)
        if not places or not are_plain(load.request, [place.stored_bytes for place in places], load.memory_bytes):
            return False
        try:
            at_once = 0
            for index, place in enumerate(places):
                if at_once + place.stored_bytes > AT_ONCE_BYTES:
                    await trio.lowlevel.checkpoint()
                    at_once = 0
                if not self._tier.holds(load.chunks[index], place):
                    return False
                load.copy(index, place, self._tier.descriptor_of(place))
                at_once += place.stored_bytes
        except SourceChanged:
            return False
        return True

    async def _load(self, load: _Load, parts: Mapping[ChunkId, Sent]) -> Sequence[ChunkId]:
        """Load chunks; returns parts that failed their check, and then the load has to begin again without them."""
        offsets = load.request.offsets
        wanted = [index for index, chunk in enumerate(load.chunks) if chunk != EMPTY_CHUNK]
        wanted.sort(key=lambda index: offsets[index])  # so that a slot can overlap only the one before it
        while wanted:
            batch, room = list[int](), BODY_BYTES_MAX
            for index in wanted:
                length = 0 if load.chunks[index] in parts else self._tier.length_of(load.chunks[index]) or CHUNK_BYTES
                if batch and length > room:
                    break
                room -= length
                batch.append(index)
            wanted = wanted[len(batch) :]
            left = [load.chunks[index] for index in batch if load.chunks[index] not in parts]
            ranges = [Wanted(chunk, self._lengths.of(chunk)) for chunk in left]
            with ExitStack() as pins:
                read = iter(await self._tier.read_whole(ranges, pins) if ranges else ())
                found = [parts.get(load.chunks[index]) or next(read) for index in batch]
                self._lengths.note(
                    (load.chunks[index], len(got.payload))
                    for index, got in zip(batch, found, strict=True)
                    if not isinstance(got, LakeError | Sent)
                )
                if wrong := await self._offload.run(load.put_all, batch, found):
                    return wrong
        return ()


class HeadKeyedLoads:
    """Handler of KeyedLoad: the parts of the values that are found are loaded like any chunk."""

    def __init__(self, matches: KeyMatches, loads: HeadLoads, answers: AnswerMemory) -> None:
        self._matches = matches
        self._loads = loads
        self._answers = answers

    @handles(m.KeyedLoad)
    async def keyed_load(self, client: HeadClient, request: m.KeyedLoad) -> Reply:
        check_keys(request.keys)
        check_lists(len(request.keys), request.offsets, request.lengths)
        if request.fabric is None:
            return Reply(await self._load(client, request, BODY_BYTES_MAX))
        bytes_max = min(max(1, sum(request.lengths)) if request.lengths else BODY_BYTES_MAX, BODY_BYTES_MAX)
        with ExitStack() as releases:  # what is read waits for the client's turn
            releases.callback(await self._answers.room(client, bytes_max))
            return Reply(await self._load(client, request, bytes_max))

    async def _load(self, client: HeadClient, request: m.KeyedLoad, bytes_max: int) -> m.KeyedLoaded:
        """Find the values, load their parts, and return the answer.

        With the keys, so many bytes of each home are read at most.
        """
        found = Found()
        indexes = divided(request.keys)[1]
        with ExitStack() as releases:
            parts = await self._matches.read(client, request.space, request.keys, indexes, found, bytes_max, releases)
            wanted = WantedValues(request)
            for index in range(len(request.keys)):
                wanted.is_full = wanted.is_full or index in found.failures  # its home's answer was full
                value = found.values.get(index)
                wanted.add(index, None if value is None or wanted.is_full else value.as_record())
            slots = m.LoadSlots(request.memory, list(wanted.chunks), wanted.offsets, wanted.lengths)
            slots = replace(slots, checksums=request.checksums, fabric=request.fabric)
            return wanted.reply(await self._loads.load(client, slots, parts))


class _Load:
    """One request, and the results so far."""

    def __init__(
        self,
        request: m.LoadSlots,
        chunks: Sequence[ChunkId],
        memory: SlotMemory,
        ask: Callable[[], None],
        put: Callable[[memoryview, memoryview], None] = put_into,
    ) -> None:
        """`ask` raises SessionLost if the memory may not be written to any more.  `put` copies payload into it."""
        self.chunks = chunks
        self.request = request
        self._memory = memory
        self._ask = ask
        self._put_into = put
        self._lengths = [0] * len(chunks)
        self._crcs = [b""] * len(chunks)
        self._failures: dict[int, m.Failure] = {}
        """Failures by index, as messages: an error's traceback would keep the memory mapped."""
        self._end = -1
        """End of the last slot."""

    @property
    def memory_bytes(self) -> int:
        """Length of the memory."""
        return self._memory.size_bytes

    def copy(self, index: int, place: Placement, descriptor: int) -> None:
        """Copy a chunk of one granule from the tier to its slot, which it fits.  SourceChanged, SessionLost."""
        offset = self.request.offsets[index]
        self._ask()
        copy_into(self._memory.mapping[offset : offset + place.stored_bytes], descriptor, place.offset)
        self._lengths[index] = place.stored_bytes
        self._crcs[index] = place.crc.to_bytes(4, "little")

    def put_all(self, indexes: Sequence[int], found: Sequence[InSlab | Got | Sent | LakeError]) -> list[ChunkId]:
        """Copy chunks to their slots, by ascending offset; blocks.  SessionLost when the client has left.

        Parts that were sent are checked first; those that fail are returned, and not copied.
        """
        wrong: list[ChunkId] = []
        for index, part in zip(indexes, found, strict=True):
            got = part.checked() if isinstance(part, Sent) else part
            try:
                if isinstance(got, LakeError):
                    raise got
                if got is None:
                    wrong.append(self.chunks[index])
                else:
                    self._put(index, got)
            except SessionLost:
                raise
            except LakeError as error:
                self._failures[index] = failure_of(error)
        return wrong

    def answer(self) -> m.SlotsLoaded:
        """Return the answer."""
        failures: list[m.Failure | None] = []
        if self._failures:
            failures = [self._failures.get(index) for index in range(len(self.chunks))]
        return m.SlotsLoaded(self._lengths, self._crcs if self.request.checksums else [], failures)

    def _put(self, index: int, got: InSlab | Got) -> None:
        """Copy one chunk to its slot.  InvalidArgument, SourceChanged, SessionLost."""
        offset, length = self.request.offsets[index], len(got.payload)
        self._check_slot(index, offset, length)
        self._ask()
        slot = self._memory.mapping[offset : offset + length]
        if isinstance(got, InSlab):
            copy_into(slot, got.descriptor, got.at)
        else:
            self._put_into(slot, got.payload)
        self._lengths[index] = length
        self._crcs[index] = got.crcs

    def _check_slot(self, index: int, offset: int, length: int) -> None:
        """Raise InvalidArgument unless the payload fits its slot, and that is free."""
        if self.request.lengths and length > self.request.lengths[index]:
            raise InvalidArgument(f"the chunk has {length} bytes, its slot {self.request.lengths[index]}")
        if not self._memory.has_range(offset, length):
            raise InvalidArgument(f"{offset}+{length} is outside a lent memory of {self._memory.size_bytes} bytes")
        if offset < self._end:
            raise InvalidArgument(f"the slot at {offset} overlaps the one before it")
        self._end = offset + length


def _copy(slot: memoryview, payload: memoryview) -> None:
    """Copy payload into a buffer of this process."""
    slot[:] = payload
