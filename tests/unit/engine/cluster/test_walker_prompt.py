"""Members that come back let the partitions that wait for them be walked at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.walker import walker_pass
from lakefs.cluster import placing, table_format
from lakefs.errors import EngineUnreachable
from lakefs.ids import MemberId, RingEpoch
from lakefs.wire import messages as m
from tests.unit.engine.cluster.test_walker_pass import Running, running
from tests.unit.engine.cluster.walker_rig import BITS, PARTITIONS, SIZES, member_id

GONE = member_id(2)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have four rows."""
    for module in (placing, table_format, walker_pass):
        monkeypatch.setattr(module, "PARTITION_BITS", BITS)


def while_it_runs(scenario: Callable[[Running], Awaitable[None]]) -> None:
    """Run a scenario beside a walker that has been through all partitions."""

    async def main(one: Running) -> None:
        await one.made.write(*SIZES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.made.coordinator.end_leases)
            nursery.start_soon(one.walks.run, one.made.coordinator)
            await trio.sleep(10)
            assert one.walks.is_healed
            await scenario(one)
            nursery.cancel_scope.cancel()

    running(main)


async def is_clean(one: Running) -> bool:
    return await one.made.state.dirty() == []


@pytest.mark.parametrize("away_s", [3, 30, 700])
def test_what_a_member_was_missed_for_is_walked_when_it_is_back(away_s: int) -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        made.away.add(GONE)
        chunk = next(iter(made.content))
        number = made.tables[0].homes(chunk).index(GONE)
        await made.state.note_dirty(PARTITIONS, RingEpoch(1))
        await trio.sleep(6 + away_s)
        assert not await is_clean(one)
        if number in (0, 4, 5):
            await made.take(made.shard(chunk, number))
        made.away.clear()
        await trio.sleep(1.6)
        assert await is_clean(one)
        await made.check()

    while_it_runs(scenario)


def test_what_is_noted_again_while_it_is_walked_is_walked_again_at_once() -> None:
    async def scenario(one: Running) -> None:
        noted: list[bool] = []

        async def note(to: MemberId, request: m.Request) -> None:
            if isinstance(request, m.ListShards) and not noted:
                noted.append(True)
                await one.made.state.note_dirty(PARTITIONS, RingEpoch(1))

        one.made.before = [note]
        await one.made.state.note_dirty(PARTITIONS, RingEpoch(1))
        await trio.sleep(8)
        assert noted
        assert await is_clean(one)

    while_it_runs(scenario)


def test_a_member_that_started_anew_during_a_walk_is_asked_again_soon() -> None:
    """It fails once, and is reachable again before anybody looks."""

    async def scenario(one: Running) -> None:
        failed: list[bool] = []

        async def fail(to: MemberId, request: m.Request) -> None:
            if to == GONE and isinstance(request, m.ListShards) and not failed:
                failed.append(True)
                raise EngineUnreachable("the connection was lost")

        one.made.before = [fail]
        await one.made.state.note_dirty(PARTITIONS, RingEpoch(1))
        await trio.sleep(6 + 1.6)
        assert failed
        assert await is_clean(one)

    while_it_runs(scenario)


def test_a_member_that_answers_but_does_not_list_is_not_asked_all_the_time() -> None:
    async def scenario(one: Running) -> None:
        asked = 0

        async def fail(to: MemberId, request: m.Request) -> None:
            nonlocal asked
            if to == GONE and isinstance(request, m.ListShards):
                asked += 1
                raise EngineUnreachable("it does not list")

        one.made.before = [fail]
        await one.made.state.note_dirty(PARTITIONS[:1], RingEpoch(1))
        await trio.sleep(900)
        assert 15 <= asked <= 20

    while_it_runs(scenario)


def test_while_a_member_is_away_what_waits_for_it_is_not_walked_more_often_however_often_it_is_noted() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        made.away.add(GONE)
        before = one.walks.totals.partitions
        for _ in range(300):
            await made.state.note_dirty(PARTITIONS, RingEpoch(1))
            await trio.sleep(2)
        assert one.walks.totals.partitions - before <= 11 * len(PARTITIONS)
        made.away.clear()
        await trio.sleep(1.6)
        assert await is_clean(one)

    while_it_runs(scenario)
