"""One chunk that the walker works on: where its shards lie, and what is to be done next.  Pure.

    Move      copies lie elsewhere than at their homes, which lack them: copy them home, nothing is decoded
    Check     shards are missing, disagree, or may be: read some, compare the chunk with its id, store what lacks
    Finished  all is at home, or the reason why it is not

Rules kept here:
- A shard of a home that has not answered is not known: it is neither missing nor made.
- Copies of one shard that differ are checked before anything is moved or dropped.
- Where copies say different lengths of the chunk, or are not as long as that demands, all are read: the chunk's hash
  decides, and those that say another length are wrong, whatever their bytes.
- Of shards that no chunk has nothing is guessed.
- A damaged shard is absent: it is never read, and does not count as a copy anywhere.  At its home it makes room for a
  new one; elsewhere it is dropped once all shards of the chunk are at their homes, and until then it is only known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.stripes.said_lengths import lengths_said
from engine.walker.walker_compare import Copy, Damaged, is_whole, signature_of
from engine.walker.walker_report import Left, WalkReport
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import ChunkId, MemberId

ROUNDS_MAX: Final = 8
"""Steps on one chunk.  A move, two checks and a change by others between each of them are 6."""


@dataclass
class Place:
    """The row that a partition is walked by.  `answered` loses members that fail during the walk."""

    homes: tuple[MemberId, ...]
    answered: set[MemberId]

    @property
    def is_all_known(self) -> bool:
        """True if all homes have answered."""
        return self.answered.issuperset(self.homes)


@dataclass
class Stripe:
    """The listed shards of a chunk, as they are after what was done so far.  `report` is that of its partition."""

    chunk: ChunkId
    place: Place
    report: WalkReport
    copies: list[Copy]
    must_check: bool = False
    read_all: bool = False
    """Read every copy: the chunk was not found from as few as it needs, or the walk is deep."""
    length: int = 0
    """The chunk's length, once its hash proved it."""
    blocked: dict[int, Left] = field(default_factory=dict)
    """Numbers of shards that their homes do not take, and why."""
    rounds: int = 0
    damaged: list[Damaged] = field(default_factory=list)
    """Shards that their members have, and know to be damaged."""

    def at_home(self, number: int) -> Copy | None:
        """Return the copy of a shard at its home."""
        home = self.place.homes[number]
        return next((copy for copy in self.copies if (copy.shard, copy.member) == (number, home)), None)

    def strays(self) -> list[Copy]:
        """Return the copies elsewhere."""
        return [copy for copy in self.copies if self.place.homes[copy.shard] != copy.member]

    def damaged_strays(self) -> list[Damaged]:
        """Return the damaged shards elsewhere, and those that no chunk has."""
        homes = dict(enumerate(self.place.homes))
        return [one for one in self.damaged if homes.get(one.shard) != one.member]

    def lacks(self, number: int) -> bool:
        """Return True if a home has answered, has not this shard, and was not found to refuse it."""
        is_asked = self.place.homes[number] in self.place.answered and number not in self.blocked
        return is_asked and self.at_home(number) is None

    def forget(self, member: MemberId, shard: int) -> None:
        """Take a shard off the lists: it was dropped, or is another one now."""
        self.copies = [copy for copy in self.copies if (copy.member, copy.shard) != (member, shard)]
        self.damaged = [one for one in self.damaged if one != (member, shard)]

    def spoil(self, member: MemberId, shard: int) -> None:
        """Note that a copy cannot be read."""
        self.forget(member, shard)
        self.damaged.append(Damaged(member, shard))

    def stored(self, number: int, length: int, chunk_bytes: int) -> None:
        """Note that a shard's home has it now."""
        self.forget(self.place.homes[number], number)
        self.copies.append(Copy(self.place.homes[number], number, length, chunk_bytes, None))

    def differs(self, code: ErasureCode, length: int) -> bool:
        """Return True if two copies of a shard have other bytes, by their checksums, or one is not of that length."""
        sizes = code.sizes(length)
        if any((copy.length, copy.chunk_bytes) != (sizes.get(copy.shard), length) for copy in self.copies):
            return True
        crcs: dict[int, int] = {}
        return any(crcs.setdefault(copy.shard, copy.crc) != copy.crc for copy in self.copies if copy.crc is not None)


@dataclass(frozen=True)
class Move:
    """Copy these home."""

    reads: Sequence[Copy]


@dataclass(frozen=True)
class Check:
    """Read these, and compare the chunk with its id."""

    reads: Sequence[Copy]


@dataclass(frozen=True)
class Finished:
    """Nothing more is to be done, but to drop strays whose homes have a copy.  `left`: why it is not whole."""

    left: Left | None = None


def next_step(stripe: Stripe, code: ErasureCode) -> Move | Check | Finished:
    """Return the next step on a chunk."""
    place = stripe.place
    usable = [copy for copy in stripe.copies if copy.member in place.answered]
    if not usable:
        return Finished(Left.TOO_FEW if place.is_all_known else Left.AWAY)
    lengths = [stripe.length] if stripe.length else lengths_said(copy.chunk_bytes for copy in stripe.copies)
    if not lengths or any(copy.shard >= len(place.homes) for copy in stripe.copies):
        return Finished(Left.NO_CHUNK)
    if stripe.rounds > ROUNDS_MAX:
        return Finished(Left.CHANGING)
    if not stripe.length and stripe.differs(code, lengths[0]):
        stripe.must_check = stripe.read_all = True
    if not stripe.must_check:
        movable = {copy.shard: copy for copy in usable if stripe.lacks(copy.shard)}
        if movable:
            return Move(list(movable.values()))
        unknown = {n for n, home in enumerate(place.homes) if home not in place.answered or n in stripe.blocked}
        if is_whole(code, signature_of(stripe.copies, place.homes, unknown)):
            return Finished(next(iter(stripe.blocked.values()), None))
    return _check(stripe, usable, min(map(code.data_shards, lengths)))


def _check(stripe: Stripe, usable: Sequence[Copy], needed: int) -> Check | Finished:
    distinct = {copy.shard: copy for copy in sorted(usable, reverse=True)}
    if len(distinct) < needed:
        is_all = stripe.place.is_all_known and len(usable) == len(stripe.copies)
        return Finished(Left.TOO_FEW if is_all else Left.AWAY)
    if stripe.read_all:
        return Check(usable)
    return Check([distinct[number] for number in sorted(distinct)[:needed]])
