"""Scenes of gc: cycles beside puts, restarts, moves and new tables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from lakefs.wire import messages as m
from tests.sim.cluster.lake import until
from tests.sim.cluster.network import Connection
from tests.sim.cluster.places import NAMES_HOST
from tests.sim.cluster.points import PointOf, names_to_members
from tests.sim.cluster.stage import HELD_S, Stage

OLD = 2
"""Cycles behind which what was stored before is not protected by its generation any more."""


async def a_mark_is_lost(stage: Stage) -> None:
    """In a cycle that sweeps, the connection to a member is lost with the first marks for it."""
    for number in range(4):
        await stage.put(f"o{number}", stage.payload())
    await stage.collect(OLD)

    async def lose(connection: Connection, _: m.Request) -> None:
        connection.lose("the connection was cut")

    with stage.at(names_to_members(m.GcMark, lose)):
        await stage.collect()
    await stage.read_all()


async def a_name_moves_behind_the_walk(stage: Stage) -> None:
    """While the walk reads a manifest, an object that it has not met is copied to a node that it has passed."""
    wanted = stage.payload()
    await stage.put("folder/", stage.payload())
    await stage.put("long", stage.payload(), stage.payload())
    for number in range(4):
        await stage.put(f"o{number}", stage.payload())
    await stage.put("last", wanted)
    await stage.collect(OLD)

    async def move(_: Connection, __: m.Request) -> None:
        await stage.copy("last", "folder/")
        await stage.remove("last")

    with stage.at(names_to_members(m.ReadChunks, move)):
        await stage.collect()
    await stage.read_all()


async def members_restart_during_a_put(stage: Stage) -> None:
    """Between the store and the commit of a put members restart, one after the other, and gc runs."""
    await stage.collect(stage.rng.randint(0, 3))
    count = stage.rng.randint(1, len(stage.lake.members))

    async def restart() -> None:
        for place in stage.rng.sample(stage.lake.members, count):
            await stage.restart(place, power=stage.rng.random() < 0.5)
        await stage.clean()
        await stage.collect()

    await stage.put_in_session("late", (stage.payload(),), partial(trio.sleep, 0.0), restart)
    await stage.read_all()


async def a_put_outlives_cycles(stage: Stage) -> None:
    """A put is so long that its chunks are freed before its commit; the same content comes and goes elsewhere."""
    content = (stage.payload(), stage.payload())[: stage.rng.randint(1, 2)]
    cycles = stage.rng.randint(2, 4)

    async def outlive() -> None:
        await stage.put("other", content[0])
        await stage.remove("other")
        await stage.collect(cycles)

    await stage.put_in_session("late", content, partial(trio.sleep, 0.0), outlive)
    await stage.read_all()


async def tables_change_during_a_cycle(stage: Stage) -> None:
    """A shard was stored elsewhere while its home was away; in a cycle that place becomes its home, by a new table."""
    payload = stage.payload()
    home = stage.rng.choice(stage.homes(payload))
    epoch = stage.tables[0].ring_epoch

    async def new_table() -> None:
        with trio.move_on_after(200.0):
            await until(lambda: stage.tables[0].ring_epoch > epoch and len(stage.tables) == 1)
            await stage.clean()

    async with stage.gone(home):
        await stage.put("o", payload)
        await stage.collect(OLD)
        with stage.before_sweeps(new_table):
            await stage.collect()
        await stage.lose_for_good(home)
    await stage.read_all()


async def some_members_sweep(stage: Stage) -> None:
    """Some members sweep a removed content, others miss the cycle; then it is stored again, by another head."""
    content = (stage.payload(), stage.payload())[: stage.rng.randint(1, 2)]
    one, other = stage.heads
    await stage.put("o", *content, head=one)
    await stage.remove("o")
    await stage.collect()
    sweeper = stage.rng.choice(stage.homes(content[0]))

    async def lose(connection: Connection, _: m.Request) -> None:
        if connection.far != sweeper.host:
            connection.lose("the connection was cut")

    with stage.at(PointOf(m.GcBegin, lose, near=NAMES_HOST, is_each=True)):
        await stage.collect()
    await trio.sleep(0.5)
    await stage.put_in_session("again", content, head=other)
    await stage.read_all()


async def a_shard_is_made_anew_during_a_put(stage: Stage) -> None:
    """Between the store and the commit of a put a shard is damaged, and made anew; then gc runs."""
    await stage.collect(4)
    payload = stage.payload()

    async def damage() -> None:
        place = stage.rng.choice(stage.homes(payload))
        stage.flip(place)
        await stage.check_shards(place)
        await stage.clean()
        await stage.collect()

    await stage.put_in_session("late", (payload,), partial(trio.sleep, 0.0), damage)
    await stage.read_all()


async def a_stray_is_touched(stage: Stage) -> None:
    """A shard elsewhere was copied home; before it is dropped a head that cannot reach home counts it as stored."""
    await stage.collect(stage.rng.randint(0, 3))
    payload = stage.payload()
    home = stage.rng.choice(stage.homes(payload))
    head = stage.rng.choice(stage.heads)
    finish = trio.Event()
    offered = trio.Event()

    async def touch(_: Connection, __: m.Request) -> None:
        await stage.collect()
        await trio.sleep(1.0)  # until the head knows the generation
        with stage.cut(home, head):
            nursery.start_soon(late_put)
            with trio.move_on_after(HELD_S):
                await offered.wait()

    async def late_put() -> None:
        await stage.put_in_session("late", (payload,), _once(offered.set), _waits(finish), head=head)

    async with trio.open_nursery() as nursery:
        with stage.held(m.ListShards, near=NAMES_HOST):
            async with stage.away(home):
                await stage.put("o", payload)
            await stage.remove("o")
        with stage.at(names_to_members(m.DropShards, touch)) as point:
            await stage.clean()
        if point.is_met:
            await stage.clean()
            await stage.collect()
        finish.set()
    await stage.read_all()


def _once(act: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def do() -> None:
        act()
        await trio.lowlevel.checkpoint()

    return do


def _waits(event: trio.Event) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await event.wait()

    return wait
