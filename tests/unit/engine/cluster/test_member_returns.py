"""A member that went away only just now is waited for, for a bounded time, and is reached soon after its return."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from engine.members.member_link import AWAY_PAUSE_S_AWAITED
from engine.members.ports import MEMBER_RETURN_S
from lakefs.errors import EngineUnreachable
from tests.unit.engine.cluster.stripe_rig import id_of
from tests.unit.engine.cluster.test_member_links import ONE, World, ask, in_world


def test_a_member_that_went_away_just_now_is_waited_for_and_tried_often_meanwhile() -> None:
    async def body(world: World) -> None:
        await ask(world)
        world.network.away = {ONE}
        world.network.open[ONE].ended.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not world.links.is_up(ONE)
        began = trio.current_time()
        returned: list[bool] = []

        async def wait() -> None:
            returned.append(await world.links.wait_return(ONE))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.sleep(MEMBER_RETURN_S - 1.0)
            world.network.away = set()
        assert returned == [True, True]
        assert trio.current_time() - began < MEMBER_RETURN_S - 1.0 + 2 * AWAY_PAUSE_S_AWAITED
        await ask(world)

    in_world(body)


def test_a_member_that_is_away_for_long_is_not_waited_for() -> None:
    async def body(world: World) -> None:
        assert await world.links.wait_return(ONE), "nobody knows that it is away"
        assert not await world.links.wait_return(id_of(7)), "it is not of this lake"
        world.network.away = {ONE}
        with pytest.raises(EngineUnreachable):
            await ask(world)
        began = trio.current_time()
        assert not await world.links.wait_return(ONE)
        assert trio.current_time() - began == pytest.approx(MEMBER_RETURN_S, abs=0.01)
        assert not await world.links.wait_return(ONE)
        assert trio.current_time() - began == pytest.approx(MEMBER_RETURN_S, abs=0.01), "its time is over"

    in_world(body)
