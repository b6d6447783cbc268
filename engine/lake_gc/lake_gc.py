"""Garbage collection over a lake: one cycle frees at the members what no name refers to.

    lock          one cycle at a time (`lake_gc_lock`)
    generation    G becomes g, with the tables of that moment (`LakeState.begin_gc`): they say who may free what
    join          the names of each shard join g, durably: they bind nothing on answers below g - 1 any more
    begin         members remember what they have (`GcBegin`); those that are away are left out, and free nothing
    walk          every blob that a name, a part of an upload or a lease refers to, and what is below its manifest, is
                  marked at the members that may free it (`engine.upkeep.roots`, `lake_gc_manifests`, `lake_gc_marks`);
                  one shard behind the other, each until what its walk saw is durable: a name whose removal it saw
                  does not come back
    sweep         members that have all marks free the rest, born before they began, and not touched since g - 1
    damaged       damaged shards elsewhere, of chunks that were not marked, are dropped (`lake_gc_damaged`)

Rules kept here:
- The walk begins when names have joined and members have begun, and ends before any of them sweeps.
- Nothing is swept behind an error of the walk: it may have hidden content that is referred to.
- Each names shard joins and is walked, or nothing is swept; why that suffices: `names_port`.  Their number is read when
  the generation is made: a shard that is added later begins with it.
- Names that do not lead any more join no generation, and their walk ends with the first read (CoordinatorLost); what it
  saw is durable before the sweep, so the next leader has it too.
- A walk has an id of its own and is never continued.  When this process dies, or names start again, the next cycle
  begins from the start: members take its generation, which is later, and forget the walk before.

Memory: see the modules of the parts.  It runs in the process of the names; what it waits for is mostly members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.held_lease import HeldLease
from engine.coordinator.lake_state import LakeState
from engine.format.group_parts import FIRST_SHARD
from engine.host.failpoints import reached
from engine.host.tasks import run_all
from engine.lake_gc.lake_gc_damaged import DamagedShards
from engine.lake_gc.lake_gc_homes import CycleHomes
from engine.lake_gc.lake_gc_lock import hold_gc_lock
from engine.lake_gc.lake_gc_manifests import ManifestWalk
from engine.lake_gc.lake_gc_marks import Marks, MemberMarks, open_marks
from engine.lake_gc.names_in_process import NamesInProcess
from engine.lake_gc.names_port import OtherNames, ShardNames, no_other_names
from engine.members.ports import Members, Stripes
from engine.metadata.pacing import Pacing
from engine.upkeep.roots import Owner, Root
from lakefs.cluster.table_format import unpack
from lakefs.errors import EngineBusy, LakeError
from lakefs.ids import EMPTY_CHUNK, ChunkId, ChunkKind, GcGeneration, NamesShard, chunk_of, kind_of
from lakefs.ports import Clock
from lakefs.wire import messages as m

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MemberReport:
    """One member's part in a cycle.  `kept_because`: the reason why it freed nothing; empty if it swept."""

    member: str
    marked_chunks: int
    freed_shards: int = 0
    freed_bytes: int = 0
    kept_because: str = ""


@dataclass
class LakeGcReport:
    """The result of one cycle.  `marked_chunks` counts a chunk again where several blobs have it."""

    generation: int
    expired_uploads: int = 0
    marked_blobs: int = 0
    marked_chunks: int = 0
    manifests: int = 0
    freed_shards: int = 0
    freed_bytes: int = 0
    freed_damaged: int = 0
    """Damaged shards that were dropped where no home is."""
    members: list[MemberReport] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report, JSON-able."""
        return asdict(self)


class LakeGc:
    """Gc of one lake, in the process of its names.  Used on the loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Members,
        stripes: Stripes,
        names: NamesInProcess,
        clock: Clock,
        others: OtherNames = no_other_names,
    ) -> None:
        """`names`: those of names shard 0; `others` has the ones of all further shards."""
        self._coordinator = coordinator
        self._members = members
        self._stripes = stripes
        self._names = names
        self._others = others
        self._clock = clock
        self._lock = trio.Lock()
        self.last: LakeGcReport | None = None
        """The last cycle of this process that ended well, since it began."""
        self.last_ended_ns = 0

    @property
    def running(self) -> bool:
        """True while a cycle is under way in this process."""
        return self._lock.locked()

    async def run(self) -> LakeGcReport:
        """Run one cycle; a second caller waits first.  What it freed is durable on return.

        EngineBusy while another process collects; EngineUnreachable without the coordinator; PreconditionFailed while
        the lake has no table; StoreReadOnly, IndexDamaged; those of `ShardNames`; ChunkNotFound, ChunkDamaged,
        ClusterDegraded, naming an object, when its manifest cannot be read.  With each of these, and when cancelled
        before the sweep, nothing was freed; when cancelled during it, members may go on with it.
        """
        async with self._lock, hold_gc_lock(self._coordinator, self._clock) as lease:
            state = LakeState(self._coordinator)
            generation, packed = await state.begin_gc()
            asked = [record.member for record in await state.members()]
            homes = CycleHomes([unpack(table) for table in packed.values()])
            shards = [self._names_of(shard) for shard in range(await state.names_shards())]  # behind the generation
            report = LakeGcReport(generation)
            await self._join(shards, generation, report)
            reached("lake-gc.joined")
            async with open_marks(self._members, generation, homes) as marks:
                damaged = DamagedShards(self._members, generation, homes)
                await damaged.find([member for member in asked if self._members.is_up(member)])
                await self._walk(shards, marks, damaged, lease, report)
                reached("lake-gc.marked")
                await self._names.sync()  # a process that is known to lead no more sweeps nothing
                _check_held(lease)
                if marks.receivers:  # else the walk was not made
                    report.freed_damaged = await damaged.drop()
                report.members = await self._sweep(marks, homes)
        report.freed_shards = sum(member.freed_shards for member in report.members)
        report.freed_bytes = sum(member.freed_bytes for member in report.members)
        self.last, self.last_ended_ns = report, self._clock.wall_ns()
        return report

    async def run_periodically(self, interval_s: float) -> None:
        """Run a cycle every `interval_s` seconds, until cancelled; logs a failing one and tries again at the next."""
        while True:
            await trio.sleep(interval_s)
            try:
                report = await self.run()
            except LakeError as error:
                _log.error("garbage collection over the lake failed", error=error.message)
                continue
            kept = {member.member: member.kept_because for member in report.members if member.kept_because}
            _log.info(
                "garbage collected over the lake",
                generation=report.generation,
                shards=report.freed_shards,
                freed_bytes=report.freed_bytes,
                expired_uploads=report.expired_uploads,
                kept=kept,
            )

    def _names_of(self, shard: int) -> ShardNames:
        return self._names if shard == FIRST_SHARD else self._others(NamesShard(shard))

    async def _join(self, shards: Sequence[ShardNames], generation: GcGeneration, report: LakeGcReport) -> None:
        """Let all names join a generation; returns when each of them has."""

        async def join(names: ShardNames) -> None:
            expired = await names.join(generation)
            report.expired_uploads += expired

        await run_all(join, shards)

    async def _walk(
        self, shards: Sequence[ShardNames], marks: Marks, damaged: DamagedShards, lease: HeldLease, report: LakeGcReport
    ) -> None:
        """Mark what is referred to; returns when the members that are left have all marks."""
        manifests, pacing = ManifestWalk(self._stripes), self._names.pacing()
        for names in shards:
            await names.walk(_Walk(names, marks, damaged, manifests, pacing, lease, report).visit, pacing)
        await marks.finish()

    async def _sweep(self, marks: Marks, homes: CycleHomes) -> list[MemberReport]:
        reports = {
            each.member: _report_of(each, kept_because=each.left_out_because) for each in marks.of_members.values()
        }

        async def sweep(receiver: MemberMarks) -> None:
            request = m.GcSweep(marks.walk, receiver.batches, homes.partitions_of(receiver.member))
            try:
                reply = await self._members.call(receiver.member, request)
            except LakeError as error:
                reports[receiver.member] = _report_of(receiver, kept_because=f"it did not sweep: {error.message}")
                return
            reply.body.release()
            swept = reply.message
            assert isinstance(swept, m.ShardsSwept)
            reports[receiver.member] = _report_of(
                receiver, swept.freed_shards, swept.freed_bytes, kept_because=swept.kept_because
            )

        async with trio.open_nursery() as nursery:
            for receiver in marks.receivers:
                nursery.start_soon(partial(sweep, receiver))
        return list(reports.values())


class _Walk:
    """Marks the roots that the walk through one shard meets, with what is below them."""

    def __init__(
        self,
        names: ShardNames,
        marks: Marks,
        damaged: DamagedShards,
        manifests: ManifestWalk,
        pacing: Pacing,
        lease: HeldLease,
        report: LakeGcReport,
    ) -> None:
        self._names = names
        self._marks = marks
        self._damaged = damaged
        self._manifests = manifests
        self._pacing = pacing
        self._lease = lease
        self._report = report

    async def visit(self, roots: Sequence[Root]) -> None:
        """Mark some roots.  Nothing is left to do once no member will sweep."""
        _check_held(self._lease)
        if not self._marks.receivers:
            return
        tops: list[tuple[ChunkId, Owner]] = []
        for blob, owner in roots:
            chunk = chunk_of(blob)
            if chunk == EMPTY_CHUNK:
                continue
            if kind_of(chunk) is ChunkKind.DATA:
                self._mark(chunk)
            elif self._manifests.is_new(chunk):
                self._mark(chunk)
                tops.append((chunk, owner))
        self._report.marked_blobs += len(roots)
        self._report.marked_chunks += len(roots)
        await self._marks.flush()
        if tops:
            await self._manifests.below(tops, self._visit_children, self._names.name_of)
            self._report.manifests = self._manifests.read_count

    def _mark(self, chunk: ChunkId) -> None:
        self._marks.add(chunk)
        self._damaged.met(chunk)

    async def _visit_children(self, chunks: list[ChunkId]) -> None:
        for chunk in chunks:
            self._mark(chunk)
        self._report.marked_chunks += len(chunks)
        await self._marks.flush()
        await self._pacing.rest()


def _check_held(lease: HeldLease) -> None:
    """Raise EngineBusy once another process may have begun the next cycle."""
    if not lease.left_s():  # by the clock: a process that was stopped may go on here before the lease's own task
        raise EngineBusy("the lock of this cycle of gc ended: the coordinator could not be asked; nothing was freed")


def _report_of(marks: MemberMarks, freed_shards: int = 0, freed_bytes: int = 0, *, kept_because: str) -> MemberReport:
    return MemberReport(marks.member.hex(), marks.chunks, freed_shards, freed_bytes, kept_because)
