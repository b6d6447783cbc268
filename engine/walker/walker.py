"""The walker: looks at partitions of a lake, and makes every stripe of them whole and at home.

Heal, return of a member, drain, rebalance, replaced devices and shards that were quarantined are this one walk: the
lists of all members that may have shards of the partitions are merged and compared, chunk by chunk; what is missing is
decoded from the others, what lies elsewhere is moved.

Partitions that are walked together are one list of each member: so empty ones cost nothing, and those with a few
chunks share pages.  Their stripes that are not whole are repaired in common batches, so each member is asked once for
what it has of many.

Rules kept here:
- Before a member is listed, it has said this walk's ring epoch.  So a walk of an older table, wherever it is still
  running, can drop nothing at a home that this walk relies on, and what a writer stores by an older table is refused
  from then on.  If a member knows a newer epoch, the walk ends with StaleEpoch and is done anew.
- Asked are homes and substitutes of every table that is not retired, and the members that the caller names.
- A partition is settled only if homes and substitutes answered, but for those that are out, and every stripe was
  found or made whole.  A member that is out is asked if it answers; as a home of the newest table it is waited for.
- A member that answered and then failed leaves all partitions of the walk unsettled: its list is not known to be whole.
- A chunk of which too few shards are listed is looked at once more, a while later: a writer may be storing it, or gc
  may be freeing it.
- Memory: a page for each member (`LISTED_MAX` shards in all), a batch of `BATCH_BYTES` and what is decoded of it, and
  `SECOND_LOOKS_MAX` chunks.
- It holds nothing on disk.  Cancelled or killed anywhere, a walk leaves nothing that the next does not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog
import trio

from engine.coordinator.lake_state import LakeState
from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.members.read_memory import Take, take_anew
from engine.walker.walker_calls import ShardCalls
from engine.walker.walker_compare import Verdicts, compare, copies_of, damaged_of
from engine.walker.walker_lists import ShardList, Window, Windows, by_partition
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

BATCH_BYTES: Final = 32 * MIB
"""Shards of one batch of stripes: at 4+2 and 4 MiB 7 of which one shard is lost."""
BATCH_STRIPES: Final = 256
PAGE: Final = 4096
"""Shards of a page of a list: 1 MiB of memory."""
LISTED_MAX: Final = 128 * PAGE
"""Shards of the pages of all members that are asked at once: 128 MiB; if more members are, pages are shorter."""
SECOND_LOOKS_MAX: Final = 256
"""Chunks of a walk, with too few shards, that are looked at once more."""
SECOND_LOOK_S: Final = 2.0
"""A store of one chunk takes less, and so does the sweep of one partition by all its members."""

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Walked:
    """The end of one walk: a report of each partition."""

    epoch: RingEpoch
    reports: Mapping[Partition, WalkReport]

    def is_settled(self, partition: Partition) -> bool:
        """Return True if every stripe of a partition is whole and at home, and nothing lies elsewhere."""
        return self.reports[partition].is_healed

    def is_home(self, partition: Partition) -> bool:
        """Return True if nothing of a partition lies elsewhere; stripes may have too few shards to be made whole."""
        return self.reports[partition].is_home


class Walker:
    """Walks partitions, for one task at a time."""

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
        take: Take = take_anew,
    ) -> None:
        """`take`: memory for the shards that are read."""
        self._members = members
        self._take = take
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

    async def walk(
        self,
        partitions: Sequence[Partition],
        *,
        others: Iterable[MemberId] = (),
        out: Set[MemberId] = frozenset(),
        deep: bool = False,
    ) -> Walked:
        """Walk partitions of the newest table, which ascend; `others` are asked as well, those `out` need not answer.

        Members list all from the first partition to the last: what is between them is read, and not looked at.
        `deep`: every chunk is read, compared with its id, and its shards with what they have to be.
        StaleEpoch when a newer table was made meanwhile, and errors of the coordinator: then walk them again.
        """
        tables = list(self._members.tables)
        walk = _Walk(self, tables, partitions, deep=deep)
        if partitions:
            await walk.run(others, out)
        return Walked(tables[0].ring_epoch, walk.reports)

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


class _Part(NamedTuple):
    """One partition of a walk, in which there are shards."""

    place: Place
    report: WalkReport


class _Walk:
    """One walk of some partitions."""

    def __init__(self, walker: Walker, tables: Sequence[Table], partitions: Sequence[Partition], *, deep: bool) -> None:
        self.walker: Final = walker
        self.tables: Final = tables
        self.reports: Final = {partition: WalkReport(partitions=1) for partition in partitions}
        self.answered: Final[set[MemberId]] = set()
        """Members that were asked, and have answered everything so far."""
        self._deep = deep
        calls = ShardCalls(walker._members, tables[0].ring_epoch, self.answered, walker._take)
        self._repair: Final = Repair(calls, walker._code, walker._offload, walker.generation)
        self._walked: dict[Partition, _Part] = {}
        self._batch: list[Stripe] = []
        """Stripes that wait for others, to be worked on together."""
        self._batch_bytes = 0
        self._doubtful: list[Stripe] = []

    async def run(self, others: Iterable[MemberId], out: Set[MemberId]) -> None:
        rows = {partition: members_of(self.tables, partition) for partition in self.reports}
        await run_all(self._greet, sorted({*others}.union(*rows.values())))
        greeted = frozenset(self.answered)
        partitions, bits = list(rows), self.tables[0].partition_bits
        lists = self._lists(digests_of(partitions[0], bits)[0], digests_of(partitions[-1], bits)[1])
        merged = Windows(lists)
        while (window := await merged.next()) is not None:
            self._note_failed(lists)
            for partition, part in by_partition(window, bits):
                if partition in self.reports:
                    await self._look_at(self._part(partition), part)
        self._note_failed(lists)
        await self._work()
        await self._second_look()
        failed = greeted - self.answered
        for partition, row in rows.items():
            needed = set(row) - (out - set(homes_of(self.tables[0], partition)))
            self.reports[partition].unanswered = {member.hex() for member in failed | (needed - greeted)}

    def _part(self, partition: Partition) -> _Part:
        part = self._walked.get(partition)
        if part is None:
            place = Place(homes_of(self.tables[0], partition), self.answered)
            part = self._walked[partition] = _Part(place, self.reports[partition])
        return part

    async def _greet(self, member: MemberId) -> None:
        """Say the epoch to a member; what fails is asked nothing more."""
        try:
            await self.walker.say_epoch(member, self.tables[0])
        except StaleEpoch:
            raise
        except LakeError as error:
            _log.debug("a member does not answer a walk", member=member.hex(), reason=error.message)
        else:
            self.answered.add(member)

    def _lists(self, begin: bytes, end: bytes) -> list[ShardList]:
        page = max(1, min(self.walker._page, LISTED_MAX // max(1, len(self.answered))))
        members = self.walker._members
        return [ShardList(members, member, begin, end, page) for member in sorted(self.answered)]

    def _note_failed(self, lists: Sequence[ShardList]) -> None:
        self.answered.difference_update([one.member for one in lists if one.has_failed])

    async def _look_at(self, part: _Part, window: Window) -> None:
        """Compare a window of one partition, and work on the chunks that are not whole."""
        compared = compare(window, part.place.homes, self.answered, self.walker._verdicts)
        part.report.chunks += compared.chunk_count
        chunks = compared.odd
        if self._deep:
            chunks = sorted({chunk for _, columns in window for chunk in columns.chunks})
        for chunk in chunks:
            stripe = _stripe_of(ChunkId(chunk), part, window)
            stripe.must_check = stripe.read_all = self._deep
            self._batch.append(stripe)
            self._batch_bytes += sum(copy.length for copy in stripe.copies)
            if self._batch_bytes >= BATCH_BYTES or len(self._batch) == BATCH_STRIPES:
                await self._work()

    async def _work(self, *, is_last: bool = False) -> None:
        """Work on the stripes that wait."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if not batch:
            return
        reports = {id(stripe.report): stripe.report for stripe in batch}.values()
        before = sum(report.bytes_read + report.bytes_written for report in reports)
        async with self.walker._pace.paced() as spent:
            ended = await self._repair.work(batch)
            spent(sum(report.bytes_read + report.bytes_written for report in reports) - before)
        for stripe, left in ended:
            report = stripe.report
            if left is Left.TOO_FEW and not is_last and len(self._doubtful) < SECOND_LOOKS_MAX:
                self._doubtful.append(stripe)
                continue
            if left is Left.TOO_FEW and stripe.strays():
                left = Left.STRAY_KEPT
            report.damaged_elsewhere += len(stripe.damaged_strays())
            if left is not None:
                report.leave(id_text(stripe.chunk), left)

    async def _second_look(self) -> None:
        """Look again at chunks with too few shards, after a pause."""
        if not self._doubtful:
            return
        await trio.sleep(self.walker._second_look_s)
        for doubtful in self._doubtful:
            digest = doubtful.chunk[1:]
            lists = self._lists(digest, _next_digest(digest))
            merged = Windows(lists)
            while (window := await merged.next()) is not None:
                self._note_failed(lists)
                part = _Part(doubtful.place, doubtful.report)
                stripe = _stripe_of(doubtful.chunk, part, window)
                if stripe.copies or stripe.damaged:
                    self._batch.append(stripe)
                    await self._work(is_last=True)
            self._note_failed(lists)


def _stripe_of(chunk: ChunkId, part: _Part, window: Window) -> Stripe:
    return Stripe(chunk, part.place, part.report, copies_of(chunk, window), damaged=damaged_of(chunk, window))


def homes_of(table: Table, partition: Partition) -> tuple[MemberId, ...]:
    """Return the home of each shard number in a partition; a member may be home of several."""
    return tuple([table.members[index].id for index in table.rows[partition][: table.protection.width]])


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
