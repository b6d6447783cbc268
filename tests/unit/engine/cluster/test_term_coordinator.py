"""A leader of the names changes the lake's records in its term; behind the end of that it changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from engine.coordinator.coordinator import Delete, IsAbsent, Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import LEADER_KEY, LakeRecord, LeaderRecord, encode
from engine.coordinator.term_coordinator import TermCoordinator
from engine.lake_gc.lake_gc_lock import hold_gc_lock
from lakefs.errors import CoordinatorLost
from lakefs.ids import GcGeneration, Partition, RingEpoch
from tests.lake_rig import SmallLake, with_lake
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.sim.world.clock import SimClock
from tests.unit.support.metadata_rig import run

FIRST, SECOND = b"first replica...", b"second replica.."


async def lead(coordinator: MemoryCoordinator, replica: bytes) -> None:
    """Let a replica lead from now on."""
    record = LeaderRecord(replica, "machine", ())
    assert (await coordinator.transact([], [Put(LEADER_KEY, encode(record))])).succeeded


def with_term(main: Callable[[MemoryCoordinator, TermCoordinator], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            await lead(coordinator, FIRST)
            await main(coordinator, TermCoordinator(coordinator, FIRST))

    run(scenario)


def test_transactions_are_done_in_the_term_and_seen_is_the_callers() -> None:
    async def main(coordinator: MemoryCoordinator, term: TermCoordinator) -> None:
        done = await term.transact([IsAbsent(b"key")], [Put(b"key", b"value")])
        assert done.succeeded
        assert done.seen == (None,)
        again = await term.transact([IsAbsent(b"key")], [Put(b"key", b"other")])
        assert not again.succeeded
        assert [entry and entry.value for entry in again.seen] == [b"value"]
        assert (await term.get(b"key")).entry == coordinator.entries[b"key"]

    with_term(main)


@pytest.mark.parametrize("then", ["another", "nobody", "itself again"])
def test_behind_the_term_nothing_is_changed(then: str) -> None:
    async def main(coordinator: MemoryCoordinator, term: TermCoordinator) -> None:
        state = LakeState(term)
        await state.next_epoch(RingEpoch(0), b"table 1")
        await state.next_epoch(RingEpoch(1), b"table 2")
        await state.make_lake(LakeRecord(b"lake", 4, 2))
        if then == "nobody":
            await coordinator.transact([], [Delete(LEADER_KEY)])
        else:
            await lead(coordinator, SECOND if then == "another" else FIRST)
        before = dict(coordinator.entries)
        for late in (
            state.retire_epoch(RingEpoch(1)),
            state.next_epoch(RingEpoch(2), b"table 3"),
            state.begin_gc(),
            state.advance_generation(GcGeneration(0)),
            state.note_dirty([Partition(1)], RingEpoch(2)),
            state.begin_to_walk(b"process", await coordinator.lease(9)),
        ):
            with pytest.raises(CoordinatorLost, match="another replica leads"):
                await late
        with pytest.raises(CoordinatorLost):
            async with hold_gc_lock(term, SimClock()):
                raise AssertionError("a deposed leader has no lock of gc")
        assert coordinator.entries == before

    with_term(main)


def test_who_does_not_lead_when_it_begins_has_no_term() -> None:
    async def main(coordinator: MemoryCoordinator, _: TermCoordinator) -> None:
        term = TermCoordinator(coordinator, SECOND)
        with pytest.raises(CoordinatorLost):
            await term.transact([], [Put(b"key", b"value")])
        assert b"key" not in coordinator.entries

    with_term(main)


def test_two_fences_have_room_in_every_transaction() -> None:
    async def main(coordinator: MemoryCoordinator, term: TermCoordinator) -> None:
        state = LakeState(TermCoordinator(term, FIRST))
        partitions = [Partition(number) for number in range(500)]
        await state.note_dirty(partitions, RingEpoch(1))
        assert await state.clear_dirty(await state.dirty()) == set(partitions)
        for epoch in range(4):
            await state.next_epoch(RingEpoch(epoch), b"table")
        assert (await state.begin_gc())[0] == 1

    with_term(main)


def test_names_that_lead_anew_refuse_what_others_have_retired_although_they_have_not_read_it() -> None:
    """A process follows the tables by a watch, which may be late when it begins to lead."""

    async def main(lake: SmallLake) -> None:
        await lake.next_epoch(0, 1)
        await lake.next_epoch(0, 1, 2)
        late = list(lake.members.tables)
        for _ in range(2):
            await lake.retire()
        newest = lake.members.tables[0].ring_epoch
        lake.members.tables[:] = late
        await lake.stop_names()
        await lake.start_names()
        assert lake.gate.oldest_epoch < newest
        await lake.upkeep.begin()
        assert lake.gate.oldest_epoch == newest

    with_lake(main)
