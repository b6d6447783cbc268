"""Openings of members' stores: finds out a member that came back with less than it had.

A device that is put back from an earlier time (a snapshot rolled back, an image written back) has the inode of its own
folder, so its store opens.  What the member stored since is missing there, and while the whole lake was down nobody
saw that it was away.  So the opening of each store that was seen last is recorded with the coordinator, with the
journal group up to which it was durable then; every answer to SetEpoch says both, and what the opening found.

Rules kept here:
- A member came back old if a new opening has recovered its store up to less than was recorded as durable.  That is
  sure, for groups are numbered in order, and a durable one is not lost by itself.
- All partitions are noted as dirty before the opening is recorded: a process that ends in between sees it again.
- While the member serves, its record follows what is durable, at every look.  What a copy lacks that was stored behind
  the last look is not found out here, but by the walk through all partitions.
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
from lakefs.wire import messages as m

CAME_BACK_OLD: Final = "a member came back as it was earlier: its shards are compared with the others, and made anew"
_log: Final = structlog.get_logger(__name__)


class MemberOpenings:
    """The recorded openings, compared with what members say."""

    def __init__(self, members: Members, state: LakeState) -> None:
        self._members = members
        self._state = state

    async def look(self, answers: Mapping[MemberId, m.EpochKnown]) -> None:
        """Compare and record what members have said just now.  Errors of the coordinator."""
        recorded = await self._state.openings()
        changed: dict[MemberId, OpeningRecord] = {}
        old: set[MemberId] = set()
        for member, said in answers.items():
            if not said.opening:
                continue
            before = recorded.get(member)
            if before is not None and is_older(said, before):
                old.add(member)
            is_old = member in old or (before is not None and before.is_old)
            found = OpeningRecord(said.opening, said.durable, is_old)
            if found != before:
                changed[member] = found
        await self._note_old(old)
        changed |= await self._compared({**recorded, **changed})
        await self._state.record_openings(changed)

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
    """Return True if a store that was opened anew lacks what was durable in the recorded opening."""
    return said.opening != before.opening and said.recovered < before.durable


def partitions_with(tables: Iterable[Table], member: MemberId) -> set[Partition]:
    """Return the partitions of the newest table in which a member is home or substitute by any table."""
    known = list(tables)
    return {Partition(number) for number in range(len(known[0].rows)) if member in members_of(known, Partition(number))}
