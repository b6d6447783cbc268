"""Members that refuse: one with a newer table hands it over, without the coordinator; one that takes nothing is up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from lakefs.cluster.table_format import pack
from lakefs.errors import CoordinatorLost, StaleEpoch
from lakefs.ids import RingEpoch
from lakefs.wire import messages as m
from tests.unit.engine.cluster.stripe_rig import table_of
from tests.unit.engine.cluster.test_member_links import OFFER, ONE, World, ask, in_world


def newer_table() -> bytes:
    return pack(replace(table_of("2+1", 3), ring_epoch=RingEpoch(2)))


def test_a_member_that_has_a_newer_table_hands_it_over_and_the_coordinator_is_not_asked() -> None:
    async def body(world: World) -> None:
        await ask(world)
        world.network.epoch, world.network.table = 2, newer_table()
        world.coordinator.close()  # from now on each call of it fails
        with pytest.raises(StaleEpoch):
            await ask(world)
        assert [known.ring_epoch for known in world.links.tables] == [2, 1]
        assert world.links.view.packed_table == newer_table()
        await ask(world, epoch=2)

    in_world(body)


def test_of_many_requests_that_are_stale_one_asks_for_the_table() -> None:
    async def body(world: World) -> None:
        await ask(world)
        world.network.epoch, world.network.table = 2, newer_table()
        before = len(world.sent(ONE))

        async def refused() -> None:
            with pytest.raises(StaleEpoch):
                await ask(world)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(refused)
        asked = [request for request in world.sent(ONE)[before:] if request == m.SetEpoch(0)]
        assert len(asked) == 1

    in_world(body)


@pytest.mark.parametrize(
    "wrong", [b"", b"no table", pack(table_of("2+1", 3)), pack(replace(table_of("1+1", 3), ring_epoch=RingEpoch(3)))]
)
def test_what_is_no_newer_table_of_this_lake_is_not_taken_over(wrong: bytes) -> None:
    async def body(world: World) -> None:
        await ask(world)
        world.network.epoch, world.network.table = 2, wrong
        await world.state.next_epoch(RingEpoch(1), newer_table())
        with pytest.raises(StaleEpoch):
            await ask(world)
        assert [known.ring_epoch for known in world.links.tables] == [2, 1]
        assert world.links.view.packed_table == newer_table(), "the coordinator's"

    in_world(body)


def test_a_member_that_is_connected_hands_its_newer_table_over_at_once() -> None:
    async def body(world: World) -> None:
        world.network.epoch, world.network.table = 2, newer_table()
        await world.links.call(ONE, m.ListShards())
        assert world.links.tables[0].ring_epoch == 2

    in_world(body)


def test_a_member_that_takes_nothing_is_not_away() -> None:
    async def body(world: World) -> None:
        world.network.takes_nothing = True
        with pytest.raises(CoordinatorLost):
            await world.links.call(ONE, OFFER)
        assert world.links.is_up(ONE)
        await world.links.call(ONE, m.ListShards())
        assert world.network.connects == 1, "on the same connection"

    in_world(body)
