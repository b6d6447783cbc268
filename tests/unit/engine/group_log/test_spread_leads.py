"""A machine that leads names shards leaves a free lead to others first, and takes it if they do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.group_log.spread_leads import LEAVE_S, SpreadLeads
from lakefs.ids import NamesShard
from tests.memory_coordinator import memory_coordinator
from tests.replica_rig import KEYS, Replica, place_of
from tests.unit.support.metadata_rig import run

FIRST, SECOND, THIRD = map(NamesShard, range(3))


async def waited(leads: SpreadLeads, shard: NamesShard) -> float:
    began = trio.current_time()
    await leads.leave(shard)
    return trio.current_time() - began


def test_who_leads_nothing_else_waits_for_nothing() -> None:
    async def scenario() -> None:
        leads = SpreadLeads()
        assert await waited(leads, FIRST) == 0
        with leads.taking(FIRST):
            assert await waited(leads, FIRST) == 0, "its own shard is no other one"

    run(scenario)


def test_each_shard_that_is_led_here_costs_a_pause() -> None:
    async def scenario() -> None:
        leads = SpreadLeads()
        with leads.taking(FIRST):
            assert await waited(leads, THIRD) == pytest.approx(LEAVE_S, abs=0.06)
            with leads.taking(SECOND):
                assert await waited(leads, THIRD) == pytest.approx(2 * LEAVE_S, abs=0.06)
        assert await waited(leads, THIRD) == 0

    run(scenario)


def test_who_gets_no_other_lead_waits_no_longer() -> None:
    async def scenario() -> None:
        leads = SpreadLeads()
        with leads.taking(FIRST):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_assert_waits_less, leads)
                await trio.sleep(LEAVE_S / 3)
                leads._taken.clear()  # the other machine was faster there

    run(scenario)


async def _assert_waits_less(leads: SpreadLeads) -> None:
    assert await waited(leads, SECOND) < LEAVE_S / 2


def _with_two(scenario: Callable[[Replica, Replica], Awaitable[None]]) -> None:
    """Run with two replicas of which the first one's machine leads another shard."""

    async def main() -> None:
        async with memory_coordinator() as coordinator:
            await coordinator.transact([], [Put(KEYS.origin, place_of(coordinator, 1).replica)])
            busy, free = Replica(coordinator, 1), Replica(coordinator, 2)
            with busy.place.leads.taking(SECOND):
                await scenario(busy, free)

    run(main)


def test_of_two_replicas_that_may_lead_the_one_does_whose_machine_leads_less() -> None:
    async def scenario(busy: Replica, free: Replica) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy.run)
            await busy.leads.wait()
            nursery.start_soon(free.run)
            await trio.sleep(1)
            await busy.stop()
            again = busy.again()
            again.place = busy.place
            nursery.start_soon(again.run)
            await free.leads.wait()
            await trio.sleep(5)
            assert not again.leads.is_set()
            nursery.cancel_scope.cancel()

    _with_two(scenario)


def test_a_killed_leader_that_starts_again_leads_at_once() -> None:
    async def scenario(busy: Replica, free: Replica) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy.run)
            await busy.leads.wait()
            await busy.kill()
            again = busy.again()
            again.place = busy.place
            began = trio.current_time()
            nursery.start_soon(again.run)
            await again.leads.wait()
            assert trio.current_time() - began < LEAVE_S / 2
            nursery.cancel_scope.cancel()

    _with_two(scenario)
