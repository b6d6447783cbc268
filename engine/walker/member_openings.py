"""Openings of members' stores: finds out a member that came back with less than it had.

A device that is put back from an earlier time (a snapshot rolled back, an image written back) has the inode of its own
folder, so its store opens.  What the member stored since is missing there, and while the whole lake was down nobody
saw that it was away.  So the opening of each store that was seen last is recorded with the coordinator, with the
journal group up to which it was durable then; every answer to SetEpoch says both, and what the opening found.

Rules kept here:
- A member came back old if its store was recovered up to less than was known to be durable; or up to just that, and
  the opening before this one is not the recorded one: a copy from before it.  (So is, for nothing, a member that stored
  nothing and started twice between two looks.)
- All partitions are noted as dirty before the opening is recorded: a process that ends in between sees it again.
- While the member serves, its record follows what is durable, at most every RECORD_S.  A copy that is younger than the
  record is not found out here, but by the walk through all partitions.
- A member of a release that says no opening is left alone.

Used by one task, of the process that walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import structlog

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import OpeningRecord
from engine.members.ports import Members
from engine.walker.walker import members_of
from lakefs.cluster.table import Table
from lakefs.ids import MemberId, Partition, id_text
from lakefs.ports import Clock
from lakefs.wire import messages as m

RECORD_S: Final = 60.0
CAME_BACK_OLD: Final = "a member came back as it was earlier: its shards are compared with the others, and made anew"
_log: Final = structlog.get_logger(__name__)


class MemberOpenings:
    """The recorded openings, compared with what members say."""

    def __init__(self, members: Members, state: LakeState, clock: Clock) -> None:
        self._members = members
        self._state = state
        self._clock = clock
        self._recorded_at: dict[MemberId, float] = {}

    def begin(self) -> None:
        """Begin anew, in a process that begins to walk."""
        self._recorded_at.clear()

    async def look(self, answers: Mapping[MemberId, m.EpochKnown]) -> None:
        """Compare and record what members have said just now.  Errors of the coordinator."""
        recorded = await self._state.openings()
        now = self._clock.monotonic()
        changed: dict[MemberId, OpeningRecord] = {}
        for member, said in answers.items():
            if not said.opening:
                continue
            before = recorded.get(member)
            is_same = before is not None and before.opening == said.opening
            is_old = before is not None and (before.is_old or (not is_same and is_older(said, before)))
            found = OpeningRecord(said.opening, said.durable, is_old)
            is_due = not is_same or now - self._recorded_at.get(member, float("-inf")) >= RECORD_S
            if found != before and is_due:
                changed[member] = found
        await self._note_old({member for member, found in changed.items() if _is_news(found, recorded.get(member))})
        changed |= await self._compared({**recorded, **changed})
        await self._state.record_openings(changed)
        self._recorded_at |= dict.fromkeys(changed, now)

    async def _note_old(self, members: Iterable[MemberId]) -> None:
        """Note all partitions: a member's places first, then those in which it may have what was moved since."""
        tables = self._members.tables
        newest = tables[0]
        for member in sorted(members):
            _log.warning(CAME_BACK_OLD, member=id_text(member))
            places = partitions_with(tables, member)
            others = set(map(Partition, range(len(newest.rows)))) - places
            await self._state.note_dirty(others, newest.ring_epoch, is_moving=True)
            await self._state.note_dirty(places, newest.ring_epoch)

    async def _compared(self, openings: Mapping[MemberId, OpeningRecord]) -> dict[MemberId, OpeningRecord]:
        """Return the records that change because all partitions were walked since a member came back old."""
        old = {member: found for member, found in openings.items() if found.is_old}
        if not old or not all(note.is_home for note in await self._state.dirty()):
            return {}
        return {member: msgspec.structs.replace(found, is_old=False) for member, found in old.items()}


def is_older(said: m.EpochKnown, before: OpeningRecord) -> bool:
    """Return True if a store that was opened anew is one from before the recorded opening, or lost groups since."""
    if said.recovered == before.durable:
        return said.opened_behind != before.opening
    return said.recovered < before.durable


def partitions_with(tables: Iterable[Table], member: MemberId) -> set[Partition]:
    """Return the partitions of the newest table in which a member is home or substitute by any table."""
    known = list(tables)
    return {Partition(number) for number in range(len(known[0].rows)) if member in members_of(known, Partition(number))}


def _is_news(found: OpeningRecord, before: OpeningRecord | None) -> bool:
    return found.is_old and before is not None and before.opening != found.opening
