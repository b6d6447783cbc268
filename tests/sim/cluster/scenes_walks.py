"""Scenes of the walker and of tables: partitions are noted again, homes are full, members come and go."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import trio

from lakefs.cluster.members import Standing
from lakefs.cluster.table import Table
from lakefs.ids import MemberId, data_chunk_id
from lakefs.wire import messages as m
from tests.sim.cluster.lake import until
from tests.sim.cluster.network import Connection
from tests.sim.cluster.places import NAMES_HOST, MemberPlace
from tests.sim.cluster.points import names_to_members
from tests.sim.cluster.stage import HEARD_S, SIZES, Stage
from tests.sim.judges.history import SimFailure


async def a_partition_is_noted_again(stage: Stage) -> None:
    """While a walk drops a shard elsewhere, a head stores another chunk of that partition elsewhere."""
    first = stage.payload()
    second = stage.payload(beside=first)
    home = stage.rng.choice(stage.homes(first))
    head = stage.rng.choice(stage.heads)

    async def put(_: Connection, __: m.Request) -> None:
        await stage.put("second", second, head=head)

    with stage.cut(home, head):
        with stage.at(names_to_members(m.DropShards, put)):
            await stage.put("first", first, head=head)
            await stage.clean()
    await stage.read_all()


async def a_home_is_full(stage: Stage) -> None:
    """A home is full, so a shard lies elsewhere, and the walker cannot move it; another home loses its device."""
    payload = stage.payload(sizes=SIZES[-1:])
    homes = stage.homes(payload)
    home, *others = stage.rng.sample(homes, len(homes))
    async with stage.full(home):
        await stage.fill(home)
        await stage.put("o", payload)
        await trio.sleep(10.0)
        await stage.lose(others[0])
    await stage.healed()
    await stage.read_all()


async def a_home_is_full_for_long(stage: Stage) -> None:
    """A home is full, and walks cannot move a shard to it; later it has room."""
    home = stage.rng.choice(stage.lake.members)
    payloads = [stage.payload(home=home, sizes=SIZES[-1:]) for _ in range(3)]
    async with stage.full(home):
        await stage.fill(home)
        for number, payload in enumerate(payloads):
            await stage.put(f"o{number}", payload)
        await trio.sleep(stage.rng.choice((8.0, 20.0)))
    await stage.read_all()


async def a_stray_is_damaged(stage: Stage) -> None:
    """A home is away, a shard lies elsewhere and is damaged there; then the home comes back."""
    payload = stage.payload()
    homes = stage.homes(payload)
    home = stage.rng.choice(homes)
    async with stage.away(home, seen=True):
        await stage.put("o", payload)
        holders = [place for place in stage.holders(payload) if place not in homes]
        if holders:
            stage.flip(holders[0])
            await stage.check_shards(holders[0])
    await stage.healed()
    await stage.read_all()


async def a_head_learns_late(stage: Stage) -> None:
    """A head learns late of a table: it stores by the older one, when the walk has just passed."""
    epoch = stage.tables[0].ring_epoch
    older = stage.tables[0]
    head, other = stage.rng.sample(stage.heads, 2)
    for number in range(6):
        await stage.put(f"o{number}", stage.payload())
    leaving = stage.rng.choice(stage.lake.members)
    dropped = trio.Event()

    async def put(_: Connection, __: m.Request) -> None:
        dropped.set()
        for number in range(6):
            payload = _homed(stage, older, leaving)
            await stage.put(f"late{number}", payload, head=head)

    with stage.at(names_to_members(m.DropShards, put)):
        with stage.deaf(head):
            await stage.drain(leaving, head=other)
            with trio.move_on_after(60.0):
                await dropped.wait()
                await until(lambda: stage.tables[0].ring_epoch > epoch and len(stage.tables) == 1)
    await stage.read_all()


def _homed(stage: Stage, table: Table, place: MemberPlace) -> bytes:
    """Return bytes of which a member is home by a table."""
    while True:
        payload = stage.payload()
        if place.id in table.homes(data_chunk_id(payload)):
            return payload


async def two_are_drained(stage: Stage) -> None:
    """Two members are drained, one right behind the other; objects are read before the walker has moved anything."""
    for number in range(5):
        await stage.put(f"o{number}", stage.payload())
    epoch = stage.tables[0].ring_epoch
    with stage.held(m.ListShards, near=NAMES_HOST):
        for count, place in enumerate(stage.rng.sample(stage.lake.members, 2), 1):
            await stage.drain(place)
            await until(lambda count=count: stage.tables[0].ring_epoch >= epoch + count)  # type: ignore[misc]
        await trio.sleep(3.0)
        await stage.read_all()
    await stage.healed()
    await stage.read_all()


async def drains_wait_for_each_other(stage: Stage) -> None:
    """More than m homes of a row are drained at once, in some lakes another member's device is lost meanwhile.

    The members leave in turn, no row loses more than m of them from one table to the next, and each is let go.
    """
    for number in range(6):
        await stage.put(f"o{number}", stage.payload())
    payload = stage.payload(sizes=SIZES[-1:])
    await stage.put("row", payload)
    parity = stage.tables[0].protection.parity
    leaving = stage.rng.sample(stage.homes(payload), parity + 1)
    staying = [place for place in stage.lake.members if place not in leaving]
    async with stage.following_tables() as tables:
        for place in leaving:
            await stage.drain(place)
        if stage.rng.random() < 0.4:
            await trio.sleep(stage.rng.choice((0.5, 5.0)))
            stage.lose_soon(stage.rng.choice(staying))
        await stage.read_all()
        await stage.put("new", stage.payload())
        left = {place.id for place in leaving}
        await stage.wait(lambda: len(stage.tables) == 1 and left.isdisjoint(_placed(stage.tables[0])), "all have left")
    for older, newer in pairwise(tables):
        worst = max(_homes_lost(older, newer, left))
        if worst > max(1, parity):
            raise SimFailure(f"a row lost {worst} homes that are drained, in ring epoch {newer.ring_epoch}")
    await stage.healed()
    for place in leaving:
        await stage.let_go(place)
    await stage.healed()
    await stage.read_all()


def _placed(table: Table) -> set[MemberId | None]:
    """Return the members that have places in a table."""
    return {member.id for member in table.members if member.state is Standing.IN}


def _homes_lost(older: Table, newer: Table, leaving: Set[MemberId | None]) -> Iterator[int]:
    """Yield how many homes that leave each row has in a table, and not in the next one."""
    for before, after in zip(older.rows, newer.rows, strict=True):
        width = older.protection.width
        kept = {newer.members[index].id for index in after[:width]}
        yield len({older.members[index].id for index in before[:width]} & leaving - kept)


async def a_member_is_out(stage: Stage) -> None:
    """A member is out, its places go to others; objects are removed and put before it returns."""
    for number in range(8):
        await stage.put(f"o{number}", stage.payload())
    epoch = stage.tables[0].ring_epoch
    gone = stage.rng.choice(stage.lake.members)
    async with stage.away(gone):
        with trio.move_on_after(100.0):
            await until(lambda: stage.tables[0].ring_epoch > epoch and len(stage.tables) == 1)
        for number in stage.rng.sample(range(8), 3):
            await stage.remove(f"o{number}")
        for number in range(3):
            await stage.put(f"new{number}", stage.payload())
        await stage.collect(stage.rng.randint(0, 3))
    await stage.clean(30.0)
    await stage.collect(3)  # shards of what was removed, too few to make it, keep a partition dirty until gc
    await stage.healed()
    await stage.read_all()


async def many_tables_and_a_loss(stage: Stage) -> None:
    """Members are added and drained, and no walk passes between; then a home of the newest table is lost."""
    for number in range(4):
        await stage.put(f"o{number}", stage.payload())
    lost, drained = stage.rng.sample(stage.lake.members, 2)
    with stage.held(m.ListShards, near=NAMES_HOST):
        for change in (stage.add, stage.add, partial(stage.drain, drained)):
            epoch = stage.tables[0].ring_epoch
            await change()
            await stage.wait(lambda epoch=epoch: stage.tables[0].ring_epoch > epoch, "a table is made")  # type: ignore[misc]
        stage.lose_soon(lost)
        await trio.sleep(1.0)
    await stage.healed()
    await stage.read_all()


async def more_than_m_are_unheard(stage: Stage) -> None:
    """Homes are cut off from the names alone: one, which is out before walks pass, then more, over m in all."""
    payload = stage.payload()
    await stage.put("o", payload)
    parity, epoch = stage.tables[0].protection.parity, stage.tables[0].ring_epoch
    one, *others = stage.rng.sample(stage.homes(payload), parity + 1)
    with ExitStack() as cut:
        cut.enter_context(stage.unheard(one))
        with stage.held(m.ListShards, near=NAMES_HOST):
            await stage.wait(lambda: stage.tables[0].ring_epoch > epoch, "a member is out")
            cut.enter_context(stage.unheard(*others))
        await trio.sleep(stage.rng.choice((30.0, 60.0)))
        await stage.put("new", stage.payload())
        await stage.read_all()
    await stage.healed()
    await stage.read_all()


async def a_device_is_put_back(stage: Stage) -> None:
    """An image is taken of a member's device, objects are put and removed, and it is put back while nobody looks."""
    place = stage.rng.choice(stage.lake.members)
    for number in range(4):
        await stage.put(f"o{number}", stage.payload(home=place))
    putting_back = stage.putting_back
    putting_back.begin(place)
    image = await putting_back.image_of(place)
    assert image is not None
    for number in range(stage.rng.randint(2, 5)):
        await stage.put(f"new{number}", stage.payload(home=place))
    await stage.remove("o0")
    await stage.collect(stage.rng.randint(0, 3))
    await trio.sleep(stage.lake.world.settings.look_interval_s + HEARD_S)
    await putting_back.write_back(place, image)
    putting_back.end(place)
    await stage.clean(30.0)
    await stage.collect(3)  # shards of what was removed and freed elsewhere keep their partition dirty until gc
    await stage.healed()
    await stage.read_all()


async def a_member_forgets(stage: Stage) -> None:
    """A member's disk lies about syncs, and forgets them when the power fails: it comes back with less."""
    place = stage.rng.choice(stage.lake.members)
    for number in range(3):
        await stage.put(f"o{number}", stage.payload())
    stage.lies_about_syncs(place)
    for number in range(3, stage.rng.randint(4, 8)):
        await stage.put(f"o{number}", stage.payload(sizes=SIZES[:2]))
    await stage.lose_power(place)
    await stage.scrub()  # payload may be lost that records name
    await stage.healed()
    await stage.read_all()
