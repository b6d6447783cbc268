"""The records of a simulated lake at its coordinator: the first ones, and those of members that are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from engine.coordinator.lake_state import NO_EPOCH, NO_GENERATION, LakeState
from engine.coordinator.records import LakeRecord, MemberRecord
from engine.walker.membership import members_of_records
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.errors import LakeError
from lakefs.ids import MemberId
from lakefs.limits import GIB
from tests.sim.cluster.places import LAKE, MemberPlace


async def make_lake(state: LakeState, protection: Protection, members: Sequence[MemberPlace]) -> None:
    """Make records and the first table when there are none; waits for the members."""
    await state.make_lake(LakeRecord(LAKE, protection.data, protection.parity))
    await state.advance_generation(NO_GENERATION)
    if await state.epoch() == NO_EPOCH:
        while not all(member.is_up for member in members):  # noqa: ASYNC110 - on a clock that jumps
            await trio.sleep(0.1)
        for member in members:
            await state.register(_record(member))
        table = first_table(protection, members_of_records(await state.members()), accept_loss=True)
        await state.next_epoch(NO_EPOCH, pack(table))


async def keep_registered(state: LakeState, members: Sequence[MemberPlace], log: Callable[[str], None]) -> None:
    """Record members that were not seen before, until cancelled."""
    known: set[MemberId] = set()
    while True:
        for member in members:
            if member.is_up and member.id is not None and member.id not in known:
                record = _record(member)
                try:
                    await state.register(record)
                    known.add(record.member)
                except LakeError as error:
                    log(f"{member.name} is not recorded: {error!r}")
        await trio.sleep(1.0)


def _record(member: MemberPlace) -> MemberRecord:
    assert member.id is not None
    return MemberRecord(member.id, (member.host,), GIB, (f"device {member.id.hex()}", member.host))
