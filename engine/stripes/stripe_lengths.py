"""Lengths of chunks that are read by their ids alone: members say them in their answers to ReadChunks.

    first    shard 0 is read at its home, the range that is wanted, and its answer says the chunk's length: a short
             chunk is all read then, of others the first part.  For a range another member is asked for the length too
    said     only where that leads to nothing: every place where a shard may lie is asked for the length

A length is asked for by a range behind the end of every shard: that fails, nothing is read, and the answer has it.

Rules kept here:
- One member's word is used only for a chunk that is read whole, which BLAKE3 checks.  For a range, and for a length
  alone, a second member has to say the same; without parity no other could.
- Readers pass over members that say another length than the one that they read by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from engine.host.tasks import run_all
from engine.members.ports import Members, Wanted
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.request_parts import request_parts
from engine.stripes.said_lengths import lengths_said
from engine.stripes.stripe_reader import FirstPart
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import members_to_ask
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, MemberId
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES
from lakefs.wire import messages as m

BEHIND_ALL: Final = (CHUNK_BYTES, 1)
"""Offset and length of a range that no shard has."""


class Ask(NamedTuple):
    """A range of a shard at a member."""

    member: MemberId
    chunk: ChunkId
    shard: int
    offset: int
    length: int


class Seen(NamedTuple):
    """An answer: the chunk's length as the member says it, and what was read."""

    chunk_bytes: int
    part: FirstPart


class First(NamedTuple):
    """The length of a chunk, 0 if it is not sure; and what was read of it on the way."""

    length: int
    part: FirstPart | None = None


class Said(NamedTuple):
    """Lengths that members say of a chunk, the likeliest first; `agreed`: the only one, if two members say it, else 0.

    `away`: homes that could not be asked, each as often as it is a home.
    """

    lengths: Sequence[int]
    agreed: int
    away: Sequence[MemberId]


class StripeLengths:
    """Asks for lengths."""

    def __init__(self, members: Members, code: ErasureCode, known: KnownChunks) -> None:
        self._members = members
        self._code = code
        self._known = known

    async def first(self, wanted: Sequence[Wanted]) -> list[First]:
        """Read the first part of each range, and return what was learnt."""
        asks = [ask for want in wanted if self._known.get(want.chunk) is None for ask in self._first_asks(want)]
        seen = (await self._ask(asks))[0] if asks else {}
        return [self._first_of(want, seen) for want in wanted]

    def _first_asks(self, want: Wanted) -> Iterator[Ask]:
        homes = self._members.tables[0].homes(want.chunk)
        yield Ask(homes[0], want.chunk, 0, want.offset, want.length)
        other = self._other(homes)
        if other and (want.offset or want.length):
            yield Ask(homes[other], want.chunk, other, *BEHIND_ALL)

    def _other(self, homes: Sequence[MemberId]) -> int:
        """Return a parity shard, which every chunk has, of another home than shard 0's; 0 if there is none."""
        return next((shard for shard in range(self._code.data, len(homes)) if homes[shard] != homes[0]), 0)

    def _first_of(self, want: Wanted, seen: dict[Ask, Seen]) -> First:
        known = self._known.get(want.chunk)
        if known is not None:
            return First(known.length)
        answer, *others = [seen.get(ask) for ask in self._first_asks(want)]
        if answer is None:
            return First(0)
        is_whole = not (want.offset or want.length) or len(answer.part.payload) == answer.chunk_bytes
        says_another_too = any(other is not None and other.chunk_bytes == answer.chunk_bytes for other in others)
        if is_whole or says_another_too or self._code.parity == 0:
            return First(answer.chunk_bytes, answer.part)
        return First(0)

    async def said(self, chunks: Sequence[ChunkId]) -> list[Said]:
        """Ask everywhere for the lengths of chunks."""
        asks = {chunk: [*self._all_asks(chunk)] for chunk in chunks}
        seen, answered = await self._ask(ask for of_chunk in asks.values() for ask in of_chunk)
        found: list[Said] = []
        for chunk in chunks:
            said = [ask for ask in asks[chunk] if ask in seen]
            lengths = lengths_said(seen[ask].chunk_bytes for ask in said)
            is_agreed = len(lengths) == 1 and len({ask.member for ask in said}) > 1
            away = [home for home in self._members.tables[0].homes(chunk) if home not in answered]
            found.append(Said(lengths, lengths[0] if is_agreed else 0, away))
        return found

    def _all_asks(self, chunk: ChunkId) -> Iterator[Ask]:
        for shard in range(self._code.data + self._code.parity):
            for member in members_to_ask(self._members.tables, chunk, shard):
                yield Ask(member, chunk, shard, *BEHIND_ALL)

    async def _ask(self, asks: Iterable[Ask]) -> tuple[dict[Ask, Seen], set[MemberId]]:
        """Return the answers of members that have the shard, and the members that have answered."""
        by_member: defaultdict[MemberId, list[Ask]] = defaultdict(list)
        for ask in dict.fromkeys(asks):
            if self._members.is_up(ask.member):
                by_member[ask.member].append(ask)
        seen: dict[Ask, Seen] = {}
        answered: set[MemberId] = set()

        async def send(part: list[Ask]) -> None:
            request = m.ReadChunks(
                [ask.chunk for ask in part],
                [ask.offset for ask in part],
                [ask.length for ask in part],
                [ask.shard for ask in part],
            )
            try:
                reply = await self._members.call(part[0].member, request)
            except LakeError:
                return
            answered.add(part[0].member)
            try:
                assert isinstance(reply.message, m.ReadChunksReply), "the answer to ReadChunks"
                seen.update(_taken(part, reply.message, memoryview(reply.body.joined())))
            finally:
                reply.body.release()

        await run_all(send, [part for of in by_member.values() for part in request_parts(of, self._bytes_of)])
        return seen, answered

    def _bytes_of(self, ask: Ask) -> int:
        """Return the most bytes that an answer may have."""
        most = self._code.shard_bytes(CHUNK_BYTES)
        if ask.offset >= most:
            return 0
        return min(most, ask.length + 2 * GRANULE_BYTES) if ask.length else most


def _taken(asks: Sequence[Ask], message: m.ReadChunksReply, body: memoryview) -> Iterator[tuple[Ask, Seen]]:
    """Yield what is in a member's answer; nothing of one that is not the answer to these."""
    if not len(message.pieces) == len(message.chunk_lengths) == len(asks):
        return
    at = 0
    for ask, piece, chunk_bytes in zip(asks, message.pieces, message.chunk_lengths, strict=True):
        payload = body[at : at + piece.length]
        at += piece.length
        if 0 < chunk_bytes <= CHUNK_BYTES:
            yield ask, Seen(chunk_bytes, FirstPart(ask.member, piece.offset, payload, piece.crcs))
