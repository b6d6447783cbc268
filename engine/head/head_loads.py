"""LoadSlots and KeyedLoad at a head: chunks are read, checked, and copied into memory that a client has lent.

Chunks in the DRAM tier are copied by the kernel, from their slab, and checked by the client alone, as from an engine's
page cache: one that does not match is asked for anew, then as a stream, which is checked here.  Others are read over
the members, and checked.

Rules kept here:
- Every chunk has a result: its length, or its failure.  A slot reported as loaded holds that chunk's bytes.
- Payload is written to [offset, offset + length) of the memory and nowhere else; no two payloads overlap.
- Before each write the head asks if the client is still connected: afterwards its memory is its own.
- Chunks are read a few at once: BODY_BYTES_MAX for one request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Final

import trio
from msgspec.structs import replace

from engine.chunks.manifests import checked_chunks
from engine.head.head_chunks import KnownLengths
from engine.head.head_clients import HeadClient
from engine.head.head_keyed import Found, KeyMatches
from engine.head.head_tier import HeadTier, InSlab
from engine.head.home_reads import Sent
from engine.members.ports import Got, Wanted
from engine.memory.lent_memory import LentMemory, copy_into, put_into
from engine.memory.while_lent import WhileLent
from engine.requests.answers import failure_of
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys, divided
from engine.requests.keyed_load import WantedValues, check_lists
from engine.requests.load_ranges import AT_ONCE_BYTES, are_plain
from engine.sessions.lendings import Lendings
from engine.tiers.dram_tier import Placement
from lakefs.errors import InvalidArgument, LakeError, SessionLost, SourceChanged, UnsupportedVersion
from lakefs.ids import EMPTY_CHUNK, ChunkId
from lakefs.limits import BODY_BYTES_MAX, CHUNK_BYTES
from lakefs.ports import Clock, Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

NOT_SENT: Final[Mapping[ChunkId, Sent]] = MappingProxyType({})
"""No chunk was sent already."""


class HeadLoads:
    """Handler of LoadSlots."""

    def __init__(self, tier: HeadTier, lengths: KnownLengths, lent: Lendings, offload: Offload, clock: Clock) -> None:
        self._tier = tier
        self._lengths = lengths
        self._lent = lent
        self._offload = offload
        self._clock = clock

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
        check_not_by_rdma(request)
        client.check_its_memory()
        with self._lent.using(client, request.memory, writable=True) as memory:
            ask = WhileLent(client.check_its_memory, self._clock)
            load = _Load(request, chunks, memory, ask)
            try:
                if not await self._load_from_memory(load):
                    while wrong := await self._load(load, parts):
                        parts = {chunk: part for chunk, part in parts.items() if chunk not in wrong}
                        load = _Load(request, chunks, memory, ask)
                return load.answer()
            except SessionLost as error:
                lost = error.with_traceback(None)  # which would keep the memory mapped
        raise lost

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

    def __init__(self, matches: KeyMatches, loads: HeadLoads) -> None:
        self._matches = matches
        self._loads = loads

    @handles(m.KeyedLoad)
    async def keyed_load(self, client: HeadClient, request: m.KeyedLoad) -> Reply:
        check_keys(request.keys)
        check_lists(len(request.keys), request.offsets, request.lengths)
        check_not_by_rdma(request)
        found = Found()
        indexes = divided(request.keys)[1]
        with ExitStack() as releases:
            parts = await self._matches.read(client, request.space, request.keys, indexes, found, releases)
            wanted = WantedValues(request)
            for index in range(len(request.keys)):
                wanted.is_full = wanted.is_full or index in found.failures  # its home's answer was full
                value = found.values.get(index)
                wanted.add(index, None if value is None or wanted.is_full else value.as_record())
            slots = m.LoadSlots(request.memory, list(wanted.chunks), wanted.offsets, wanted.lengths)
            slots = replace(slots, checksums=request.checksums, fabric=request.fabric)
            return Reply(wanted.reply(await self._loads.load(client, slots, parts)))


def check_not_by_rdma(request: m.LoadSlots | m.KeyedLoad) -> None:
    """Raise UnsupportedVersion for a load into memory that is registered for RDMA."""
    if request.fabric is not None:
        raise UnsupportedVersion("this lake's head does not move payload by RDMA; ask for the bytes instead")


class _Load:
    """One request, and the results so far."""

    def __init__(
        self, request: m.LoadSlots, chunks: Sequence[ChunkId], memory: LentMemory, ask: Callable[[], None]
    ) -> None:
        self.chunks = chunks
        self.request = request
        self._memory = memory
        self._ask = ask
        self._lengths = [0] * len(chunks)
        self._crcs = [b""] * len(chunks)
        self._failures: dict[int, m.Failure] = {}
        """Failures by index, as messages: an error's traceback would keep the memory mapped."""
        self._end = -1
        """End of the last slot."""

    @property
    def memory_bytes(self) -> int:
        """Length of the lent memory."""
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
            put_into(slot, got.payload)
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
