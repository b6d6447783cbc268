"""Chunks of keyed blobs at a head: read whole from their member, and all other chunks over their stripes.

A value's chunks lie at the home of its key, whole, and no table says where: the head notes that when it finds the value
(`KeyedPlaces`), so that whatever reads chunks reads these too.

Rules kept here:
- A place is a hint.  A chunk that its member does not have, or sends wrong, is looked for as a stripe; so is that of a
  member that is away.
- Bytes are checked here as those of stripes are: whole chunks by their BLAKE3, ranges by the CRC32C of granules.
- Places are bounded in number; those used last are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from engine.host.tasks import run_all
from engine.members.ports import Got, Members, NewChunk, Stripes, Wanted
from lakefs.content.verify import granule_crcs, matches_id
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, GcGeneration, MemberId
from lakefs.limits import HEAD_PLACES_MAX
from lakefs.ports import Offload
from lakefs.wire import messages as m


class Place(NamedTuple):
    """The member that has a whole chunk, and the chunk's length."""

    member: MemberId
    chunk_bytes: int


class KeyedPlaces:
    """The place at which each chunk of a value was found."""

    def __init__(self, count_max: int = HEAD_PLACES_MAX) -> None:
        self._places: Final = OrderedDict[ChunkId, Place]()
        self._count_max = count_max

    def of(self, chunk: ChunkId) -> Place | None:
        """Return the place of a chunk; None if it was not found as part of a value lately."""
        place = self._places.get(chunk)
        if place is not None:
            self._places.move_to_end(chunk)
        return place

    def note(self, member: MemberId, chunks: Iterable[bytes], lengths: Iterable[int]) -> None:
        """Keep where chunks were found."""
        for chunk, length in zip(chunks, lengths, strict=True):
            self._places[ChunkId(chunk)] = Place(member, length)
            self._places.move_to_end(ChunkId(chunk))
        while len(self._places) > self._count_max:
            self._places.popitem(last=False)


class KeyedChunks:
    """`Stripes` that reads chunks of keyed blobs where they were found."""

    def __init__(self, stripes: Stripes, members: Members, offload: Offload) -> None:
        self._stripes = stripes
        self._members = members
        self._offload = offload
        self.places: Final = KeyedPlaces()

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """See `Stripes.offer`: a chunk of a value counts as absent, it is no stripe."""
        return await self._stripes.offer(generation, chunks)

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        """See `Stripes.store`."""
        return await self._stripes.store(generation, chunks)

    async def lengths(self, chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        """See `Stripes.lengths`; that of a chunk of a value is known from where it was found."""
        found: list[int | LakeError] = [
            0 if (place := self.places.of(each)) is None else place.chunk_bytes for each in chunks
        ]
        others = [index for index, length in enumerate(found) if not length]
        lengths = await self._stripes.lengths([chunks[index] for index in others]) if others else []
        for index, length in zip(others, lengths, strict=True):
            found[index] = length
        return found

    async def read(self, wanted: Sequence[Wanted]) -> list[Got | LakeError]:
        """See `Stripes.read`."""
        by_member: dict[MemberId | None, list[int]] = {}
        asked = list(wanted)
        for index, each in enumerate(wanted):
            place = self.places.of(each.chunk)
            by_member.setdefault(None if place is None else place.member, []).append(index)
            if place is not None:
                asked[index] = each._replace(chunk_bytes=place.chunk_bytes)
        found: list[Got | LakeError | None] = [None] * len(wanted)

        async def read_of(member: MemberId | None) -> None:
            await self._read_into(found, asked, by_member[member], member)

        await run_all(read_of, list(by_member))
        left = [index for index, answer in enumerate(found) if answer is None]
        await run_all(lambda indexes: self._read_into(found, wanted, indexes, None), [left] if left else [])
        return [answer for answer in found if answer is not None]

    async def _read_into(
        self,
        found: list[Got | LakeError | None],
        wanted: Sequence[Wanted],
        indexes: Sequence[int],
        member: MemberId | None,
    ) -> None:
        """Note the answers to those of these indexes, at a member or, without one, of the stripes."""
        some = [wanted[index] for index in indexes]
        answers: Sequence[Got | LakeError | None]
        answers = await (self._stripes.read(some) if member is None else self._read_at(member, some))
        for index, answer in zip(indexes, answers, strict=True):
            found[index] = answer

    async def _read_at(self, member: MemberId, wanted: Sequence[Wanted]) -> Sequence[Got | LakeError | None]:
        """Read chunks at a member; None where it has none, or is away."""
        request = m.ReadChunks(
            [each.chunk for each in wanted], [each.offset for each in wanted], [each.length for each in wanted]
        )
        try:
            reply = await self._members.call(member, request)
        except LakeError:
            return [None] * len(wanted)
        assert isinstance(reply.message, m.ReadChunksReply), "the answer to ReadChunks"
        body = memoryview(reply.body.joined())
        reply.body.release()
        return await self._offload.run(checked, wanted, reply.message.pieces, body)


def checked(wanted: Sequence[Wanted], pieces: Sequence[m.ReadPiece], body: memoryview) -> list[Got | None]:
    """Return what was read, each piece checked; None for those that failed.  Blocks."""
    if len(pieces) != len(wanted) or sum(piece.length for piece in pieces) != len(body):
        return [None] * len(wanted)
    found: list[Got | None] = []
    at = 0
    for each, piece in zip(wanted, pieces, strict=True):
        payload = body[at : at + piece.length]
        at += piece.length
        found.append(checked_piece(each, piece, payload))
    return found


def checked_piece(wanted: Wanted, piece: m.ReadPiece, payload: memoryview) -> Got | None:
    """Return what was read, checked; None if it failed, or is not what was asked for.  Blocks."""
    if piece.failure is not None:
        return None
    end = piece.offset + len(payload)
    stop = wanted.offset + wanted.length if wanted.length else wanted.chunk_bytes
    if not piece.offset <= wanted.offset < stop <= end <= wanted.chunk_bytes:
        return None
    if not piece.offset and end == wanted.chunk_bytes and not matches_id(wanted.chunk, payload):
        return None
    crcs = granule_crcs(payload)
    return Got(piece.offset, payload, crcs, wanted.chunk_bytes) if crcs == piece.crcs else None
