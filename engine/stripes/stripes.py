"""`LakeStripes`: the port `Stripes`, chunks as they lie erasure-coded over the members of a lake.

    offer   `stripe_offers`     all homes are asked, and the chunk is present if all its shards are
    store   `stripe_writer`     encoded, sent to all members of its row at once, noted as dirty where it is not whole
    read    `stripe_reader`     data shards from their homes; others, and decoding, when one is missing or late
            `stripe_lengths`    the length of a chunk that is read by its id alone

Without state on disk.  In memory: lengths and checksums of the last chunks (`KnownChunks`), times of answers, and
parity while it is sent.  Any number of calls at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.coordinator.lake_state import LakeState
from engine.members.ports import Got, NewChunk, ReturningMembers, Wanted
from engine.members.read_memory import Take, take_anew
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.stripe_errors import not_found
from engine.stripes.stripe_lengths import BEHIND_ALL, First, Said, StripeLengths
from engine.stripes.stripe_offers import StripeOffers
from engine.stripes.stripe_reader import Range, StripeReader
from engine.stripes.stripe_shards import ParityMemory
from engine.stripes.stripe_writer import StripeWriter
from lakefs.cluster.erasure import ErasureCode
from lakefs.content.verify import crcs_between, granules_around
from lakefs.errors import InvalidArgument, LakeError
from lakefs.host.buffers import BufferPool
from lakefs.ids import ChunkId, GcGeneration, id_text
from lakefs.limits import CHUNK_BYTES, PARITY_MEMORY_BYTES
from lakefs.ports import Offload


class LakeStripes:
    """`Stripes` over the members of a lake."""

    def __init__(
        self,
        members: ReturningMembers,
        state: LakeState,
        offload: Offload,
        parity_memory: BufferPool | None = None,
        take: Take = take_anew,
    ) -> None:
        """`parity_memory`: at least BUFFERS_PER_PORTION_MAX buffers.  `take` gives memory for what is read.

        StoreUnusable without the native erasure code.
        """
        protection = members.tables[0].protection
        code = ErasureCode(protection.data, protection.parity)
        known = KnownChunks()
        memory = ParityMemory(parity_memory or BufferPool(PARITY_MEMORY_BYTES))
        self._members = members
        self._protection = protection
        self._take = take
        self._lengths = StripeLengths(members, code, known)
        self._reader = StripeReader(members, code, offload, known)
        self._writer = StripeWriter(members, code, state, offload, memory, known)
        self._offers = StripeOffers(members, code, state, known)

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """Return the length of each chunk that is stored, else 0; see `Stripes`."""
        return await self._offers.offer(generation, chunks)

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        """Store chunks; return for each if it was new; see `Stripes`."""
        return await self._writer.store(generation, chunks)

    async def read(self, wanted: Sequence[Wanted]) -> list[Got | LakeError]:
        """Read ranges of chunks; see `Stripes`.  InvalidArgument is the outcome of a range outside its chunk."""
        firsts = iter(await self._lengths.first([want for want in wanted if not want.chunk_bytes]))
        begun = [First(want.chunk_bytes) if want.chunk_bytes else next(firsts) for want in wanted]
        outcomes = await self._read(wanted, begun)
        disputed = [i for i, want in enumerate(wanted) if not want.chunk_bytes and not _is_final(outcomes[i])]
        if disputed:
            for index, outcome in zip(disputed, await self._read_disputed([wanted[i] for i in disputed]), strict=True):
                outcomes[index] = outcome
        done = [outcome for outcome in outcomes if outcome is not None]
        assert len(done) == len(wanted), "each has an outcome"
        return done

    async def lengths(self, chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        """Return lengths of chunks; see `Stripes`."""
        firsts = await self._lengths.first([Wanted(chunk, 0, *BEHIND_ALL) for chunk in chunks])
        found: dict[ChunkId, int | LakeError] = dict(zip(chunks, [first.length for first in firsts], strict=True))
        disputed = [chunk for chunk, length in found.items() if not length]
        for chunk, said in zip(disputed, await self._lengths.said(disputed), strict=True):
            found[chunk] = said.agreed
            if not said.agreed:
                whole = await self._proven(chunk, said)
                found[chunk] = whole if isinstance(whole, LakeError) else whole.chunk_bytes
        return [found[chunk] for chunk in chunks]

    async def _read(self, wanted: Sequence[Wanted], begun: Sequence[First]) -> list[Got | LakeError | None]:
        """Read ranges of chunks of these lengths; the outcome of one without a length is None."""
        outcomes: list[Got | LakeError | None] = [None] * len(wanted)
        ranges: dict[int, Range] = {}
        for index, (want, first) in enumerate(zip(wanted, begun, strict=True)):
            outcomes[index] = _outside(want, first.length) if first.length else None
            if first.length and outcomes[index] is None:
                ranges[index] = Range(want.chunk, first.length, want.offset, want.length, first.part, self._take)
        if ranges:
            for index, outcome in zip(ranges, await self._reader.read([*ranges.values()]), strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _read_disputed(self, wanted: Sequence[Wanted]) -> list[Got | LakeError | None]:
        """Read ranges of chunks whose lengths their first members do not say, or not rightly."""
        said = await self._lengths.said([want.chunk for want in wanted])
        outcomes = await self._read(wanted, [First(each.agreed) for each in said])
        for index, want in enumerate(wanted):
            if not _is_final(outcomes[index]):
                whole = await self._proven(want.chunk, said[index])
                outcomes[index] = _part_of(whole, want) if isinstance(whole, Got) else whole
        return outcomes

    async def _proven(self, chunk: ChunkId, said: Said) -> Got | LakeError:
        """Return the whole chunk by the first of these lengths at which it has its hash, or the likeliest's error."""
        errors: list[LakeError] = []
        for length in said.lengths[: self._protection.parity + 1]:
            [outcome] = await self._reader.read([Range(chunk, length, 0, 0, take=self._take)])
            if isinstance(outcome, Got):
                return outcome
            errors.append(outcome)
        return errors[0] if errors else not_found(chunk, said.away, self._protection.parity)


def _is_final(outcome: Got | LakeError | None) -> bool:
    """Return False where another length may lead further."""
    return isinstance(outcome, Got | InvalidArgument)


def _part_of(whole: Got, want: Wanted) -> Got | InvalidArgument:
    """Return what is wanted of a whole chunk."""
    length = whole.chunk_bytes
    outside = _outside(want, length)
    if outside is not None:
        return outside
    begin, end = granules_around(want.offset, want.length or length - want.offset, length)
    return Got(begin, whole.payload[begin:end], crcs_between(whole.crcs, begin, end), length)


def _outside(want: Wanted, length: int) -> InvalidArgument | None:
    """Return the error for a range that is not in its chunk."""
    end = want.offset + want.length if want.length else length
    if 0 <= want.offset < end <= length <= CHUNK_BYTES:
        return None
    text = id_text(want.chunk)
    return InvalidArgument(f"range {want.offset}+{want.length} is outside chunk {text} of {length} bytes", subject=text)
