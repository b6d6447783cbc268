"""Lengths of chunks that are asked for by their ids alone.

    1. known in this process
    2. shard 0 is asked for at its home: it is all of a short chunk
    3. all others are asked for at their homes: together they say the length, or a likely one (`shard_lengths`)
    4. `search`: all that is left of a chunk is read, and its BLAKE3 says the length (`decode`)

Shards are offered, since that answers lengths of many shards at once.  To be touched does them no harm: garbage that
somebody reads is kept a little longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.stripes.decode import solve
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.newest_table import by_newest_table
from engine.stripes.shard_lengths import Length, length_from, readings_of
from engine.stripes.shard_offers import Place, offered
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table, members_to_ask
from lakefs.content.verify import granule_crcs
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, GcGeneration, MemberId
from lakefs.limits import GRANULE_BYTES
from lakefs.ports import Offload
from lakefs.wire import messages as m

_FIRST_GENERATION: Final = GcGeneration(1)


class StripeLengths:
    """Finds lengths of chunks."""

    def __init__(self, members: Members, code: ErasureCode, offload: Offload, known: KnownChunks) -> None:
        self._members = members
        self._code = code
        self._offload = offload
        self._known = known

    async def find(self, chunks: Sequence[ChunkId]) -> dict[ChunkId, Length | None]:
        """Return the length of each chunk as its shards at home say it; None where they do not."""
        found: dict[ChunkId, Length | None] = {}
        for chunk in chunks:
            known = self._known.get(chunk)
            found[chunk] = None if known is None else Length(known.length, is_certain=True)
        unknown = [chunk for chunk, length in found.items() if length is None]
        if unknown:
            found |= await by_newest_table(self._members, lambda table: self._ask(table, unknown))
        return found

    async def _ask(self, table: Table, chunks: Sequence[ChunkId]) -> dict[ChunkId, Length | None]:
        code = self._code
        lengths = {chunk: [0] * table.protection.width for chunk in chunks}
        left, shards = list(chunks), range(1)
        for shards in (range(1), range(1, table.protection.width)):
            places: list[Place] = [(table.homes(chunk)[shard], chunk, shard) for chunk in left for shard in shards]
            generation = max(self._members.generation, _FIRST_GENERATION)
            answered = await offered(self._members, table, generation, places)
            for (_, chunk, shard), length in answered.items():
                lengths[chunk][shard] = length
            left = [chunk for chunk in left if code.data > 1 and not 0 < lengths[chunk][0] < GRANULE_BYTES]
        return {chunk: length_from(code, of_shards) for chunk, of_shards in lengths.items()}

    async def search(self, chunk: ChunkId) -> int:
        """Return the length of a chunk, proven by its BLAKE3; 0 if what is left of it does not make it."""
        left = await self._all_that_is_left(chunk)
        readings = readings_of(self._code, {shard: len(part) for shard, part in left.items()}) if left else []
        solved = await self._offload.run(solve, self._code, chunk, readings, [*left.items()])
        return 0 if solved is None else solved.length

    async def _all_that_is_left(self, chunk: ChunkId) -> dict[int, bytes]:
        """Return every shard of a chunk that is found at a place where it may lie."""
        places: dict[MemberId, list[int]] = {}
        for shard in range(self._code.data + self._code.parity):
            for member in members_to_ask(self._members.tables, chunk, shard):
                if self._members.is_up(member):
                    places.setdefault(member, []).append(shard)
        found: dict[int, bytes] = {}

        async def ask(place: tuple[MemberId, list[int]]) -> None:
            member, shards = place
            request = m.ReadChunks([chunk] * len(shards), [0] * len(shards), [0] * len(shards), shards)
            try:
                reply = await self._members.call(member, request)
            except LakeError:
                return
            try:
                found.update(_whole_shards(shards, reply.message, reply.body.joined()))
            finally:
                reply.body.release()

        await run_all(ask, [*places.items()])
        return found


def _whole_shards(shards: Sequence[int], message: m.Message, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the shards in an answer whose bytes are what their checksums say."""
    assert isinstance(message, m.ReadChunksReply), "the answer to ReadChunks"
    at = 0
    for shard, piece in zip(shards, message.pieces, strict=True):
        payload = body[at : at + piece.length]
        at += piece.length
        if piece.failure is None and payload and granule_crcs(payload) == piece.crcs:
            yield shard, payload
