"""The walker's order of work, kept going by the one process of a lake that walks.

In this order, some partitions at a time (`engine.walker.dirty_queue`):
1. dirty partitions of which a stripe may be short;
2. dirty partitions of which shards have to be moved: rows that a newer table changed, members that returned;
3. all partitions, once in `full_pass_s`, from where the last process stopped.

Rules kept here:
- One process walks: the one that put its name under a key with a lease.  When the lease may have ended, it stops.  Two
  that walk at once for a moment do no harm (`engine.walker.walker`), they only work twice.
- A note is read before the walk, and cleared only at the revision that was read, and only if the walk settled the
  partition by a table at least as new as the note.
- A partition that a walk leaves unsettled stays dirty, or is noted as dirty; it is walked again after `retry_s`, or
  soon after a member that did not answer is up again.  If it has too few shards of some stripe, and each is at its
  home, the note says so: no older table is needed for them.
- So *healed* is: nothing is dirty, one table is left, and a walk through all partitions has ended.
- The position of that walk is recorded every `SAVE_INTERVAL_S`; partitions walked since are walked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.held_lease import hold_lease
from engine.coordinator.lake_state import Dirty, LakeState
from engine.coordinator.records import MemberState, WalkRecord
from engine.host.tasks import plain_errors
from engine.members.ports import Members
from engine.walker.dirty_queue import DirtyQueue, Width
from engine.walker.walker import Walked, Walker
from engine.walker.walker_report import WalkReport
from lakefs.cluster.table import Table
from lakefs.errors import LakeError, StaleEpoch
from lakefs.ids import MemberId, Partition, RingEpoch
from lakefs.limits import PARTITION_BITS, PARTITION_BITS_MANY
from lakefs.ports import Clock

SAVE_INTERVAL_S: Final = 10.0
AWAITED_INTERVAL_S: Final = 0.5
"""While nothing is to be done, members for which partitions wait are looked at that often; no request is sent."""
LOOK_INTERVAL_S: Final = 5.0
"""Dirty partitions and members are read anew that often; a read of 4,096 notes is 5 pages."""
MANY_DIRTY: Final = 256
"""So many partitions are counted as the walker knows them: to read all 4,096 for each status takes 25 ms of CPU."""
OTHERS_MAX: Final = 128
"""Members of a lake up to which a walk asks all that are up, so that what a returned member has is found wherever it
is.  They are a request each for all partitions that are walked at once."""

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PassSettings:
    """Times in seconds."""

    full_pass_s: float = 7 * 86_400.0
    retry_s: float = 60.0
    idle_s: float = 5.0
    lease_s: int = 15


class WalkerPass:
    """The walker of one process.  Used by one task."""

    def __init__(
        self,
        walker: Walker,
        members: Members,
        state: LakeState,
        clock: Clock,
        process: bytes,
        settings: PassSettings | None = None,
    ) -> None:
        """`process` names this process among all that may walk."""
        self.totals = WalkReport()
        """Sums since this process began to walk."""
        self._settings = settings or PassSettings()
        self._walker = walker
        self._members = members
        self._state = state
        self._clock = clock
        self._process = process
        self._walk = WalkRecord()
        self._saved_at = self._looked_at = -1e9
        self._dirty = DirtyQueue(self._settings.retry_s)
        self._width_dirty, self._width_all = Width(), Width()
        self._others: list[MemberId] = []
        self._out: set[MemberId] = set()
        """Out or removed: nobody waits for them."""
        self._since: tuple[float, int] | None = None
        """Time and partition at which this process went on with the full walk; for the ETA."""

    # --- running -------------------------------------------------------------------------------------

    async def run(self, coordinator: Coordinator, beside: Callable[[], Awaitable[None]] = trio.sleep_forever) -> None:
        """Walk while this process may, until cancelled; wait while another one does.

        `beside` runs beside each time of walking, for what only the process that walks does.
        """
        while True:
            try:
                async with hold_lease(coordinator, self._clock, self._settings.lease_s) as lease:
                    if await self._state.begin_to_walk(self._process, lease.id):
                        await self._walk_until(lease.ended, beside)
            except LakeError as error:
                _log.warning("the walker begins anew", reason=error.message)
            await trio.sleep(self._settings.idle_s)

    async def _walk_until(self, ended: trio.Event, beside: Callable[[], Awaitable[None]]) -> None:
        with plain_errors():
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    await ended.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(stop)
                nursery.start_soon(beside)
                await self.resume()
                while True:
                    if not await self.step():
                        await self._idle()

    async def resume(self) -> None:
        """Read where the last process stopped."""
        self._walk = await self._state.walk()
        self._looked_at = -1e9
        self._since = None

    async def step(self) -> bool:
        """Walk the next partitions; returns False if there is nothing to do now.  Errors of the coordinator."""
        if self._clock.monotonic() - self._looked_at >= LOOK_INTERVAL_S or not self._dirty:
            await self._look()
        while self._dirty:
            if await self._walk_dirty():
                return True
        return await self._walk_on()

    async def _look(self) -> None:
        """Read the dirty partitions and the members."""
        now = self._clock.monotonic()
        notes = await self._state.dirty()
        self._dirty.read(notes, self._members.tables[0].ring_epoch, now, self._members.is_up)
        states = {record.member: record.state for record in await self._state.members()}
        self._out = {member for member, state in states.items() if state in (MemberState.OUT, MemberState.REMOVED)}
        kept = [member for member, state in states.items() if state is not MemberState.REMOVED]
        self._others = kept if len(kept) <= OTHERS_MAX else []
        self._looked_at = now

    async def _idle(self) -> None:
        """Wait for `idle_s`, or until a partition that waits for a member is due."""
        ends_at = self._clock.monotonic() + self._settings.idle_s
        while (left_s := ends_at - self._clock.monotonic()) > 0:
            if self._dirty.is_any_due(self._clock.monotonic(), self._members.is_up):
                return
            await trio.sleep(min(left_s, AWAITED_INTERVAL_S) if self._dirty.count else left_s)

    # --- partitions ----------------------------------------------------------------------------------

    async def _walk_dirty(self) -> bool:
        """Walk the next dirty partitions; returns False if they are not (any more)."""
        taken = {note.partition for note in self._dirty.take(self._width_dirty)}
        notes = [note for note in await self._state.dirty(min(taken), max(taken)) if note.partition in taken]
        self._dirty.cleared(taken.difference([note.partition for note in notes]))
        if not notes:
            return False
        tables = self._members.tables
        about = {note.partition: partitions_of(note, tables) for note in notes}
        walked = await self._walk_some(sorted(set().union(*about.values())), self._width_dirty)
        if walked is None:
            return True  # by the newer table, once more
        known = [note for note in notes if note.epoch <= walked.epoch]
        settled = [note for note in known if all(map(walked.is_settled, about[note.partition]))]
        clean = await self._state.clear_dirty(settled)
        self._dirty.cleared(clean)
        for note in known:
            if note not in settled and all(map(walked.is_home, about[note.partition])):
                await self._note_home(note, about[note.partition], walked.epoch)
        for note in notes:
            if note.partition not in clean and note not in settled:  # else it was noted again, and is walked again
                self._leave(note.partition, about[note.partition], walked)
        return True

    async def _note_home(self, dirty: Dirty, numbers: Sequence[Partition], epoch: RingEpoch) -> None:
        """Note that nothing of a partition lies elsewhere, though it cannot be made whole: older tables may go."""
        if numbers != [dirty.partition]:  # of a table with fewer rows
            await self._state.note_dirty(numbers, epoch)
            await self._state.clear_dirty([dirty])
        elif (dirty.epoch, dirty.is_home) != (epoch, True):
            await self._state.note_home(dirty, epoch)

    async def _walk_on(self) -> bool:
        """Walk the next partitions of the walk through all; returns False if none is due."""
        walk, now_ns = self._walk, self._clock.wall_ns()
        bits = self._members.tables[0].partition_bits
        if walk.next_partition < 0:
            if walk.ended_ns and walk.ended_ns <= now_ns < walk.ended_ns + self._settings.full_pass_s * 1e9:
                return False
            walk = WalkRecord(0, bits, now_ns, walk.ended_ns, walk.chunks, walk.left)
        elif walk.partition_bits != bits:
            walk = WalkRecord(0, bits, walk.began_ns, walk.ended_ns, walk.chunks, walk.left)
        if self._since is None:
            self._since = self._clock.monotonic(), walk.next_partition
        end = min(walk.next_partition + self._width_all.partitions, 1 << bits)
        walked = await self._walk_some(list(map(Partition, range(walk.next_partition, end))), self._width_all)
        if walked is None:
            return True  # by the newer table, once more
        left = [partition for partition in walked.reports if not walked.is_settled(partition)]
        await self._state.note_dirty(left, walked.epoch)
        for partition in left:
            self._leave(partition, [partition], walked)
        await self._move_on(walk, walked)
        return True

    async def _move_on(self, walk: WalkRecord, walked: Walked) -> None:
        reports = walked.reports.values()
        chunks = walk.chunks_so_far + sum(report.chunks for report in reports)
        left = walk.left_so_far + sum(count for report in reports for count in report.left.values())
        following = walk.next_partition + len(reports)
        if following < 1 << walk.partition_bits:
            self._walk = msgspec.structs.replace(walk, next_partition=following, chunks_so_far=chunks, left_so_far=left)
            if self._clock.monotonic() - self._saved_at < SAVE_INTERVAL_S:
                return
        else:
            self._walk = WalkRecord(-1, 0, walk.began_ns, self._clock.wall_ns(), chunks, left)
            self._since = None
            _log.info("the walker has been through all partitions", chunks=chunks, left=left)
        self._saved_at = self._clock.monotonic()
        await self._state.save_walk(self._walk, self._process)

    async def _walk_some(self, partitions: Sequence[Partition], width: Width) -> Walked | None:
        """Walk partitions; None if the table changed during it."""
        others = [member for member in self._others if self._members.is_up(member)]
        began = self._clock.monotonic()
        try:
            walked = await self._walker.walk(partitions, others=others, out=self._out)
        except StaleEpoch as error:
            _log.info("a walk ends: there is a newer table", reason=error.message)
            await trio.sleep(1.0)  # until this process has it too
            return None
        if partitions:
            span = partitions[-1] - partitions[0] + 1
            chunks = sum(report.chunks for report in walked.reports.values())
            width.walked(span, len(partitions), chunks, self._clock.monotonic() - began)
        for report in walked.reports.values():
            self.totals.add(report)
        return walked

    def _leave(self, noted: Partition, partitions: Iterable[Partition], walked: Walked) -> None:
        """Let a partition that a walk left dirty wait."""
        missing = set[str]().union(*(walked.reports[partition].unanswered for partition in partitions))
        members = [MemberId(bytes.fromhex(member)) for member in missing]
        self._dirty.leave(noted, walked.epoch, members, self._clock.monotonic(), self._members.is_up)

    # --- report --------------------------------------------------------------------------------------

    @property
    def is_healed(self) -> bool:
        """True if every stripe was found or made whole, as far as this process knows."""
        return not self._dirty.count and len(self._members.tables) == 1 and self._walk.ended_ns > 0

    @property
    def many_dirty(self) -> int:
        """The number of dirty partitions if there are many and this process walks them; 0: it must be read."""
        is_fresh = self._clock.monotonic() - self._looked_at < LOOK_INTERVAL_S
        return self._dirty.count if is_fresh and self._dirty.count >= MANY_DIRTY else 0

    def status(self) -> dict[str, Any]:
        """Return the walker's state for people and scripts; JSON-able."""
        walk = self._walk
        whole = 1 << walk.partition_bits
        return {
            "healed": self.is_healed,
            "dirty_partitions": self._dirty.count,
            "ring_epochs": len(self._members.tables),
            "position": round(walk.next_partition / whole, 4) if walk.next_partition >= 0 else 0.0,
            "eta_s": self._eta_s(),
            "last_pass": {"ended_ns": walk.ended_ns, "chunks": walk.chunks, "stripes_left": walk.left},
            "since_start": self.totals.as_json(),
        }

    def _eta_s(self) -> float | None:
        """Return the seconds that the walk through all partitions takes yet, at its pace so far; None: not known."""
        if self._since is None or self._walk.next_partition <= self._since[1]:
            return None
        began, first = self._since
        each_s = (self._clock.monotonic() - began) / (self._walk.next_partition - first)
        return round(each_s * ((1 << self._walk.partition_bits) - self._walk.next_partition), 1)


def partitions_of(dirty: Dirty, tables: Sequence[Table]) -> list[Partition]:
    """Return the partitions of the newest table that a note is about, which may be of a table with fewer.

    Where that table is not known any more, those of both readings: a walk too many does no harm.
    """
    bits = tables[0].partition_bits
    known = {table.ring_epoch: table.partition_bits for table in tables}
    noted_bits = {known[dirty.epoch]} if dirty.epoch in known else {PARTITION_BITS, PARTITION_BITS_MANY, bits}
    found: set[Partition] = set()
    for noted in noted_bits:
        if noted <= bits and dirty.partition < 1 << noted:
            split = bits - noted
            found.update(map(Partition, range(dirty.partition << split, dirty.partition + 1 << split)))
    return sorted(found)
