"""Members beside something that was lost are asked for a sign of life, since their whole machine may be gone."""

from __future__ import annotations

import msgspec
import trio

from engine.members.member_links import NEIGHBOUR_SIGN_S
from lakefs.wire import messages as m
from tests.unit.engine.cluster.test_member_links import ONE, THREE, TWO, World, ask, in_world, record_of


def test_when_a_member_is_lost_the_others_of_its_machine_are_asked_for_a_sign_of_life() -> None:
    async def body(world: World) -> None:
        for member, machine in ((ONE, "first"), (TWO, "first"), (THREE, "second")):
            await world.state.register(msgspec.structs.replace(record_of(member), domains=("device", machine)))
            await ask(world, member)
        world.network.open[ONE].ended.set()
        await trio.sleep(NEIGHBOUR_SIGN_S + 1)
        assert m.Ping() in world.sent(TWO)
        assert m.Ping() not in world.sent(THREE)
        assert all(map(world.links.is_up, (ONE, TWO, THREE))), "who answers is up"
        await ask(world)
        world.network.is_silent = True
        world.network.open[ONE].ended.set()
        await trio.sleep(NEIGHBOUR_SIGN_S + 0.1)
        assert [*map(world.links.is_up, (ONE, TWO, THREE))] == [False, False, True]
        world.links.ask_machine("second")
        await trio.sleep(NEIGHBOUR_SIGN_S + 0.1)
        assert not world.links.is_up(THREE)

    in_world(body)
