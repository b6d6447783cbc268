"""A replica whose disk is full leaves the lead to one that has room, and to nobody who is not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.coordinator.records import ReplicaRecord, decode
from engine.format.layouts import Table
from engine.group_log.full_disk import FULL_LEAVE_S
from engine.group_log.log_bounds import LEADER_LEASE_S, REPLICA_SIGN_S
from lakefs.errors import CoordinatorLost, StoreFull
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.replica_rig import KEYS, Replica, replicas_on
from tests.unit.support.metadata_rig import put, run as run_on_a_clock_that_jumps

NAMES = Table.NAMES
ENOUGH_S = 2 * REPLICA_SIGN_S + LEADER_LEASE_S


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario; it fails when it stands still."""

    async def limited() -> None:
        with trio.fail_after(600):
            await scenario()

    run_on_a_clock_that_jumps(limited)


def fill(replica: Replica, left_bytes: int = -1) -> None:
    """Let others take the room on a replica's disk, but for so much more than its present records still need."""
    assert replica.metadata is not None
    replica.disk.capacity_bytes -= replica.disk.free_bytes() - replica.metadata.owed_bytes() - left_bytes


async def said(coordinator: MemoryCoordinator, replica: Replica) -> ReplicaRecord:
    entry = (await coordinator.get(KEYS.replica(replica.place.replica))).entry
    assert entry is not None
    return decode(ReplicaRecord, entry.value)


@pytest.mark.parametrize("count", [2, 3])
def test_another_one_leads_when_the_disk_of_the_one_that_leads_is_full(count: int) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, count) as (leader, *others):
            await put(leader.led, (NAMES, b"a", b"1"))
            fill(leader)
            assert not leader.led.has_room()
            with trio.fail_after(ENOUGH_S):
                await leader.ended.wait()
                while not any(other.leads.is_set() for other in others):  # noqa: ASYNC110 - on a clock that jumps
                    await trio.sleep(0.1)
            assert isinstance(leader.error, CoordinatorLost)
            [next_one] = [other for other in others if other.leads.is_set()]
            assert next_one.contents()[NAMES, b"a"] == b"1"
            await put(next_one.led, (NAMES, b"a", b"2"))
            assert (await said(coordinator, leader)).is_full

    run(scenario)


def test_where_no_other_disk_has_room_the_one_that_leads_goes_on_and_refuses_what_grows() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, other):
            await put(leader.led, (NAMES, b"a", b"1"))
            fill(other)
            while not (await said(coordinator, other)).is_full:  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.1)
            fill(leader)
            await trio.sleep(ENOUGH_S)
            assert leader.leads.is_set()
            assert not leader.ended.is_set()
            assert not other.leads.is_set()
            with pytest.raises(StoreFull):
                leader.led._refuse_without_room()
            other.disk.capacity_bytes *= 2
            with trio.fail_after(ENOUGH_S):
                await other.leads.wait()

    run(scenario)


def test_two_replicas_that_are_nearly_full_do_not_leave_the_lead_to_each_other() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, other):
            assert leader.metadata is not None
            assert other.metadata is not None
            for metadata in (leader.metadata, other.metadata):
                metadata._headroom_bytes = 2 << 20
            fill(other, left_bytes=3 << 19)
            assert other.metadata.has_room()
            await trio.sleep(REPLICA_SIGN_S)
            fill(leader, left_bytes=1 << 19)
            await trio.sleep(ENOUGH_S)
            assert leader.leads.is_set()
            assert not leader.ended.is_set()
            fill(other, left_bytes=3 << 20)
            with trio.fail_after(ENOUGH_S):
                await other.leads.wait()

    run(scenario)


def test_the_lead_is_left_to_nobody_who_is_not_there() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, other):
            await put(leader.led, (NAMES, b"a", b"1"))
            await other.kill()
            fill(leader)
            await trio.sleep(ENOUGH_S)
            assert leader.leads.is_set()
            assert not leader.ended.is_set()

    run(scenario)


def test_a_replica_whose_disk_is_full_takes_a_free_lead_behind_the_others_or_when_there_is_no_other() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 3) as (leader, full, other):
            fill(full)
            await leader.stop()
            with trio.fail_after(FULL_LEAVE_S):
                await other.leads.wait()
            assert not full.leads.is_set()
            began = trio.current_time()
            await other.stop()
            await full.leads.wait()
            assert trio.current_time() - began < FULL_LEAVE_S + 1

    run(scenario)
