"""A held lease: kept alive, counted from the sending, and never taken for longer than it lasts."""

from __future__ import annotations

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.held_lease import hold_lease
from lakefs.errors import EngineUnreachable
from lakefs.ids import LeaseId
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.sim.world.clock import SimClock
from tests.unit.support.metadata_rig import run


class SlowCoordinator(MemoryCoordinator):
    """A coordinator whose answers about leases are late, or whose calls fail."""

    late_s = 0.0
    is_cut = False
    kept_at = 0.0

    async def keep_alive(self, lease: LeaseId) -> bool:
        if self.is_cut:
            raise EngineUnreachable("cut off")
        await trio.sleep(self.late_s)
        is_kept = await super().keep_alive(lease)
        self.kept_at = trio.current_time()
        await trio.sleep(self.late_s)
        return is_kept


def test_a_held_lease_lasts_as_long_as_its_block_and_ends_with_it() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            async with hold_lease(coordinator, SimClock(), 4) as lease:
                await coordinator.transact([], [Put(b"a", b"", lease.id)])
                for _ in range(30):
                    await trio.sleep(1)
                    assert 2 < lease.left_s() <= 4
                assert b"a" in coordinator.entries
                assert not lease.ended.is_set()
            assert b"a" not in coordinator.entries
            assert lease.left_s() == 0

    run(scenario)


def test_the_holder_counts_from_the_sending_so_it_ends_before_the_coordinator_does() -> None:
    async def scenario() -> None:
        coordinator = SlowCoordinator()
        coordinator.late_s = 0.5
        async with hold_lease(coordinator, SimClock(), 4) as lease:
            for _ in range(40):
                await trio.sleep(0.25)
                until = trio.current_time() + lease.left_s()
                assert until <= max(coordinator.kept_at, 0.0) + 4
            assert not lease.ended.is_set()

    run(scenario)


@pytest.mark.parametrize("returns", [False, True])
def test_a_holder_that_is_cut_off_goes_on_until_its_time_is_over_and_then_knows_it(returns: bool) -> None:
    async def scenario() -> None:
        coordinator = SlowCoordinator()
        async with hold_lease(coordinator, SimClock(), 4) as lease:
            coordinator.is_cut = True
            await trio.sleep(3.5)
            assert 0 < lease.left_s() <= 0.5
            coordinator.is_cut = not returns
            await trio.sleep(1)
            assert lease.ended.is_set() is not returns
            assert (lease.left_s() > 0) is returns

    run(scenario)


def test_a_lease_that_the_coordinator_ended_is_known_as_ended_and_the_block_goes_on() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, hold_lease(coordinator, SimClock(), 4) as lease:
            await coordinator.revoke(lease.id)
            with trio.fail_after(2):
                await lease.ended.wait()
            assert lease.left_s() == 0
            assert await coordinator.lease(4) != lease.id

    run(scenario)


def test_an_answer_that_does_not_come_does_not_prolong_a_lease() -> None:
    async def scenario() -> None:
        coordinator = SlowCoordinator()
        coordinator.late_s = 100.0
        async with hold_lease(coordinator, SimClock(), 4) as lease:
            with trio.fail_after(4.1):
                await lease.ended.wait()

    run(scenario)
