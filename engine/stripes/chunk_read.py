"""`ChunkRead`: one chunk, or a range in one of its shards, while it is read: what is asked where, and what came.

    first    the wanted data shards, at their homes
    then     when one of them failed or is late: others at their homes, as many as make it, the same range of each
    then     when these are too few: every shard that is lacking, everywhere where it may lie

Shards are looked for at other places after the others were asked, because in a lake that a member has left, others make
the chunk in one more step, and a shard that moved is found in two.  One whose answer is only late is not looked for
there: where many are late the members are busy, and more requests would not make them faster.

Rules kept here:
- No I/O.  `next_asks` says what to ask; each ask is answered once, by `answered` or `failed`.  A late one counts as not
  coming, and is taken if it comes before the read has ended.
- An answer of another length, or for a range of a shard with other bytes than its checksums say, counts as failed.
- A place is asked once.
- While what came is put together in a thread (`hold` to `let_go`), it does not change: what comes in that time is
  kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.members.read_memory import Take, take_anew
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table, members_to_ask
from lakefs.content.verify import granules_around
from lakefs.errors import ChunkNotFound, CorruptionError, EngineUnreachable, LakeError
from lakefs.ids import ChunkId, MemberId


class Ask:
    """A range of a shard to be read from a member into `target`."""

    __slots__ = ("begin", "is_late", "member", "read", "shard", "target")

    def __init__(self, read: ChunkRead, member: MemberId, shard: int, begin: int, target: memoryview) -> None:
        self.read = read
        self.member = member
        self.shard = shard
        self.begin = begin
        self.target = target
        self.is_late = False


class ChunkRead:
    """A read of bytes [begin, end) of shards; with `piece` None of all data shards, the whole chunk, else of one."""

    __slots__ = (
        "_asked",
        "_came",
        "_parts",
        "_take",
        "begin",
        "chunk",
        "code",
        "crcs",
        "end",
        "errors",
        "got",
        "is_degraded",
        "is_exhausted",
        "is_held",
        "length",
        "memory",
        "pending",
        "tables",
        "wanted",
        "wants_all",
    )

    def __init__(
        self,
        code: ErasureCode,
        tables: Sequence[Table],
        chunk: ChunkId,
        length: int,
        memory: memoryview,
        piece: tuple[int, int, int] | None = None,
        take: Take = take_anew,
    ) -> None:
        """`piece`: shard, begin and end of the range in it.  `memory` is as long as the chunk, or the range.

        `take` gives memory for what has no place there.
        """
        self._take = take
        self.code = code
        self.tables = tables
        self.chunk = chunk
        self.length = length
        self.memory = memory
        data = range(code.data_shards(length))
        self.wanted: Sequence[int] = data if piece is None else (piece[0],)
        self.begin, self.end = 0, code.shard_bytes(length)
        if piece is not None:  # members answer whole granules; a short last shard ends amid one that others have
            self.begin, self.end = granules_around(piece[1], piece[2] - piece[1], self.end)
        self.got: dict[int, memoryview] = {}
        self.crcs: dict[int, bytes] = {}
        self.pending: list[Ask] = []
        self.is_held = False
        self._came: dict[int, tuple[memoryview, bytes]] = {}
        self.errors: dict[MemberId, LakeError] = {}
        """A failure of each member; that it lacks a shard only if nothing else failed."""
        self.is_degraded = False
        """True once a wanted shard has failed or is late."""
        self.wants_all = False
        self.is_exhausted = False
        """True when nothing is asked, and nothing is left to ask."""
        self._asked: set[tuple[MemberId, int]] = set()
        self._parts: list[int] = []

    @property
    def needed(self) -> int:
        """Number of shards that make any other in the range."""
        return self.code.needed(self.length, self.begin)

    @property
    def _existing(self) -> Sequence[int]:
        """The shards that have bytes in the range, ascending."""
        if not self._parts:
            self._parts = [shard for shard in self.code.shards(self.length) if self.part_bytes(shard)]
        return self._parts

    @property
    def is_whole(self) -> bool:
        """True if the whole chunk is read."""
        return len(self.memory) == self.length

    @property
    def has_wanted(self) -> bool:
        """True if all wanted data shards came: nothing has to be decoded."""
        return all(shard in self.got for shard in self.wanted)

    @property
    def is_ready(self) -> bool:
        """True if what came makes the wanted bytes, as far as their number says."""
        if self.wants_all:
            return self.is_exhausted and len(self.got) >= self.needed
        return self.has_wanted or (self.is_degraded and len(self.got) >= self.needed)

    def part_bytes(self, shard: int) -> int:
        """Return the bytes that a shard has of the range."""
        return self.code.part_bytes(self.length, shard, self.begin, self.end)

    def want_all(self) -> None:
        """Ask for every shard: those that came do not make the chunk."""
        self.wants_all = self.is_degraded = True

    def next_asks(self, is_up: Callable[[MemberId], bool]) -> list[Ask]:
        """Return what to ask now; nothing while what is asked may suffice, or when there is nothing left to ask."""
        asks: list[Ask] = []
        if not self.is_degraded:
            asks += self._at_homes(self.wanted, len(self.wanted), is_up)
            self.is_degraded = not self._coming(asks).issuperset(self.wanted)
        if self.is_degraded and (self.wants_all or not self.is_ready):
            enough = len(self._existing) if self.wants_all else self.needed
            asks += self._at_homes(self._existing, enough - len(self._coming(asks)), is_up)
            found = self._coming(asks) | {ask.shard for ask in self.pending}
            if len(found) < enough:
                asks += self._anywhere(found, is_up)
        self.pending += asks
        self.is_exhausted = not self.pending
        return asks

    def begin_with(self, member: MemberId, shard: int, part: memoryview, crcs: bytes) -> None:
        """Take what was read of a shard before this read was planned."""
        self._asked.add((member, shard))
        self.got[shard], self.crcs[shard] = part, crcs

    def answered(self, ask: Ask, part: memoryview, crcs: bytes) -> None:
        """Take the bytes that were asked for."""
        self.pending.remove(ask)
        if ask.shard not in self.got:
            self._came[ask.shard] = part, crcs
            if not self.is_held:
                self.let_go()

    def hold(self) -> None:
        """Keep what came as it is, until `let_go`; answers that are late may still be written to `memory`."""
        self.is_held = True
        if self.pending:
            self.memory = self._take(len(self.memory))

    def let_go(self) -> None:
        """Take what came during the hold."""
        self.is_held = False
        for shard, (part, crcs) in self._came.items():
            self.got[shard], self.crcs[shard] = part, crcs
        self._came.clear()

    def failed(self, ask: Ask, error: LakeError) -> None:
        """Note that a member did not give a shard."""
        self.pending.remove(ask)
        if not isinstance(error, ChunkNotFound) or ask.member not in self.errors:
            self.errors[ask.member] = error

    def unanswered(self, is_up: Callable[[MemberId], bool]) -> dict[MemberId, LakeError]:
        """Return the homes of the chunk's shards that could not be asked, and why."""
        homes = self.tables[0].homes(self.chunk)
        found: dict[MemberId, LakeError] = {}
        for shard in self._existing:
            error = self.errors.get(homes[shard])
            if error is None and not is_up(homes[shard]):
                error = EngineUnreachable(f"member {homes[shard].hex()[:12]} is away")
            if error is not None and not isinstance(error, ChunkNotFound | CorruptionError):
                found[homes[shard]] = error
        return found

    def _coming(self, asks: Sequence[Ask]) -> set[int]:
        """Return the shards that came, and those that are asked for and not late."""
        return self.got.keys() | {ask.shard for ask in (*self.pending, *asks) if not ask.is_late}

    def _at_homes(self, shards: Sequence[int], count: int, is_up: Callable[[MemberId], bool]) -> Iterator[Ask]:
        homes = self.tables[0].homes(self.chunk)
        coming = self._coming(())
        for shard in shards:
            if count <= 0:
                return
            if shard not in coming and self._is_new(homes[shard], shard, is_up):
                count -= 1
                yield self._ask(homes[shard], shard)

    def _anywhere(self, coming: set[int], is_up: Callable[[MemberId], bool]) -> Iterator[Ask]:
        for shard in self._existing:
            if shard not in coming:
                for member in members_to_ask(self.tables, self.chunk, shard):
                    if self._is_new(member, shard, is_up):
                        yield self._ask(member, shard)

    def _is_new(self, member: MemberId, shard: int, is_up: Callable[[MemberId], bool]) -> bool:
        """Return True if a place can be asked, and was not yet."""
        return (member, shard) not in self._asked and is_up(member)

    def _ask(self, member: MemberId, shard: int) -> Ask:
        self._asked.add((member, shard))
        size = self.part_bytes(shard)
        if shard not in self.wanted:
            target = self._take(size)
        elif self.is_whole:
            target = self.memory[self.code.extent(self.length, shard)[0] :][:size]
        else:
            target = self.memory
        return Ask(self, member, shard, self.begin, target)
