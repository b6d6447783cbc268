"""Members that fall silent, return, are drained or added: their states, and the ring epochs that follow.

`look` asks every member for a sign of life; `advance` makes the next table when the members or their states are not
those of the newest; `retire` ends older tables.  One process does this: the one that walks.

Rules kept here:
- A member counts as silent, too, while it says that it takes no shards, because its lease was not renewed.
- A member that was silent for `out_after_s`, as this process saw it, is out: others get its places.  None is while too
  many are away at once (`engine.walker.out_rule`): then it is the network, or this process.
- That time, and what counts as too many, are the lake's settings, read at each look.
- A member that is out and answers is up again.  Partitions in which a member that was silent has places are dirty; of
  one that was out also those of which it still has shards: others have its places there, and know nothing of them.  All
  are if it came back with less than it had (`engine.walker.member_openings`).
- An epoch changes at most m homes of a row, or those that are out.  What is left to be changed waits until older tables
  are retired; a change of states does not, up to `EPOCHS_MAX` tables.  A table of which a home is lost is followed by
  another in any case: no walk could settle its rows, so it and all older ones would stay.
- Where more than m homes of a row are drained, or drained and lost, at once, some that are drained leave later.
- An epoch is retired when every member that it names has said the newest one, or is out or removed, and since then no
  partition is dirty whose row it changed, but for those of which all shards are at home: what is left of stripes that
  nobody can make whole (a cancelled put, a lost disk) is freed by gc once no older table is left.  This process notes
  these partitions itself, after it has seen that the epoch is the newest: so a process that ended between an epoch and
  its notes hides nothing.
- Before that the names of all shards refuse answers under it; as long as one of them cannot be asked, it stays.
- A member is removed only when it holds nothing and no table names it, or by `accept_loss`.
- A member that was removed with places is waited for to be replaced, at most `REPLACED_WITHIN_S`: the new one then gets
  these places at once, and nothing is made anew elsewhere first, to be moved again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import structlog
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord, MemberState, SettingsRecord, shared_devices
from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.walker.member_openings import MemberOpenings, partitions_with
from engine.walker.out_rule import stopped_because
from engine.walker.walker import Walker, members_of
from lakefs.cluster.members import Level, Member, Standing, domain_key
from lakefs.cluster.placing import next_table
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.errors import InvalidArgument, LakeError, PreconditionFailed
from lakefs.ids import ChunkId, MemberId, Partition, RingEpoch, id_text
from lakefs.ports import Clock
from lakefs.wire import messages as m

EPOCHS_MAX: Final = 4
"""Tables that are not retired: readers ask the homes of each.  Lost homes add one each, no member twice."""
REPLACED_WITHIN_S: Final = 15.0
"""A folder that was added is found within 5 s, and its member serves 1 to 3 s later."""
_READ_AT_ONCE: Final = 128
"""Partitions whose notes are read at once; a power of two, as their number is."""
_LOOKED_AT: Final = 64
"""Shards of a page, when one is enough."""
Retiring = Callable[[RingEpoch, int], Awaitable[None]]
"""Lets the names of so many shards refuse answers of epochs before this one, for ever.  LakeErrors if one did not."""
_STANDING: Final = {MemberState.UP: Standing.IN, MemberState.OUT: Standing.OUT, MemberState.DRAINING: Standing.DRAINING}
_log: Final = structlog.get_logger(__name__)


async def _nothing_to_refuse(_epoch: RingEpoch, _shards: int) -> None:
    return


@dataclass(frozen=True)
class MembershipSettings:
    """`out_after_s`: silence, in seconds, after which a member is out, where the lake has no settings of its own.

    `answer_s`: how long its answer may take.
    """

    out_after_s: float = 600.0
    answer_s: float = 10.0


class Membership:
    """States of members and tables of a lake.  Used by one task."""

    def __init__(
        self,
        members: Members,
        state: LakeState,
        walker: Walker,
        clock: Clock,
        settings: MembershipSettings | None = None,
        retiring: Retiring = _nothing_to_refuse,
    ) -> None:
        """`retiring` lets the names refuse answers of epochs that are to be retired."""
        self._members = members
        self._state = state
        self._walker = walker
        self._clock = clock
        self._settings = settings or MembershipSettings()
        self._retiring = retiring
        self._refusing_failed = False
        """Names did not refuse an epoch when they were asked last."""
        self._openings = MemberOpenings(members, state)
        self._silent_since: dict[MemberId, float] = {}
        self.stopped_because = ""
        """The reason why silent members were not made out at the last look; empty: none is due, or they were."""
        self._noted: RingEpoch | None = None
        """The newest epoch for which this process noted what older tables have elsewhere."""
        self._removed: tuple[Set[MemberId], float] = frozenset(), 0.0
        """Members that were removed with places in the newest table, and since when this process knows that."""
        self._changed: tuple[tuple[RingEpoch, ...], Set[Partition]] = (), frozenset()
        """Epochs, and the partitions that changed between them: to find them takes 50 ms of CPU."""
        self._settled: tuple[RingEpoch, Sequence[Member]] | None = None
        """The last table, and members, of which no other table is made: to make one takes a second of CPU."""

    def begin(self) -> None:
        """Begin to look: silence counts from now on, since this process has not seen what happened before."""
        self._silent_since.clear()

    # --- silence -------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask every member for a sign of life, and change states.  Errors of the coordinator."""
        records = [record for record in await self._state.members() if record.state is not MemberState.REMOVED]
        answered = await self._ask([record.member for record in records])
        now = self._clock.monotonic()
        for record in records:
            if record.member not in answered:
                self._silent_since.setdefault(record.member, now)
            elif self._silent_since.pop(record.member, None) is not None or record.state is MemberState.OUT:
                await self._returned(record)
        await self._put_out(records, now)
        await self._openings.look(answered)

    async def _ask(self, members: Sequence[MemberId]) -> dict[MemberId, m.EpochKnown]:
        answered: dict[MemberId, m.EpochKnown] = {}

        async def ask(member: MemberId) -> None:
            with trio.move_on_after(self._settings.answer_s):
                try:
                    reply = await self._members.call(member, m.SetEpoch(0, without_table=True))
                except LakeError:
                    return
                reply.body.release()
                assert isinstance(reply.message, m.EpochKnown), reply.message
                if reply.message.takes:
                    answered[member] = reply.message

        await run_all(ask, members)
        return answered

    async def _returned(self, record: MemberRecord) -> None:
        """Note the partitions of a member that was silent; it is up if it was out."""
        table = self._members.tables[0]
        partitions = partitions_with(self._members.tables, record.member)
        if record.state is MemberState.OUT:
            try:
                partitions |= await self._partitions_held(record.member, table)
            except LakeError as error:
                _log.info("a member that returns does not list its shards yet", reason=error.message)
                return
        await self._state.note_dirty(partitions, table.ring_epoch, is_moving=True)
        if await self._state.set_state(record.member, MemberState.OUT, MemberState.UP):
            _log.warning("a member that was out is up again", member=id_text(record.member))

    async def _partitions_held(self, member: MemberId, table: Table) -> set[Partition]:
        """Return the partitions of which a member has shards: it lists them all, about 3 us each.  Its LakeErrors."""
        held: set[Partition] = set()
        after = b""
        while True:
            page = await self._listed(member, m.ListShards(after=after))
            chunks = *page.chunks, *page.damaged_chunks
            held.update([table.partition_of(ChunkId(chunk)) for chunk in chunks])
            after = page.next_after
            if not after:
                return held

    async def _listed(self, member: MemberId, request: m.ListShards) -> m.ShardsListed:
        """Return a page of a member's list.  Its LakeErrors."""
        reply = await self._members.call(member, request)
        reply.body.release()
        assert isinstance(reply.message, m.ShardsListed), reply.message
        return reply.message

    async def _put_out(self, records: Sequence[MemberRecord], now: float) -> None:
        """Put members out that are silent for too long, unless too many are away."""
        settings = await self._state.settings()
        out_after_s = self._settings.out_after_s if settings is None else settings.out_after_s
        stops = (settings or SettingsRecord()).out_stops
        away = {r.member for r in records if r.member in self._silent_since or r.state is MemberState.OUT}
        due = [
            r.member
            for r in records
            if r.state is MemberState.UP and now - self._silent_since.get(r.member, now) >= out_after_s
        ]
        self.stopped_because = stopped_because(self._members.tables, records, away, stops) if due else ""
        if self.stopped_because:
            _log.error("no member is made out", reason=self.stopped_because)
            return
        for member in due:
            if await self._state.set_state(member, MemberState.UP, MemberState.OUT):
                _log.error("a member is silent for too long: its places go to others", member=id_text(member))

    # --- ring epochs ---------------------------------------------------------------------------------

    async def advance(self) -> RingEpoch | None:
        """Make the next epoch if members or states have changed, or rows wait to be; returns it, None if none is due.

        None too while it cannot be made now: too many tables are left, or too few members.
        """
        tables = self._members.tables
        newest = tables[0]
        if await self._state.epoch() != newest.ring_epoch:
            return None  # this process learns the newer table first
        wanted = members_of_records(await self._state.members())
        if len(tables) > 1 and wanted == newest.members:
            return None
        if len(tables) >= EPOCHS_MAX and not _has_lost_homes(newest, wanted):
            return None
        if self._settled == (newest.ring_epoch, wanted) or self._is_replacement_awaited(newest, wanted):
            return None
        table = _table_behind(newest, wanted)
        if table is None:
            return None
        if (table.members, table.rows) == (newest.members, newest.rows):
            self._settled = newest.ring_epoch, wanted
            return None
        made = await self._state.next_epoch(newest.ring_epoch, pack(table))
        if made is not None:
            out = {member.id for member in wanted if member.state is Standing.OUT}
            await self._note_changes([table, *tables], out)
            self._noted = made
        return made

    @property
    def is_waiting(self) -> bool:
        """True while a removed member may be replaced yet: then `advance` is to be called again soon."""
        return bool(self._removed[0])

    def _is_replacement_awaited(self, newest: Table, wanted: Sequence[Member]) -> bool:
        """Return True if members were removed with their places only now, and fewer new ones have come."""
        present, placed = {member.id for member in wanted}, {member.id for member in newest.members}
        removed = {m.id for m in newest.members if m.state is Standing.IN and m.id not in present}
        now = self._clock.monotonic()
        if removed and removed != self._removed[0]:
            self._removed = removed, now
        if len(present - placed) < len(removed) and now - self._removed[1] < REPLACED_WITHIN_S:
            return True
        self._removed = frozenset(), 0.0
        return False

    async def retire(self) -> list[RingEpoch]:
        """Retire older epochs that nothing needs any more; returns them."""
        tables = list(self._members.tables)
        newest = tables[0]
        if len(tables) == 1 or await self._state.epoch() != newest.ring_epoch:
            return []
        records = {record.member: record.state for record in await self._state.members()}
        gone = {member for member, state in records.items() if state in (MemberState.OUT, MemberState.REMOVED)}
        named = {member.id for table in tables for member in table.members if member.state is not Standing.OUT}
        if not await self._all_know([member for member in sorted(named - gone) if member in records], newest):
            return []
        if self._noted != newest.ring_epoch:
            await self._note_changes(tables, gone)
            self._noted = newest.ring_epoch
        if await self._is_walk_awaited(tables):
            return []
        shards = await self._state.names_shards()
        if not await self._names_refuse(newest.ring_epoch, shards):
            return []
        return [t.ring_epoch for t in tables[1:] if await self._state.retire_epoch(t.ring_epoch, shards=shards)]

    async def _names_refuse(self, epoch: RingEpoch, shards: int) -> bool:
        """Let the names of all shards refuse older answers; False, and logged once, if one cannot be asked."""
        try:
            await self._retiring(epoch, shards)
        except LakeError as error:
            if not self._refusing_failed:
                _log.warning("an older table stays: names cannot be asked to refuse its answers", reason=error.message)
            self._refusing_failed = True
            return False
        self._refusing_failed = False
        return True

    async def _is_walk_awaited(self, tables: Sequence[Table]) -> bool:
        """Return True if a partition that changed is dirty, and not only for want of shards.

        This is asked all the time while shards are moved, so it reads up to the first that is.
        """
        newest, changed = tables[0], self._changed_partitions(tables)
        for first in range(0, len(newest.rows), _READ_AT_ONCE):
            for note in await self._state.dirty(Partition(first), Partition(first + _READ_AT_ONCE - 1)):
                if note.partition in changed and not (note.is_home and note.epoch == newest.ring_epoch):
                    return True
        return False

    async def _all_know(self, members: Sequence[MemberId], table: Table) -> bool:
        """Let members know the newest table; returns True if all have said that they do."""
        try:
            await run_all(lambda member: self._walker.say_epoch(member, table), members)
        except LakeError as error:
            _log.info("an older table stays", reason=error.message)
            return False
        return True

    async def _note_changes(self, tables: Sequence[Table], out: Set[MemberId]) -> None:
        """Note what older tables have elsewhere: first what has lost a home, then what has to be moved."""
        changed = self._changed_partitions(tables)
        short = {partition for partition in changed if not out.isdisjoint(members_of(tables, partition))}
        await self._state.note_dirty(changed - short, tables[0].ring_epoch, is_moving=True)
        await self._state.note_dirty(short, tables[0].ring_epoch)

    def _changed_partitions(self, tables: Sequence[Table]) -> Set[Partition]:
        """Return the partitions of the newest table whose rows are others in an older one."""
        epochs = tuple([table.ring_epoch for table in tables])
        if self._changed[0] != epochs:
            self._changed = epochs, changed_partitions(tables)
        return self._changed[1]

    # --- for operators -------------------------------------------------------------------------------

    async def drain(self, member: MemberId) -> None:
        """Let others get a member's places; its shards are moved.  Safe to repeat.

        PreconditionFailed if it is out or removed, or no other member could take its places.
        """
        record = await self._record(member)
        if record.state is MemberState.DRAINING:
            return
        if record.state is not MemberState.UP:
            raise PreconditionFailed(
                f"it is {record.state.value}: its places are others' already", subject=id_text(member)
            )
        left = [member for member in members_of_records(await self._state.members()) if member.state is Standing.IN]
        needed = self._members.tables[0].protection.members_min
        devices = {domain_key(each, Level.DEVICE) for each in left}
        others = {domain_key(each, Level.DEVICE) for each in left if each.id != member}
        if len(left) <= needed or len(others) < needed <= len(devices):
            raise PreconditionFailed(
                f"{len(left)} members on {len(devices)} device{'s' * (len(devices) > 1)} have places, and {needed} are "
                "needed; add another one first",
                subject=id_text(member),
            )
        if not await self._state.set_state(member, MemberState.UP, MemberState.DRAINING):
            raise PreconditionFailed("its state changed meanwhile; look, and try again", subject=id_text(member))

    async def remove(self, member: MemberId, *, accept_loss: bool = False) -> None:
        """Remove a member for ever.  Safe to repeat.

        PreconditionFailed if it holds shards, cannot be asked, or a table names it: drain it first.  `accept_loss`: it
        is lost, and what it had is made from others.
        """
        record = await self._record(member)
        if record.state is MemberState.REMOVED:
            return
        if not accept_loss:
            await self._check_empty(record)
        if not await self._state.set_state(member, record.state, MemberState.REMOVED):
            raise PreconditionFailed("its state changed meanwhile; look, and try again", subject=id_text(member))

    async def _record(self, member: MemberId) -> MemberRecord:
        for record in await self._state.members():
            if record.member == member:
                return record
        raise InvalidArgument("the lake has no such member", subject=member.hex())

    async def _check_empty(self, record: MemberRecord) -> None:
        member = record.member
        text = id_text(member)
        if record.state is not MemberState.DRAINING or partitions_with(self._members.tables, member):
            raise PreconditionFailed("it has places in a table; drain it, and wait until that is done", subject=text)
        after = b""
        while True:  # pages may have damaged shards only: those are no reason to stay
            page = await self._listed(member, m.ListShards(after=after, limit=_LOOKED_AT))
            if page.chunks:
                raise PreconditionFailed("it holds shards that are nowhere else; wait for the walker", subject=text)
            after = page.next_after
            if not after:
                return


def members_of_records(records: Iterable[MemberRecord]) -> tuple[Member, ...]:
    """Return the members of the next table, by their ids; removed ones have no part in it."""
    present = [record for record in records if record.state is not MemberState.REMOVED]
    devices = shared_devices(present)
    members = [_member(record, devices.get(record.member, "")) for record in present]
    return tuple(sorted(members, key=lambda member: member.id))


def _table_behind(newest: Table, wanted: Sequence[Member]) -> Table | None:
    """Return the next table; None if there is none.  Where too many homes of a row would leave, some drain later."""
    placing = sum(member.state is Standing.IN for member in newest.members)
    placed = {member.id for member in newest.members if member.state is Standing.IN}
    draining = [member.id for member in wanted if member.state is Standing.DRAINING and member.id in placed]
    reason = ""
    for count in range(len(draining) + 1):
        later = set(draining[:count])
        members = [replace(member, state=Standing.IN) if member.id in later else member for member in wanted]
        try:
            table = next_table(newest, members, accept_loss=placing < newest.protection.members_min)
        except InvalidArgument as error:
            reason = reason or error.message
            continue
        if later:
            _log.info("members that are drained wait for others", count=len(later), reason=reason)
        return table
    _log.error("the next table cannot be made", reason=reason)
    return None


def _has_lost_homes(table: Table, wanted: Sequence[Member]) -> bool:
    """Return True if a member that has places in the table is out by now, or was removed."""
    reached = {member.id for member in wanted if member.state is not Standing.OUT}
    return any(member.state is Standing.IN and member.id not in reached for member in table.members)


def _member(record: MemberRecord, device: str) -> Member:
    _, machine, rack, zone = (*record.domains, "", "", "", "")[:4]
    return Member(record.member, record.room_bytes, machine, rack, zone, _STANDING[record.state], device)


def changed_partitions(tables: Sequence[Table]) -> set[Partition]:
    """Return the partitions of the newest table whose rows are others in an older one."""
    return {
        Partition(number)
        for number in range(len(tables[0].rows))
        if any(_row(table, tables[0], number) != _row(tables[0], tables[0], number) for table in tables[1:])
    }


def _row(table: Table, newest: Table, number: int) -> list[MemberId | None]:
    row = table.rows[number >> newest.partition_bits - table.partition_bits]
    return [table.members[index].id if index < len(table.members) else None for index in row]
