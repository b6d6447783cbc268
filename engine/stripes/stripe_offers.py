"""Finds out which chunks are stored: the offer of the port `Stripes`.

    1. every shard that a chunk may have is offered to its home
    2. of chunks of which some are there, and some are not: the others to substitutes and other members of the row
    3. where lengths of shards leave doubt (`shard_lengths`), the chunk is read, and its BLAKE3 decides

Rules kept here:
- A chunk is present when each of its shards is at a member of its row in the newest table, durable and touched in the
  request's generation, and no more than m of them on one member that is not their home.
- When one of them is not at its home, its partition is noted as dirty before the answer.
- A member that cannot be asked has nothing.  With a newer table all is asked anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.coordinator.lake_state import LakeState
from engine.members.ports import Got, Members
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.newest_table import by_newest_table
from engine.stripes.shard_lengths import length_from
from engine.stripes.shard_offers import Place, offered
from engine.stripes.stripe_layout import is_at_home
from engine.stripes.stripe_reader import Range, StripeReader
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table
from lakefs.ids import EMPTY_CHUNK, ChunkId, GcGeneration, MemberId


class Found:
    """A chunk that is offered: lengths of its shards, and who has them."""

    __slots__ = ("chunk", "is_certain", "length", "lengths", "places")

    def __init__(self, chunk: ChunkId, width: int) -> None:
        self.chunk = chunk
        self.lengths = [0] * width
        self.places: dict[int, MemberId] = {}
        self.length = 0
        self.is_certain = False

    def take(self, code: ErasureCode, lengths: Mapping[Place, int], places: Sequence[Place], known: int) -> None:
        """Take what members have answered, in the order in which they were asked; `known`: the length, 0 if unknown."""
        for member, chunk, shard in places:
            length = lengths.get((member, chunk, shard), 0)
            if chunk == self.chunk and length and shard not in self.places:
                self.lengths[shard], self.places[shard] = length, member
        likely = length_from(code, self.lengths)
        self.length, self.is_certain = (known, True) if known else likely or (0, False)

    def missing(self, code: ErasureCode) -> list[int]:
        """Return the shards that the chunk has, or may have, and that were not found, or have another length."""
        if not self.length:
            return [shard for shard, length in enumerate(self.lengths) if not length]
        size = code.shard_bytes(self.length)
        return [
            shard
            for shard in code.shards(self.length)
            if self.lengths[shard] != (size if shard >= code.data else code.extent(self.length, shard)[1])
        ]


class StripeOffers:
    """Offers chunks to the members."""

    def __init__(
        self, members: Members, code: ErasureCode, state: LakeState, reader: StripeReader, known: KnownChunks
    ) -> None:
        self._members = members
        self._code = code
        self._state = state
        self._reader = reader
        self._known = known

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """Return the length of each chunk that is stored, else 0; see `Stripes.offer`."""
        once = [*dict.fromkeys(chunk for chunk in chunks if chunk != EMPTY_CHUNK)]
        present = await by_newest_table(self._members, lambda table: self._offer_by(table, generation, once))
        return [present.get(chunk, 0) for chunk in chunks]

    async def _offer_by(self, table: Table, generation: GcGeneration, chunks: Sequence[ChunkId]) -> dict[ChunkId, int]:
        founds = [Found(chunk, table.protection.width) for chunk in chunks]
        at_homes = {
            found.chunk: [(home, found.chunk, shard) for shard, home in enumerate(table.homes(found.chunk))]
            for found in founds
        }
        await self._ask(table, generation, founds, at_homes)
        partly = [found for found in founds if found.places and found.missing(self._code)]
        if partly:
            elsewhere = {found.chunk: self._other_places(table, found) for found in partly}
            await self._ask(table, generation, partly, elsewhere)
        whole = [found for found in founds if found.length and self._is_whole(table, found)]
        await self._prove([found for found in whole if not found.is_certain])
        whole = [found for found in whole if found.is_certain]
        dirty = {
            table.partition_of(found.chunk)
            for found in whole
            if not is_at_home(table, found.chunk, found.places, len(found.places))
        }
        if dirty:
            await self._state.note_dirty(dirty, table.ring_epoch)
        return {found.chunk: found.length for found in whole}

    async def _ask(
        self, table: Table, generation: GcGeneration, founds: Sequence[Found], places: Mapping[ChunkId, Sequence[Place]]
    ) -> None:
        asked = [place for of_chunk in places.values() for place in of_chunk]
        lengths = await offered(self._members, table, generation, asked)
        for found in founds:
            known = self._known.get(found.chunk)
            found.take(self._code, lengths, places[found.chunk], 0 if known is None else known.length)

    def _other_places(self, table: Table, found: Found) -> list[Place]:
        """Return where missing shards may lie beside their homes: at substitutes, then at other members of the row."""
        homes = table.homes(found.chunk)
        row = dict.fromkeys((*table.substitutes(found.chunk), *homes))
        return [
            (member, found.chunk, shard)
            for shard in found.missing(self._code)
            for member in row
            if member != homes[shard]
        ]

    def _is_whole(self, table: Table, found: Found) -> bool:
        if found.missing(self._code):
            return False
        existing = self._code.shards(found.length)
        found.places = {shard: found.places[shard] for shard in existing}
        homes = table.homes(found.chunk)
        most = max(1, table.protection.parity)
        holders = [*found.places.values()]
        strays = {member for shard, member in found.places.items() if member != homes[shard]}
        return all(holders.count(member) <= most for member in strays)

    async def _prove(self, doubtful: Sequence[Found]) -> None:
        """Read chunks whose length is only likely; it is certain if they hash to their ids."""
        if doubtful:
            read = await self._reader.read([Range(found.chunk, found.length, 0, 0) for found in doubtful])
            for found, outcome in zip(doubtful, read, strict=True):
                found.is_certain = isinstance(outcome, Got)
