"""`LakeStripes`: the port `Stripes`, chunks as they lie erasure-coded over the members of a lake.

    offer   `stripe_offers`     all homes are asked, and the chunk is present if all its shards are
    store   `stripe_writer`     encoded, sent to all members of its row at once, noted as dirty where it is not whole
    read    `stripe_reader`     data shards from their homes; others, and decoding, when one is missing or late

Without state on disk.  In memory: lengths and checksums of the last chunks (`KnownChunks`), times of answers, and
parity while it is sent.  Any number of calls at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.coordinator.lake_state import LakeState
from engine.members.ports import Got, Members, NewChunk, Wanted
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.shard_lengths import Length
from engine.stripes.stripe_errors import not_found
from engine.stripes.stripe_lengths import StripeLengths
from engine.stripes.stripe_offers import StripeOffers
from engine.stripes.stripe_reader import Range, StripeReader
from engine.stripes.stripe_shards import ParityMemory
from engine.stripes.stripe_writer import StripeWriter
from lakefs.cluster.erasure import ErasureCode
from lakefs.content.verify import crcs_between
from lakefs.errors import InvalidArgument, LakeError
from lakefs.host.buffers import BufferPool
from lakefs.ids import ChunkId, GcGeneration, MemberId, id_text
from lakefs.limits import CHUNK_BYTES, PARITY_MEMORY_BYTES
from lakefs.ports import Offload


class LakeStripes:
    """`Stripes` over the members of a lake."""

    def __init__(
        self, members: Members, state: LakeState, offload: Offload, parity_memory: BufferPool | None = None
    ) -> None:
        """`parity_memory`: at least BUFFERS_PER_PORTION_MAX buffers.  StoreUnusable without the native erasure code."""
        protection = members.tables[0].protection
        code = ErasureCode(protection.data, protection.parity)
        known = KnownChunks()
        memory = ParityMemory(parity_memory or BufferPool(PARITY_MEMORY_BYTES))
        self._members = members
        self._protection = protection
        self._lengths = StripeLengths(members, code, offload, known)
        self._reader = StripeReader(members, code, offload, known)
        self._writer = StripeWriter(members, code, state, offload, memory, known)
        self._offers = StripeOffers(members, code, state, self._reader, known)

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """Return the length of each chunk that is stored, else 0; see `Stripes`."""
        return await self._offers.offer(generation, chunks)

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        """Store chunks; return for each if it was new; see `Stripes`."""
        return await self._writer.store(generation, chunks)

    async def read(self, wanted: Sequence[Wanted]) -> list[Got | LakeError]:
        """Read ranges of chunks; see `Stripes`.

        InvalidArgument is the outcome of a range outside its chunk.  StaleEpoch is raised when a chunk's length had to
        be asked for, and tables change again and again.
        """
        unknown = [want.chunk for want in wanted if not want.chunk_bytes]
        lengths = await self._lengths.find(unknown) if unknown else {}
        outcomes: list[Got | LakeError | None] = [None] * len(wanted)
        ranges: dict[int, Range] = {}
        unsure: list[int] = []
        for index, want in enumerate(wanted):
            length = Length(want.chunk_bytes, is_certain=True) if want.chunk_bytes else lengths[want.chunk]
            if length is None or not length.is_certain:
                unsure.append(index)
                if length is not None:
                    ranges[index] = Range(want.chunk, length.length, 0, 0)
            elif (outside := _outside(want, length.length)) is not None:
                outcomes[index] = outside
            else:
                ranges[index] = Range(want.chunk, length.length, want.offset, want.length)
        if ranges:
            for index, outcome in zip(ranges, await self._reader.read([*ranges.values()]), strict=True):
                outcomes[index] = outcome
        for index in unsure:
            outcomes[index] = await self._read_unsure(wanted[index], outcomes[index])
        done = [outcome for outcome in outcomes if outcome is not None]
        assert len(done) == len(wanted), "each has an outcome"
        return done

    async def _read_unsure(self, want: Wanted, whole: Got | LakeError | None) -> Got | LakeError:
        """Return what was wanted of a chunk whose length was only likely, or not known.

        `whole`: the chunk read by its likely length.  If that is not its length, the length is searched for.
        """
        if not isinstance(whole, Got):
            length = await self._lengths.search(want.chunk)
            if not length:
                return whole or not_found(want.chunk, self._away(want.chunk), self._protection.parity)
            [whole] = await self._reader.read([Range(want.chunk, length, 0, 0)])
            if isinstance(whole, LakeError):
                return whole
        length = len(whole.payload)
        outside = _outside(want, length)
        if outside is not None:
            return outside
        part = Range(want.chunk, length, want.offset, want.length)
        crcs = crcs_between(whole.crcs, part.begin, part.end)
        return Got(part.begin, whole.payload[part.begin : part.end], crcs, length)

    def _away(self, chunk: ChunkId) -> list[MemberId]:
        """Return a chunk's homes that are away, each as often as it is a home."""
        return [home for home in self._members.tables[0].homes(chunk) if not self._members.is_up(home)]


def _outside(want: Wanted, length: int) -> InvalidArgument | None:
    """Return the error for a range that is not in its chunk."""
    end = want.offset + want.length if want.length else length
    if 0 <= want.offset < end <= length <= CHUNK_BYTES:
        return None
    text = id_text(want.chunk)
    return InvalidArgument(f"range {want.offset}+{want.length} is outside chunk {text} of {length} bytes", subject=text)
