"""The walker: looks at one partition of a lake, and makes every stripe of it whole and at home.

Heal, return of a member, drain, rebalance, replaced devices and shards that were quarantined are this one walk: the
lists of all members that may have shards of the partition are merged and compared, chunk by chunk; what is missing is
decoded from the others, what lies elsewhere is moved.

Rules kept here:
- Before a member is listed, it has said this walk's ring epoch.  So a walk of an older table, wherever it is still
  running, can drop nothing at a home that this walk relies on, and what a writer stores by an older table is refused
  from then on.  If a member knows a newer epoch, the walk ends with StaleEpoch and is done anew.
- Asked are homes and substitutes of every table that is not retired, and the members that the caller names.
- The partition is settled only if homes and substitutes answered, but for those that are out, and every stripe was
  found or made whole.  A member that is out is asked if it answers; as a home of the newest table it is waited for.
- A chunk of which too few shards are listed is looked at once more, a while later: a writer may be storing it, or gc
  may be freeing it.
- Memory: a page for each member, a batch of `BATCH_BYTES` and what is decoded of it, and `SECOND_LOOKS_MAX` chunks.
- It holds nothing on disk.  Cancelled or killed anywhere, a walk leaves nothing that the next does not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import structlog
import trio

from engine.coordinator.lake_state import LakeState
from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.walker.walker_calls import ShardCalls
from engine.walker.walker_compare import Verdicts, compare, copies_of
from engine.walker.walker_lists import ShardList, Window, Windows
from engine.walker.walker_pace import Pace
from engine.walker.walker_repair import Repair
from engine.walker.walker_report import Left, WalkReport
from engine.walker.walker_stripe import Place, Stripe
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import NO_MEMBER, Table
from lakefs.cluster.table_format import pack
from lakefs.errors import LakeError, StaleEpoch
from lakefs.ids import ChunkId, GcGeneration, MemberId, Partition, RingEpoch, id_text
from lakefs.limits import MIB
from lakefs.ports import Offload
from lakefs.wire import messages as m

BATCH_BYTES: Final = 12 * MIB
"""Shards of one batch of stripes: what one member is asked for fits the 16 MiB of a body."""
BATCH_STRIPES: Final = 256
PAGE: Final = 4096
"""Shards of a page of a list: 1 MiB of memory."""
SECOND_LOOKS_MAX: Final = 256
"""Chunks of a partition, with too few shards, that are looked at once more."""
SECOND_LOOK_S: Final = 2.0
"""A store of one chunk takes less, and so does the sweep of one partition by all its members."""

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Walked:
    """The end of one walk."""

    epoch: RingEpoch
    report: WalkReport

    @property
    def is_settled(self) -> bool:
        """True if every stripe of the partition is whole and at home, and nothing lies elsewhere."""
        return self.report.is_healed

    @property
    def is_home(self) -> bool:
        """True if nothing lies elsewhere; some stripes may have too few shards to be made whole."""
        return self.report.is_home


class Walker:
    """Walks partitions, one at a time."""

    def __init__(
        self,
        members: Members,
        state: LakeState,
        code: ErasureCode,
        offload: Offload,
        pace: Pace,
        *,
        page: int = PAGE,
        second_look_s: float = SECOND_LOOK_S,
    ) -> None:
        self._members = members
        self._state = state
        self._code = code
        self._offload = offload
        self._pace = pace
        self._page = page
        self._second_look_s = second_look_s
        self._verdicts = Verdicts(code)
        self._said: dict[MemberId, RingEpoch] = {}
        """The ring epochs that members have said.  They only grow, durably."""
        self._packed: tuple[RingEpoch, bytes] = RingEpoch(0), b""

    async def walk_partition(
        self,
        partition: Partition,
        *,
        others: Iterable[MemberId] = (),
        out: Set[MemberId] = frozenset(),
        deep: bool = False,
    ) -> Walked:
        """Walk a partition of the newest table; `others` are asked as well, those that are `out` need not answer.

        `deep`: every chunk is read, compared with its id, and its shards with what they have to be.
        StaleEpoch when a newer table was made meanwhile, and errors of the coordinator: then walk it again.
        """
        tables = list(self._members.tables)
        walk = _Walk(self, tables, partition, deep=deep)
        await walk.run(others, out)
        return Walked(tables[0].ring_epoch, walk.report)

    async def say_epoch(self, member: MemberId, table: Table) -> None:
        """Let a member know a table, unless it has said that it does.  StaleEpoch if it knows a newer one."""
        epoch = table.ring_epoch
        if self._said.get(member, 0) < epoch:
            known = await self._set_epoch(member, m.SetEpoch(0))
            if known < epoch:
                if self._packed[0] != epoch:
                    self._packed = epoch, pack(table)
                known = await self._set_epoch(member, m.SetEpoch(epoch, self._packed[1]))
            self._said[member] = known
        if self._said[member] > epoch:
            raise StaleEpoch("a newer table was made during the walk", subject=str(self._said[member]))

    async def _set_epoch(self, member: MemberId, request: m.SetEpoch) -> RingEpoch:
        reply = await self._members.call(member, request)
        reply.body.release()
        assert isinstance(reply.message, m.EpochKnown), reply.message
        return RingEpoch(reply.message.epoch)

    async def generation(self) -> GcGeneration:
        """Return the coordinator's generation, read now; the first before there is one."""
        return GcGeneration(max(1, await self._state.generation()))


class _Walk:
    """One walk of one partition."""

    def __init__(self, walker: Walker, tables: Sequence[Table], partition: Partition, *, deep: bool) -> None:
        self.report = WalkReport(partitions=1)
        self._walker = walker
        self._tables = tables
        self._partition = partition
        self._deep = deep
        newest = tables[0]
        row = newest.rows[partition][: newest.protection.width]
        self._place = Place(tuple(newest.members[index].id for index in row), set())
        calls = ShardCalls(walker._members, newest.ring_epoch, self._place, self.report)
        self._repair = Repair(calls, self._place, walker._code, walker._offload, self.report, walker.generation)
        self._doubtful: list[ChunkId] = []

    async def run(self, others: Iterable[MemberId], out: Set[MemberId]) -> None:
        needed = set(members_of(self._tables, self._partition)) - (out - set(self._place.homes))
        asked = {*needed, *members_of(self._tables, self._partition), *others}
        await run_all(self._greet, sorted(asked))
        self.report.unanswered = {member.hex() for member in needed - self._place.answered}
        begin, end = digests_of(self._partition, self._tables[0].partition_bits)
        lists = self._lists(begin, end)
        merged = Windows(lists)
        while (window := await merged.next()) is not None:
            self._note_failed(lists)
            await self._look_at(window)
        self._note_failed(lists)
        await self._second_look()

    async def _greet(self, member: MemberId) -> None:
        """Say the epoch to a member; what fails is asked nothing more."""
        try:
            await self._walker.say_epoch(member, self._tables[0])
        except StaleEpoch:
            raise
        except LakeError as error:
            _log.debug("a member does not answer a walk", member=member.hex(), reason=error.message)
        else:
            self._place.answered.add(member)

    def _lists(self, begin: bytes, end: bytes) -> list[ShardList]:
        walker = self._walker
        return [ShardList(walker._members, member, begin, end, walker._page) for member in sorted(self._place.answered)]

    def _note_failed(self, lists: Sequence[ShardList]) -> None:
        for one in lists:
            if one.has_failed:
                self._place.answered.discard(one.member)
                self.report.unanswered.add(one.member.hex())

    async def _look_at(self, window: Window) -> None:
        """Compare a window, and work on the chunks that are not whole."""
        compared = compare(window, self._place.homes, self._place.answered, self._walker._verdicts)
        self.report.chunks += compared.chunk_count
        chunks = compared.odd
        if self._deep:
            chunks = sorted({chunk for _, columns in window for chunk in columns.chunks})
        batch: list[Stripe] = []
        size = 0
        for chunk in chunks:
            stripe = Stripe(ChunkId(chunk), copies_of(chunk, window), self._deep, self._deep)
            batch.append(stripe)
            size += sum(copy.length for copy in stripe.copies)
            if size >= BATCH_BYTES or len(batch) == BATCH_STRIPES:
                await self._work(batch)
                batch, size = [], 0
        await self._work(batch)

    async def _work(self, batch: Sequence[Stripe], *, is_last: bool = False) -> None:
        if not batch:
            return
        before = self.report.bytes_read + self.report.bytes_written
        async with self._walker._pace.paced() as spent:
            ended = await self._repair.work(batch)
            spent(self.report.bytes_read + self.report.bytes_written - before)
        for stripe, left in ended:
            if left is Left.TOO_FEW and not is_last and len(self._doubtful) < SECOND_LOOKS_MAX:
                self._doubtful.append(stripe.chunk)
                continue
            if left is Left.TOO_FEW and stripe.strays(self._place):
                left = Left.STRAY_KEPT
            if left is not None:
                self.report.leave(id_text(stripe.chunk), left)

    async def _second_look(self) -> None:
        """Look again at chunks with too few shards, after a pause."""
        if not self._doubtful:
            return
        await trio.sleep(self._walker._second_look_s)
        for chunk in self._doubtful:
            digest = chunk[1:]
            lists = self._lists(digest, _next_digest(digest))
            merged = Windows(lists)
            while (window := await merged.next()) is not None:
                self._note_failed(lists)
                if copies := copies_of(chunk, window):
                    await self._work([Stripe(chunk, copies)], is_last=True)
            self._note_failed(lists)


def members_of(tables: Iterable[Table], partition: Partition) -> list[MemberId]:
    """Return homes and substitutes of a partition, numbered as in the first table, by all tables."""
    found: dict[MemberId, None] = {}
    bits = None
    for table in tables:
        bits = table.partition_bits if bits is None else bits
        row = table.rows[partition >> bits - table.partition_bits]
        found.update((table.members[index].id, None) for index in row if index != NO_MEMBER)
    return list(found)


def digests_of(partition: Partition, partition_bits: int) -> tuple[bytes, bytes]:
    """Return where the digests of a partition begin and end, as `ListShards` takes them."""
    shift = 16 - partition_bits
    end = partition + 1 << shift
    return (partition << shift).to_bytes(2, "big"), end.to_bytes(2, "big") if end < 1 << 16 else b""


def _next_digest(digest: bytes) -> bytes:
    number = int.from_bytes(digest, "big") + 1
    return number.to_bytes(len(digest), "big") if number < 1 << 8 * len(digest) else b""
