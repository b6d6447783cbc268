"""Members, ring epochs, generation and dirty partitions: each step, and two that make it at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import pytest
import trio

from engine.coordinator.coordinator import Compare, Coordinator, Operation, Put, Transacted
from engine.coordinator.lake_state import Dirty, LakeState
from engine.coordinator.records import LakeRecord, MemberRecord, MemberState, member_key
from lakefs.errors import PreconditionFailed
from lakefs.ids import GcGeneration, MemberId, Partition, Revision, RingEpoch
from lakefs.limits import KIB
from tests.memory_coordinator import MemoryCoordinator
from tests.unit.support.metadata_rig import run

SCHEDULES = range(8)
TABLE = bytes(256 * KIB)
MEMBER = MemberRecord(MemberId(b"m" * 16), ("10.0.0.1:7000",), 1 << 40, ("sda", "host"))
MOVED = msgspec.structs.replace(MEMBER, addresses=("10.0.0.2:7000",), room_bytes=1 << 41)


def scheduled(scenario: Callable[[LakeState, MemoryCoordinator], Awaitable[None]], seed: int = 0) -> None:
    """Run a scenario over a new coordinator in memory, with the order of tasks drawn from the seed."""

    async def main() -> None:
        coordinator = MemoryCoordinator()
        await scenario(LakeState(coordinator), coordinator)

    run(main, seed)


async def at_once(*calls: Callable[[], Awaitable[object]]) -> list[object]:
    """Make calls at the same time; return their results."""
    results: list[object] = [None] * len(calls)

    async def one(place: int) -> None:
        results[place] = await calls[place]()

    async with trio.open_nursery() as nursery:
        for place in range(len(calls)):
            nursery.start_soon(one, place)
    return results


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_lake_is_made_once_and_its_protection_stays(seed: int) -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        assert await state.lake() is None
        first, second = LakeRecord(b"1" * 16, 4, 2), LakeRecord(b"2" * 16, 2, 1)
        made = await at_once(partial(state.make_lake, first), partial(state.make_lake, second))
        assert made[0] == made[1] == await state.lake()
        assert await state.make_lake(LakeRecord(b"3" * 16, 8, 2)) == made[0]

    scheduled(scenario, seed)


def test_a_member_that_registers_again_changes_its_place_and_keeps_its_state() -> None:
    async def scenario(state: LakeState, coordinator: MemoryCoordinator) -> None:
        assert await state.register(MEMBER) == MEMBER
        assert await state.register(MEMBER) == MEMBER
        assert coordinator.revision == 1, "nothing changed"
        assert await state.set_state(MEMBER.member, MemberState.UP, MemberState.DRAINING)
        assert not await state.set_state(MEMBER.member, MemberState.UP, MemberState.OUT)
        assert not await state.set_state(MemberId(b"x" * 16), MemberState.UP, MemberState.OUT)
        draining = msgspec.structs.replace(MOVED, state=MemberState.DRAINING)
        assert await state.register(MOVED) == draining
        other = msgspec.structs.replace(MEMBER, member=MemberId(b"a" * 16))
        await state.register(other)
        assert await state.members() == [other, draining]
        assert await state.set_state(MEMBER.member, MemberState.DRAINING, MemberState.REMOVED)
        with pytest.raises(PreconditionFailed, match="removed"):
            await state.register(MEMBER)

    scheduled(scenario)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_member_that_registers_while_its_state_changes_loses_neither(seed: int) -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        await state.register(MEMBER)
        results = await at_once(
            partial(state.register, MOVED), partial(state.set_state, MEMBER.member, MemberState.UP, MemberState.OUT)
        )
        assert results[1] is True
        assert await state.members() == [msgspec.structs.replace(MOVED, state=MemberState.OUT)]

    scheduled(scenario, seed)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_of_two_that_make_the_next_epoch_at_once_one_does(seed: int) -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        assert await state.epoch() == 0
        for known in range(3):
            make = partial(state.next_epoch, RingEpoch(known))
            made = await at_once(*(partial(make, b"%d" % maker) for maker in range(3)))
            assert sorted(made, key=str) == [known + 1, None, None]
            assert await state.epoch() == known + 1
            winner = made.index(known + 1)
            assert (await state.epoch_tables())[RingEpoch(known + 1)] == b"%d" % winner
        assert await state.next_epoch(RingEpoch(1), TABLE) is None

    scheduled(scenario, seed)


def test_tables_of_epochs_stay_until_they_are_retired_and_the_newest_cannot_be() -> None:
    async def scenario(state: LakeState, coordinator: MemoryCoordinator) -> None:
        for known in range(11):
            assert await state.next_epoch(RingEpoch(known), TABLE + b"%d" % known) == known + 1
        assert list(await state.epoch_tables()) == [*range(1, 12)]
        assert await state.retire_epoch(RingEpoch(3))
        assert not await state.retire_epoch(RingEpoch(3))
        assert not await state.retire_epoch(RingEpoch(11))
        assert not await state.retire_epoch(RingEpoch(12))
        assert list(await state.epoch_tables()) == [1, 2, *range(4, 12)]
        assert coordinator.revision == 12

    scheduled(scenario)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_of_two_that_advance_the_generation_at_once_one_does(seed: int) -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        assert await state.generation() == 0
        for known in range(3):
            advance = partial(state.advance_generation, GcGeneration(known))
            assert sorted(await at_once(advance, advance, advance), key=str) == [known + 1, None, None]
            assert await state.generation() == known + 1
        assert await state.advance_generation(GcGeneration(1)) is None
        assert await state.advance_generation(GcGeneration(9)) is None

    scheduled(scenario, seed)


def test_dirty_partitions_are_noted_and_cleared_one_by_one() -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        await state.note_dirty([Partition(9), Partition(300), Partition(9)], RingEpoch(4))
        assert await state.dirty() == [
            Dirty(Partition(9), RingEpoch(4), Revision(1)),
            Dirty(Partition(300), RingEpoch(4), Revision(1)),
        ]
        found = await state.dirty(Partition(9), Partition(299))
        assert [dirty.partition for dirty in found] == [9]
        assert await state.clear_dirty(found) == {9}
        assert await state.clear_dirty(found) == {9}, "it is clean"
        assert [dirty.partition for dirty in await state.dirty()] == [300]

    scheduled(scenario)


def test_all_partitions_of_a_lake_are_noted_in_as_many_transactions_as_they_need() -> None:
    async def scenario(state: LakeState, coordinator: MemoryCoordinator) -> None:
        await state.note_dirty(map(Partition, range(4096)), RingEpoch(1))
        assert [dirty.partition for dirty in await state.dirty()] == [*range(4096)]
        assert coordinator.revision == 35

    scheduled(scenario)


def test_a_partition_that_is_noted_anew_during_its_walk_stays_dirty() -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        await state.note_dirty([Partition(9)], RingEpoch(4))
        (before,) = await state.dirty()
        await state.note_dirty([Partition(9)], RingEpoch(4))
        assert await state.clear_dirty([before]) == set()
        (after,) = await state.dirty()
        assert after == Dirty(Partition(9), RingEpoch(4), Revision(2))
        assert await state.clear_dirty([after]) == {9}
        await state.note_dirty([Partition(9)], RingEpoch(5))
        assert await state.clear_dirty([after]) == set()

    scheduled(scenario)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_whatever_the_order_a_note_after_the_walk_began_is_never_lost(seed: int) -> None:
    async def scenario(state: LakeState, _: MemoryCoordinator) -> None:
        walked_upto = stored = 0

        async def write() -> None:
            nonlocal stored
            for _ in range(10):
                stored += 1  # a stripe that is short
                await state.note_dirty([Partition(9)], RingEpoch(1))

        async def walk() -> None:
            nonlocal walked_upto
            for _ in range(10):
                dirty = await state.dirty(Partition(9), Partition(9))
                if dirty:
                    upto = stored
                    await trio.lowlevel.checkpoint()
                    if await state.clear_dirty(dirty):
                        walked_upto = upto

        await at_once(write, walk, walk)
        if not await state.dirty(Partition(9)):
            assert walked_upto == stored

    scheduled(scenario, seed)


def test_many_partitions_are_cleared_in_few_transactions_and_those_that_were_noted_anew_stay() -> None:
    async def scenario(state: LakeState, coordinator: MemoryCoordinator) -> None:
        await state.note_dirty(map(Partition, range(300)), RingEpoch(1))
        notes = await state.dirty()
        assert await state.clear_dirty(notes[250:260]) == {*range(250, 260)}
        again = {Partition(number) for number in (0, 119, 120, 200)}
        await state.note_dirty(again, RingEpoch(1))
        before = coordinator.revision
        assert await state.clear_dirty(notes) == {*range(300)} - again, "also those that were clean already"
        assert {note.partition for note in await state.dirty()} == again
        assert coordinator.revision == before + 3, "one transaction of 120, and one that is refused does nothing"

    scheduled(scenario)


class _Failing(MemoryCoordinator):
    """A coordinator whose transactions change the record behind the caller's back, a few times."""

    def __init__(self) -> None:
        super().__init__()
        self.others = 3

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        if self.others and compares:
            self.others -= 1
            entry = self.entries.get(member_key(MEMBER.member))
            if entry is not None:
                await super().transact([], [Put(entry.key, entry.value)])
        return await super().transact(compares, then_ops, else_ops, is_repeatable=is_repeatable)


def test_a_registration_goes_on_until_nobody_else_was_first() -> None:
    async def main() -> None:
        coordinator: Coordinator = _Failing()
        state = LakeState(coordinator)
        await state.register(MEMBER)
        assert await state.register(MOVED) == MOVED
        assert await state.members() == [MOVED]

    run(main)
