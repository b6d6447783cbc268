"""Scenes of heads: chunks are stored and read while members are away, slow, or lie."""

from __future__ import annotations

from collections import Counter

import trio

from lakefs.wire import messages as m
from tests.sim.cluster.liars import Lie
from tests.sim.cluster.network import Connection
from tests.sim.cluster.places import MemberPlace
from tests.sim.cluster.points import PointOf
from tests.sim.cluster.quiet import chunks_of
from tests.sim.cluster.stage import HELD_S, Stage


async def a_put_while_members_are_away(stage: Stage) -> None:
    """m members are away; when an object has been put, the one that holds most of it loses its device."""
    payload = stage.payload()
    homes = stage.homes(payload)
    parity = stage.tables[0].protection.parity
    async with stage.away(*stage.rng.sample(homes, parity), seen=True):
        await stage.put("o", payload)
        await _lose_fullest(stage, "o", payload)
    await stage.healed()
    await stage.read_all()


async def a_put_with_too_few_members(stage: Stage) -> None:
    """All but a few members are away when an object is put, which may fail; then the fullest loses its device."""
    payload = stage.payload(sizes=(900, 5_000))
    places = stage.lake.members
    async with stage.away(*stage.rng.sample(places, len(places) - 1), seen=True):
        await stage.put("o", payload)
        await _lose_fullest(stage, "o", payload)
    await stage.healed()
    await stage.read_all()


async def _lose_fullest(stage: Stage, name: str, payload: bytes) -> None:
    """Lose the member with most shards of a chunk, if its put was answered."""
    held: Counter[MemberPlace] = Counter(stage.holders(payload))
    if stage.is_bound(name) and held:
        place, _ = held.most_common(1)[0]
        stage.lose_soon(place)
        await trio.sleep(1.0)


async def a_member_lies_for_long(stage: Stage) -> None:
    """A member lies to heads for so long that no client waits for its end; objects are read again and again."""
    names = [f"o{number}" for number in range(4)]
    payloads = tuple([stage.payload(sizes=(900, 70_000, 140_000, 300_000)) for _ in names])
    for name, payload in zip(names, payloads, strict=True):
        await stage.put(name, payload)
    await stage.put("long", *payloads[:2])
    for head in stage.heads:
        await stage.restart_head(head)  # it has no memory of lengths and checksums
    manifest, _ = chunks_of(payloads[:2])[-1]
    for lie in (Lie.BYTES, Lie.LENGTH, Lie.LONGER):
        first = stage.place(stage.tables[0].homes(manifest)[0])
        with stage.lying(stage.rng.choice((first, first, *stage.lake.members)), lie):
            await stage.read_all()
        await stage.healed()


async def a_member_lies_of_a_length(stage: Stage) -> None:
    """Heads that know no length read a manifest, and its first home says another length, maybe with bytes to it."""
    payloads = (stage.payload(), stage.payload())
    await stage.put("long", *payloads)
    manifest, _ = chunks_of(payloads)[-1]
    for lie in stage.rng.sample((Lie.LENGTH, Lie.LONGER), 2):
        for head in stage.heads:
            await stage.restart_head(head)
        with stage.lying(stage.place(stage.tables[0].homes(manifest)[0]), lie):
            await stage.read_all()
        await stage.healed()


async def a_put_is_slow(stage: Stage) -> None:
    """A head cannot reach a home, stores elsewhere, and is slow: a walk may pass before the shards are there."""
    payload = stage.payload()
    home = stage.rng.choice(stage.homes(payload))
    head = stage.rng.choice(stage.heads)

    async def wait(_: Connection, __: m.Request) -> None:
        await trio.sleep(0.5)
        await stage.clean(HELD_S)

    with stage.cut(home, head):
        await trio.sleep(1.0)
        await stage.put("before", stage.payload(), head=head)
        await stage.clean()
        with stage.at(PointOf(m.StoreShards, wait, near=head.host, is_each=True)):
            await stage.put("o", payload, head=head)
        await stage.clean()
    await stage.read_all()
