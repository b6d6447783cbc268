"""Finds out which chunks are stored: the offer of the port `Stripes`.

    1. every shard that a chunk may have is offered to its home
    2. of chunks of which some are there, and some are not: the others to substitutes and other members of the row

Rules kept here:
- A chunk is present when each of its shards is at a member of its row in the newest table, durable and touched in the
  request's generation, and no more than m of them on one member that is not their home.
- All these shards say one length of the chunk, and are as long as it demands.  A member that says another has nothing:
  the chunk is absent then, and is stored anew, that shard elsewhere (`KnownChunks.is_wrong`): then it is present.
- A member counts while it is not found away: who goes away while others are asked, or the note is made, has nothing.
- When one of them is not at its home, its partition is noted as dirty before the answer.
- A member that cannot be asked has nothing.  With a newer table all is asked anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from engine.coordinator.lake_state import LakeState
from engine.members.ports import Members
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.newest_table import by_newest_table
from engine.stripes.said_lengths import lengths_said
from engine.stripes.shard_offers import Lengths, Place, offered
from engine.stripes.stripe_layout import is_at_home
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table
from lakefs.ids import EMPTY_CHUNK, ChunkId, GcGeneration, MemberId

_NO_ANSWER: Final = Lengths(-1, 0)
"""Stands for no answer."""


class Found:
    """A chunk that is offered: its length as its shards say it, 0 without any, and who has them."""

    __slots__ = ("_said", "_sizes", "chunk", "length", "places")

    def __init__(self, chunk: ChunkId) -> None:
        self.chunk = chunk
        self.length = 0
        self.places: dict[int, MemberId] = {}
        self._said: dict[Place, Lengths] = {}
        self._sizes: Mapping[int, int] = {}

    def take(self, code: ErasureCode, answered: Mapping[Place, Lengths], places: Sequence[Place], known: int) -> None:
        """Take what members have answered, in the order in which they were asked; `known`: the length, 0 if unknown."""
        self._said |= {place: answered[place] for place in places if place in answered and answered[place].shard}
        said = lengths_said(lengths.chunk for lengths in self._said.values())
        self.length = known or (said[0] if said else 0)
        self._sizes = code.sizes(self.length) if self.length else {}
        self.places = {}
        for (member, _, shard), is_right in self.said():
            if is_right:
                self.places.setdefault(shard, member)

    def said(self) -> Iterator[tuple[Place, bool]]:
        """Yield the places that have answered, each with True if its lengths are those of the chunk."""
        for place, lengths in self._said.items():
            yield place, lengths == (self._sizes.get(place[2]), self.length)

    def missing(self, code: ErasureCode) -> list[int]:
        """Return the shards that the chunk has and that were not found."""
        return [shard for shard in code.shards(self.length) if shard not in self.places]


class StripeOffers:
    """Offers chunks to the members."""

    def __init__(self, members: Members, code: ErasureCode, state: LakeState, known: KnownChunks) -> None:
        self._members = members
        self._code = code
        self._state = state
        self._known = known

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """Return the length of each chunk that is stored, else 0; see `Stripes.offer`."""
        once = [*dict.fromkeys(chunk for chunk in chunks if chunk != EMPTY_CHUNK)]
        present = await by_newest_table(self._members, lambda table: self._offer_by(table, generation, once))
        return [present.get(chunk, 0) for chunk in chunks]

    async def _offer_by(self, table: Table, generation: GcGeneration, chunks: Sequence[ChunkId]) -> dict[ChunkId, int]:
        founds = [Found(chunk) for chunk in chunks]
        at_homes = {
            found.chunk: [(home, found.chunk, shard) for shard, home in enumerate(table.homes(found.chunk))]
            for found in founds
        }
        await self._ask(table, generation, founds, at_homes)
        partly = [found for found in founds if found.places and found.missing(self._code)]
        if partly:
            elsewhere = {found.chunk: self._other_places(table, found) for found in partly}
            await self._ask(table, generation, partly, elsewhere)
        whole = [found for found in founds if found.places and self._is_whole(table, found)]
        dirty = {
            table.partition_of(found.chunk)
            for found in whole
            if not is_at_home(table, found.chunk, found.places, len(found.places))
        }
        if dirty:
            await self._state.note_dirty(dirty, table.ring_epoch)
        return {found.chunk: found.length for found in whole if self._is_up(found)}

    async def _ask(
        self, table: Table, generation: GcGeneration, founds: Sequence[Found], places: Mapping[ChunkId, Sequence[Place]]
    ) -> None:
        asked = [place for of_chunk in places.values() for place in of_chunk]
        answered = await offered(self._members, table, generation, asked)
        for found in founds:
            known = self._known.get(found.chunk)
            found.take(self._code, answered, places[found.chunk], 0 if known is None else known.length)
            if known is not None:
                self._note_said(found)
                self._note_gone(place for place in places[found.chunk] if answered.get(place, _NO_ANSWER).shard == 0)

    def _note_said(self, found: Found) -> None:
        """Note which members said wrong lengths of a known chunk, so that its shards are not stored there."""
        for (member, chunk, shard), is_right in found.said():
            self._known.note_said(chunk, member, shard, right=is_right)

    def _note_gone(self, places: Iterable[Place]) -> None:
        """Note which members have no such shard, or not any more: what they said of it is over."""
        for member, chunk, shard in places:
            self._known.note_said(chunk, member, shard, right=True)

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
        if found.missing(self._code) or not self._is_up(found):
            return False
        homes = table.homes(found.chunk)
        most = max(1, table.protection.parity)
        holders = [*found.places.values()]
        strays = {member for shard, member in found.places.items() if member != homes[shard]}
        return all(holders.count(member) <= most for member in strays)

    def _is_up(self, found: Found) -> bool:
        return all(map(self._members.is_up, set(found.places.values())))
