"""Members that change one behind the other: what they leave is found, and a lake is never stuck between tables."""

from __future__ import annotations

import pytest

from engine.coordinator.records import MemberState
from engine.walker import walker_pass
from engine.walker.membership import EPOCHS_MAX
from engine.walker.walker import members_of
from lakefs.cluster import placing, table_format
from tests.shards import listed
from tests.unit.engine.cluster.test_walker_pass import Running, running
from tests.unit.engine.cluster.walker_rig import BITS, SIZES, member_id


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have four rows."""
    for module in (placing, table_format, walker_pass):
        monkeypatch.setattr(module, "PARTITION_BITS", BITS)


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_member_has_that_was_out_is_found_wherever_it_has_places_now(number: int) -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES, *SIZES)
        gone = member_id(number)
        before = {made.tables[0].partition_of(shard.chunk) for shard in await listed(made.clients[gone])}
        await made.stop(gone)
        for _ in range(12):
            await one.turn(60)
        assert (await one.states())[gone] is MemberState.OUT
        assert one.walks.is_healed
        await made.start(gone)
        for _ in range(2):
            await one.turn(10)
        assert (await one.states())[gone] is MemberState.UP
        assert any(gone not in members_of(made.tables, partition) for partition in before), "else all were noted"
        assert one.walks.is_healed
        await made.check()

    running(scenario, count=9)


def test_a_home_that_is_lost_gets_another_table_also_when_many_are_left() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES)
        for number in range(8, 7 + EPOCHS_MAX):
            await made.start(member_id(number))
            await one.register(number)
            assert await one.membership.advance() is not None
            await one.learn()
        assert len(made.tables) == EPOCHS_MAX
        await made.start(member_id(20))
        await one.register(20)
        assert await one.membership.advance() is None, "many tables are left, and this one may wait"
        lost = member_id(2)
        assert lost in {made.tables[0].members[index].id for row in made.tables[0].rows for index in row[:6]}
        await made.stop(lost)
        await one.membership.remove(lost, accept_loss=True)
        assert await one.membership.advance() == EPOCHS_MAX + 1
        await one.learn()
        await made.start(member_id(21))
        await one.register(21)
        assert await one.membership.advance() is None, "the next one waits again"
        for _ in range(6):
            await one.turn()
        assert len(made.tables) == 1
        assert one.walks.is_healed
        await made.check()

    running(scenario, count=8)


def test_more_than_m_members_that_are_drained_at_once_leave_one_behind_the_other() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES)
        drained = [member_id(number) for number in (0, 3, 5)]
        assert max(sum(made.tables[0].members[at].id in drained for at in row[:6]) for row in made.tables[0].rows) > 2
        for member in drained:
            await one.membership.drain(member)
        for _ in range(8):
            await one.turn()
        for member in drained:
            assert await listed(made.clients[member]) == {}
        assert one.walks.is_healed
        await made.check()

    running(scenario, count=9)


def test_a_member_that_takes_nothing_for_long_is_out_although_it_answers_and_returns_with_its_lease() -> None:
    async def scenario(one: Running) -> None:
        made, number = one.made, 2
        await made.write(*SIZES)
        member = made.stores[member_id(number)].member
        assert member is not None
        member.shards.may_take = lambda: False
        for _ in range(9):
            await one.turn(60)
        assert (await one.states())[member_id(number)] is MemberState.UP
        for _ in range(3):
            await one.turn(60)
        assert (await one.states())[member_id(number)] is MemberState.OUT
        member.shards.may_take = lambda: True
        for _ in range(3):
            await one.turn(10)
        assert (await one.states())[member_id(number)] is MemberState.UP
        await made.check()

    running(scenario, count=9)
