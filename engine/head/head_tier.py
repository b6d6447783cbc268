"""The DRAM tier of a head: chunks that are read again stay in its memory, and clients on its machine copy them there.

    reads      from the tier where it has the chunk, checked by CRC32C on the way; else over the members
    fills      from reads of whole chunks, in the background (`engine.tiers.dram_filler`)
    clients    on its machine get grants of its cells, map its slabs, and look its chunks up in an index of their own;
               others, with a queue pair, get grants to READ registered cells over RDMA

Rules kept here:
- Only bytes of a whole chunk that was read over the members enter, and such a read is checked by BLAKE3.
- It answers reads alone.  Whether a chunk is stored, members say: an offer never looks here.
- Content is named by its hash, so nothing here can be out of date: a chunk may stay that gc has freed at the members,
  and may be read by its id until it is evicted.  No name leads to it.
- Cells that an answer is sent from are pinned until it is sent.
- A read is counted once: where its bytes are sent, or where its cell is granted.

A head without a tier has a `HeadTier` too, which reads over the members.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from crc32c import crc32c

from engine.fabric.engine_fabric import EngineFabric
from engine.format.layouts import ChunkRecord
from engine.head.head_chunks import KnownLengths
from engine.members.ports import Got, Stripes, Wanted
from engine.requests.locate import reads_by_fabric, reads_slabs
from engine.sessions.references import Client
from engine.tiers.dram_filler import Dram, PinnedRange
from engine.tiers.dram_tier import DramTier, Placement
from engine.tiers.tier_index import TierIndex
from lakefs.content.verify import vector_bytes
from lakefs.errors import ChunkDamaged, InvalidArgument, LakeError
from lakefs.ids import EMPTY_CHUNK, Birth, ChunkId, SegmentId, id_text
from lakefs.limits import DRAM_PAYLOAD_BYTES_MIN, GRANULE_BYTES
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.media import BY_FABRIC


class HeadMemory(NamedTuple):
    """A tier, and the table in which clients look its chunks up; None: a head without it."""

    tier: DramTier | None = None
    shared_index: TierIndex | None = None


class InSlab(NamedTuple):
    """A whole chunk in the tier, pinned: its bytes, the CRC32Cs of its granules, and where a descriptor has them."""

    payload: memoryview
    crcs: bytes
    descriptor: int
    at: int


class StripeSource:
    """The chunks of a lake, read over its members: a `DramSource`."""

    def __init__(self, stripes: Stripes, lengths: KnownLengths, offload: Offload) -> None:
        self._stripes = stripes
        self._lengths = lengths
        self._offload = offload

    def find(self, chunk: ChunkId) -> ChunkRecord | None:
        """See `DramSource.find`: a chunk whose length is known; its checksum is learned when it is read."""
        length = self._lengths.of(chunk)
        return record_of(length, 0) if length else None

    async def read(self, chunk: ChunkId, record: ChunkRecord, memory: memoryview) -> int:
        """See `DramSource.read`."""
        (got,) = await self._stripes.read([Wanted(chunk, record.stored_bytes)])
        if isinstance(got, LakeError):
            raise got
        if not _is_whole(got) or got.chunk_bytes != record.stored_bytes:
            raise ChunkDamaged(f"chunk {id_text(chunk)} has another length than it had", subject=id_text(chunk))
        if len(got.payload) <= GRANULE_BYTES:
            _copy(got, memory)
        else:
            await self._offload.run(_copy, got, memory)
        return _checksum(got)

    def on_gone(self, forget: object) -> None:
        """See `DramSource.on_gone`: content is named by its hash, and never becomes wrong."""


class HeadTier:
    """The tier of one head, and reads through it.  Used on the loop.  `dram` is to be run."""

    def __init__(
        self, stripes: Stripes, lengths: KnownLengths, offload: Offload, memory: HeadMemory, fabric: EngineFabric
    ) -> None:
        """`fabric`: the RDMA over which clients READ the tier."""
        self.dram = Dram(memory.tier, StripeSource(stripes, lengths, offload), offload)
        self.shared_index = memory.shared_index
        self._fabric = fabric
        self._stripes = stripes
        self._lengths = lengths

    @property
    def features(self) -> int:
        """Bits of the reply to Hello: what clients on this machine get of it."""
        slabs = m.FEATURE_SLABS if self.dram.tier is not None else 0
        return slabs | (m.FEATURE_SHARED_INDEX if self.shared_index is not None else 0)

    async def read(self, wanted: Sequence[Wanted], releases: ExitStack) -> list[Got | LakeError]:
        """Read ranges of chunks; see `Stripes.read`.  Bytes are the caller's until `releases` is closed."""
        if self.dram.tier is None:
            return await self._stripes.read(wanted)
        done: list[Got | LakeError | None] = [await self._in_tier(want, releases) for want in wanted]
        left = [index for index, found in enumerate(done) if found is None]
        read = await self._stripes.read([wanted[index] for index in left]) if left else []
        for index, got in zip(left, read, strict=True):
            done[index] = got
            if isinstance(got, Got):
                self._note(wanted[index], got)
        return [found for found in done if found is not None]

    async def read_whole(self, wanted: Sequence[Wanted], releases: ExitStack) -> list[InSlab | Got | LakeError]:
        """Like `read`, of whole chunks: those in the tier with their place, for a reader that checks them itself."""
        found = [self._whole_in_tier(want.chunk, releases) for want in wanted]
        left = [want for want, place in zip(wanted, found, strict=True) if place is None]
        read = iter(await self.read(left, releases) if left else ())
        return [next(read) if place is None else place for place in found]

    def places_of(self, chunks: Sequence[ChunkId]) -> list[Placement] | None:
        """Return the places of chunks if all are in the tier, else None; counted as reads.  They hold for this step."""
        tier = self.dram.tier
        if tier is None or not all(chunk in tier for chunk in chunks):
            return None
        places = [place for chunk in chunks if (place := tier.find(chunk)) is not None]
        for chunk, place in zip(chunks, places, strict=True):
            self.dram.note_read(chunk, place.stored_bytes)
        return places

    def holds(self, chunk: ChunkId, place: Placement) -> bool:
        """Return True if a place that `places_of` returned is still the chunk's."""
        grant = None if self.dram.tier is None else self.dram.tier.grant(chunk)
        return grant is not None and (grant.segment, grant.offset, grant.epoch) == place[:3]

    def descriptor_of(self, place: Placement) -> int:
        """Return the descriptor of the slab that has a place."""
        assert self.dram.tier is not None, "a place is in a tier"
        return self.dram.tier.arena.slabs[place.slab].memory.descriptor

    def length_of(self, chunk: ChunkId) -> int:
        """Return the length of a chunk that is in the tier, or whose length is known; else 0."""
        grant = None if self.dram.tier is None else self.dram.tier.grant(chunk)
        return self._lengths.of(chunk) if grant is None else grant.stored_bytes

    async def lengths_of(self, chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        """Return the length of each chunk, of members where it is not known; 0 for the empty one."""
        lengths: list[int | LakeError] = [self.length_of(chunk) for chunk in chunks]
        unknown = [index for index, length in enumerate(lengths) if not length and chunks[index] != EMPTY_CHUNK]
        found = await self._stripes.lengths([chunks[index] for index in unknown]) if unknown else []
        for index, length in zip(unknown, found, strict=True):
            lengths[index] = length
            if not isinstance(length, LakeError):
                self._lengths.note([(chunks[index], length)])
        return lengths

    def grant(self, client: Client, media: int, chunks: Sequence[bytes], grants: list[m.Grant]) -> None:
        """Replace the grants of chunks that are in the tier by grants of their cells, for a client that may read them.

        Each counts as a read.
        """
        tier = self.dram.tier
        if tier is None:
            return
        if reads_by_fabric(self._fabric, client, media):
            self._grant_remotely(tier, chunks, grants)
        if reads_slabs(client, media):
            self._grant_cells(tier, chunks, grants)

    def _grant_remotely(self, tier: DramTier, chunks: Sequence[bytes], grants: list[m.Grant]) -> None:
        tier.grant_remotely([ChunkId(chunk) for chunk in chunks], grants)
        granted = [index for index, grant in enumerate(grants) if grant.medium in BY_FABRIC]
        some = [grants[index] for index in granted]
        self.dram.note_reads([ChunkId(chunks[index]) for index in granted], some, understood=False)

    def _grant_cells(self, tier: DramTier, chunks: Sequence[bytes], grants: list[m.Grant]) -> None:
        inside = [
            index
            for index, chunk in enumerate(chunks)
            if ChunkId(chunk) in tier and grants[index].medium not in BY_FABRIC
        ]
        some = [grants[index] for index in inside]
        self.dram.note_reads([ChunkId(chunks[index]) for index in inside], some, understood=True)
        for index, found in zip(inside, some, strict=True):
            grants[index] = found

    def note_reads(self, chunks: Sequence[ChunkId]) -> None:
        """Note reads that clients did without a request."""
        for chunk in chunks:
            length = self.length_of(chunk)
            if length and self.dram.note_read(chunk, length, by_client=True):
                self.dram.want(chunk)

    # --- in the tier -------------------------------------------------------------------------------

    async def _in_tier(self, want: Wanted, releases: ExitStack) -> Got | LakeError | None:
        """Return a range of a chunk that is in the tier; None when the members have to be asked."""
        length = self._in_tier_bytes(want.chunk)
        if not length:
            return None
        end = want.offset + want.length if want.length else length
        if not 0 <= want.offset < end <= length:
            return InvalidArgument(f"range {want.offset}+{want.length} is outside a chunk of {length} bytes")
        pinned = await self._pinned(want.chunk, want.offset, end - want.offset, releases)
        return None if pinned is None else Got(pinned.begin, pinned.payload, pinned.crcs, length)

    def _whole_in_tier(self, chunk: ChunkId, releases: ExitStack) -> InSlab | None:
        pinned = self.dram.pin_whole(chunk)
        if pinned is None or self.dram.tier is None:
            return None
        releases.callback(pinned.release)
        self.dram.note_read(chunk, len(pinned.payload))
        return InSlab(pinned.payload, pinned.crcs, self.descriptor_of(pinned.place), pinned.place.offset)

    def _in_tier_bytes(self, chunk: ChunkId) -> int:
        grant = None if self.dram.tier is None else self.dram.tier.grant(chunk)
        return 0 if grant is None else grant.stored_bytes

    async def _pinned(self, chunk: ChunkId, offset: int, length: int, releases: ExitStack) -> PinnedRange | None:
        """Return granules of a chunk that is in the tier, checked; None if they do not match, or cannot be pinned."""
        tier = self.dram.tier
        grant = None if tier is None else tier.grant(chunk)
        if grant is None:
            return None
        if not offset:
            self.dram.note_read(chunk, grant.stored_bytes)
        pinned = await self.dram.read_range(chunk, record_of(grant.stored_bytes, grant.crc), offset, length)
        if pinned is not None:
            releases.callback(pinned.release)
        return pinned

    def _note(self, want: Wanted, got: Got) -> None:
        """Note a read over the members, and bring the chunk in if that is worth it."""
        self._lengths.note([(want.chunk, got.chunk_bytes)])
        tier = self.dram.tier
        if tier is None or got.chunk_bytes < DRAM_PAYLOAD_BYTES_MIN:
            return
        tier.note_misses(1)
        if want.offset or not self.dram.note_read(want.chunk, got.chunk_bytes):
            return
        if not _is_whole(got):
            self.dram.want(want.chunk)
            return
        payload = got.payload
        if len(memoryview(payload.obj)) != len(payload):  # it would keep the memory of others
            payload = memoryview(bytes(payload))
        record = record_of(got.chunk_bytes, _checksum(got))
        self.dram.offer(want.chunk, record, payload, got.crcs if record.vector_bytes else b"")


def record_of(length: int, crc: int) -> ChunkRecord:
    """Return a chunk of that length as a record, which names no place."""
    return ChunkRecord(Birth(0), SegmentId(0), 0, length, length, crc)


def _is_whole(got: Got) -> bool:
    """Return True for a whole chunk, which is checked by its BLAKE3 (`Stripes.read`)."""
    return not got.offset and len(got.payload) == got.chunk_bytes


def _checksum(got: Got) -> int:
    """Return the checksum of a whole chunk as its record has it."""
    return crc32c(got.crcs) if vector_bytes(got.chunk_bytes) else int.from_bytes(got.crcs, "little")


def _copy(got: Got, memory: memoryview) -> None:
    """Write a whole chunk as a cell has it: payload, then vector."""
    end = len(got.payload)
    memory[:end] = got.payload
    if vector_bytes(end):
        memory[end : end + len(got.crcs)] = got.crcs
