"""Looks where the shards of chunks are: which chunks are whole, short but readable, or damaged.

    1. every shard is asked for at its home
    2. those that a home lacks, at the other members that may have them
    3. of chunks of which too few were found, once more after a pause: the walker may be moving them

Rules kept here:
- A shard of another length than its chunk's is none.
- What a member has that did not answer is not known: a chunk is damaged only if too few shards are left even when all
  of those exist.
- Shards are asked for with OfferShards, in the present gc generation.  That touches them, which keeps nothing that is
  not named: callers ask for named chunks only.
- Nothing is repaired; partitions of short chunks are noted as dirty, for the walker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

import trio

from engine.coordinator.lake_state import LakeState
from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.stripes.newest_table import by_newest_table
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table, members_to_ask
from lakefs.errors import LakeError, StaleEpoch
from lakefs.ids import ChunkId, GcGeneration, MemberId
from lakefs.limits import BATCH_MAX
from lakefs.wire import messages as m

LOOK_AGAIN_S: Final = 2.0
"""Pause, as the walker's, before chunks are looked at again."""


class Known(NamedTuple):
    """A chunk of a known length."""

    chunk: ChunkId
    length: int


class Standing(Enum):
    """Where the shards of a chunk are."""

    WHOLE = auto()
    """All at home."""
    SHORT = auto()
    """Some are not at home, and the chunk can be read."""
    UNSEEN = auto()
    """All that answering homes should have is there."""
    UNKNOWN = auto()
    """It can be read only with members that did not answer."""
    DAMAGED = auto()
    """Too few are left."""


class Shards:
    """The shards of one chunk as members have them."""

    def __init__(self, code: ErasureCode, known: Known) -> None:
        self.known: Final = known
        self.numbers: Final = code.shards(known.length)
        self.needed: Final = code.data_shards(known.length)
        self.lengths: Final = {
            number: code.extent(known.length, number)[1] if number < code.data else code.shard_bytes(known.length)
            for number in self.numbers
        }
        self.at_home: set[int] = set()
        self.elsewhere: set[int] = set()
        self.unseen: set[int] = set()
        """Shards of which a member that may have them did not answer."""
        self.home_unseen: set[int] = set()
        """Shards of which the home did not answer."""
        self.misfits: set[int] = set()
        """Shards that a member has with another length than the chunk gives them."""

    @property
    def found(self) -> set[int]:
        """Shards that some member has."""
        return self.at_home | self.elsewhere

    @property
    def missing(self) -> list[int]:
        """Shards that are not at home."""
        return [number for number in self.numbers if number not in self.at_home]

    @property
    def standing(self) -> Standing:
        """The chunk's standing."""
        found = self.found
        if not self.missing:
            return Standing.WHOLE
        if len(found) < self.needed:
            return Standing.UNKNOWN if len(found | self.unseen) >= self.needed else Standing.DAMAGED
        return Standing.UNSEEN if self.home_unseen.issuperset(self.missing) else Standing.SHORT


class StripeCheck:
    """Looks at chunks.  `away` has the members that did not answer, with the first reason of each."""

    def __init__(self, members: Members, state: LakeState, code: ErasureCode) -> None:
        self.away: dict[MemberId, str] = {}
        self._members = members
        self._state = state
        self._code = code

    async def look(self, chunks: Sequence[Known]) -> list[Shards]:
        """Return where the shards of chunks are.  Errors of the coordinator; StaleEpoch if tables change on and on."""
        found = await by_newest_table(self._members, lambda table: self._look_by(table, chunks))
        doubtful = [shards.known for shards in found if shards.standing is Standing.DAMAGED]
        if doubtful:
            await trio.sleep(LOOK_AGAIN_S)
            again = await by_newest_table(self._members, lambda table: self._look_by(table, doubtful))
            seen = {shards.known: shards for shards in again}
            found = [seen.get(shards.known, shards) for shards in found]
        await self._note_short(found)
        return found

    async def _look_by(self, table: Table, chunks: Sequence[Known]) -> list[Shards]:
        found = [Shards(self._code, known) for known in dict.fromkeys(chunks)]
        generation = GcGeneration(max(1, await self._state.generation()))
        asks: list[tuple[MemberId, Shards, int]] = []
        for shards in found:
            homes = table.homes(shards.known.chunk)
            asks += [(homes[number], shards, number) for number in shards.numbers]
        await self._ask(table, generation, asks, at_home=True)
        asks = []
        for shards in found:
            chunk = shards.known.chunk
            homes = table.homes(chunk)
            for number in shards.missing:
                others = members_to_ask(self._members.tables, chunk, number)
                asks += [(member, shards, number) for member in others if member != homes[number]]
        await self._ask(table, generation, asks, at_home=False)
        return found

    async def _ask(
        self, table: Table, generation: GcGeneration, asks: Sequence[tuple[MemberId, Shards, int]], *, at_home: bool
    ) -> None:
        by_member: dict[MemberId, list[tuple[Shards, int]]] = {}
        for member, shards, number in asks:
            by_member.setdefault(member, []).append((shards, number))

        async def ask(send: tuple[MemberId, Sequence[tuple[Shards, int]]]) -> None:
            member, wanted = send
            chunks, numbers = [shards.known.chunk for shards, _ in wanted], [number for _, number in wanted]
            try:
                reply = await self._members.call(
                    member, m.OfferShards(table.ring_epoch, generation, [*chunks], numbers)
                )
            except StaleEpoch:
                raise
            except LakeError as error:
                self.away.setdefault(member, error.message)
                for shards, number in wanted:
                    shards.unseen.add(number)
                    if at_home:
                        shards.home_unseen.add(number)
                return
            reply.body.release()
            assert isinstance(reply.message, m.ShardsOffered), reply.message
            for (shards, number), length in zip(wanted, reply.message.lengths, strict=True):
                if length == shards.lengths[number]:
                    (shards.at_home if at_home else shards.elsewhere).add(number)
                elif length:
                    shards.misfits.add(number)

        batches = [
            (member, wanted[begin : begin + BATCH_MAX])
            for member, wanted in by_member.items()
            for begin in range(0, len(wanted), BATCH_MAX)
        ]
        await run_all(ask, batches)

    async def _note_short(self, found: Iterable[Shards]) -> None:
        table = self._members.tables[0]
        short = {table.partition_of(each.known.chunk) for each in found if each.standing is Standing.SHORT}
        if short:
            await self._state.note_dirty(short, table.ring_epoch)
