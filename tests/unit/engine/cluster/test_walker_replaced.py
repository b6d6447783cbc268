"""A removed member is waited for to be replaced: then the new one gets its places, and nothing is moved."""

from __future__ import annotations

import trio

from engine.walker.membership import REPLACED_WITHIN_S
from engine.walker.walker import homes_of
from tests.unit.engine.cluster.test_walker_pass import Running, running, small_rings
from tests.unit.engine.cluster.walker_rig import PARTITIONS, SIZES, member_id

__all__ = ["small_rings"]  # the fixture, for all tests here


def test_a_new_member_gets_the_places_of_a_removed_one_at_once_and_nothing_is_moved() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        before = made.tables[0]
        await made.stop(member_id(4))
        await one.membership.remove(member_id(4), accept_loss=True)
        assert await one.membership.advance() is None
        assert (one.membership.is_waiting, len(made.tables)) == (True, 1)
        await trio.sleep(REPLACED_WITHIN_S / 2)
        await made.start(member_id(6))
        await one.register(6)
        assert await one.membership.advance() == before.ring_epoch + 1
        assert not one.membership.is_waiting
        await one.turn()
        for partition in PARTITIONS:
            expected = [member_id(6) if home == member_id(4) else home for home in homes_of(before, partition)]
            assert list(homes_of(made.tables[0], partition)) == expected
        assert one.walks.totals.moved == 0
        await made.check()

    running(scenario)


def test_a_removed_member_that_nobody_replaces_is_not_waited_for_any_longer() -> None:
    async def scenario(one: Running) -> None:
        await one.made.stop(member_id(4))
        await one.membership.remove(member_id(4), accept_loss=True)
        assert await one.membership.advance() is None
        await trio.sleep(REPLACED_WITHIN_S)
        assert await one.membership.advance() == 2
        assert not one.membership.is_waiting

    running(scenario)
