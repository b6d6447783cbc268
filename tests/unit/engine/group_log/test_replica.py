"""Replicas of names: one leads, the others follow, and another one leads when it is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.coordinator.coordinator import Delete, Page, Put
from engine.coordinator.records import LogRecord, decode
from engine.format.group_parts import pack_parts
from engine.format.layouts import Table
from engine.group_log.handing_over import asking_to_lead
from engine.metadata.group_log import ClosedGroup, PayloadBatch
from engine.tables.overlay import Layer
from lakefs.errors import CoordinatorLost, StoreUnusable
from lakefs.ids import Revision, Sequence
from lakefs.limits import MIB
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.replica_rig import KEYS, Replica, replicas_on
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import SMALL, opened, put, run as run_on_a_clock_that_jumps

NAMES = Table.NAMES


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario; it fails when it stands still."""

    async def limited() -> None:
        with trio.fail_after(600):
            await scenario()

    run_on_a_clock_that_jumps(limited)


async def same(*replicas: Replica) -> None:
    """Wait until replicas have the same records."""
    while any(replica.contents() != replicas[0].contents() for replica in replicas[1:]):  # noqa: ASYNC110 - it jumps
        await trio.sleep(0.1)


def test_followers_have_what_the_leader_has_committed() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 3) as (leader, *followers):
            for number in range(20):
                await put(leader.led, (NAMES, b"%d" % number, b"v"))
            await same(leader, *followers)
            assert not any(follower.leads.is_set() for follower in followers)

    run(scenario)


def test_when_the_leader_stops_another_has_all_it_said_and_leads_at_once() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"1"))
            had = leader.contents()
            await leader.stop()
            began = trio.current_time()
            await follower.leads.wait()
            assert trio.current_time() - began < 0.5
            assert follower.contents() == had
            await put(follower.led, (NAMES, b"a", b"2"))

    run(scenario)


def test_when_the_leader_dies_another_leads_once_its_lease_is_over() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"1"))
            await leader.kill()
            began = trio.current_time()
            await follower.leads.wait()
            assert 1 < trio.current_time() - began < 6.5
            assert follower.contents()[NAMES, b"a"] == b"1"

    run(scenario)


def test_the_next_leader_reads_no_group_again_that_it_has_followed() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await coordinator.transact([], [Put(KEYS.hold(b"h" * 16), b"")])
            for number in range(20):
                await put(leader.led, (NAMES, b"%d" % number, b"v"))
            await same(leader, follower)
            await trio.sleep(2)
            had = leader.led.durable_sequence
            read: list[bytes] = []
            find = coordinator.range

            async def noted(begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
                page = await find(begin, end, limit=limit, after=after)
                read.extend(entry.key for entry in page.entries)
                return page

            coordinator.range = noted  # type: ignore[method-assign]
            await leader.stop()
            await follower.leads.wait()
            await put(follower.led, (NAMES, b"a", b"1"))
            assert not [key for key in read if KEYS.place(key)]
            await coordinator.transact([], [Delete(KEYS.hold(b"h" * 16))])
            await trio.sleep(3)
            assert await _trimmed(coordinator) == had, "it knows all their parts all the same"
            assert len((await find(*KEYS.groups, limit=100)).entries) == follower.led.durable_sequence - had

    run(scenario)


def test_a_leader_that_is_started_again_leads_at_once() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 1) as (leader,):
            await put(leader.led, (NAMES, b"a", b"1"))
            await leader.kill()
            began = trio.current_time()
            leader = leader.again()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leader.run)
                await leader.leads.wait()
                assert trio.current_time() - began < 0.5
                assert leader.contents()[NAMES, b"a"] == b"1"
                nursery.cancel_scope.cancel()

    run(scenario)


def test_a_leader_whose_lease_is_over_reads_and_decides_nothing() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            metadata = leader.led
            await put(metadata, (NAMES, b"a", b"1"))
            coordinator.keep_alive = _silent  # type: ignore[method-assign]
            while not leader.ended.is_set():
                try:
                    leader.contents()
                except CoordinatorLost:
                    assert not follower.leads.is_set()
                    break
                await trio.sleep(0.1)
            with pytest.raises(CoordinatorLost):
                await put(metadata, (NAMES, b"b", b"1"))
            await leader.ended.wait()
            assert isinstance(leader.error, CoordinatorLost)

    run(scenario)


async def _silent(lease: object) -> bool:
    await trio.sleep_forever()
    raise AssertionError


def test_a_leader_that_was_deposed_appends_nothing() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            metadata = leader.led
            await put(metadata, (NAMES, b"a", b"1"))
            await coordinator.transact([], [Delete(KEYS.leader)])
            await follower.leads.wait()
            with pytest.raises(CoordinatorLost, match="another replica leads"):
                await put(metadata, (NAMES, b"a", b"2"))
            assert follower.contents()[NAMES, b"a"] == b"1"
            await leader.ended.wait()

    run(scenario)


def test_a_replica_that_asks_for_it_leads_and_the_others_do_not_take_it_back() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 3) as (leader, second, third):
            await put(leader.led, (NAMES, b"a", b"1"))
            async with asking_to_lead(coordinator, third.place.clock, KEYS, third.place.replica):
                await third.leads.wait()
                assert isinstance(leader.error, CoordinatorLost)
                await put(third.led, (NAMES, b"a", b"2"))
                await third.stop()
                await trio.sleep(10)
                assert not second.leads.is_set()
            await second.leads.wait()
            assert second.contents()[NAMES, b"a"] == b"2"

    run(scenario)


@pytest.mark.parametrize("count", [100, 275], ids=["3 MB", "nearly 8 MiB"])
def test_a_group_of_several_parts_is_taken_whole(count: int) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            values = {b"%d" % number: bytes([number % 256]) * 30000 for number in range(count)}
            await put(leader.led, *((NAMES, key, value) for key, value in values.items()))
            await same(leader, follower)
            assert leader.led.durable_sequence == 1, "it is one group"
            assert follower.contents()[NAMES, b"7"] == values[b"7"]

    run(scenario)


def test_parts_without_the_last_one_are_removed_by_the_next_leader() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"1"))
            last = leader.led.durable_sequence
            await leader.kill()
            parts = pack_parts(Revision(1), Sequence(last + 1), 1, bytes(3 * MIB))
            for number, part in enumerate(parts[:-1]):
                await coordinator.transact([], [Put(KEYS.part(last + 1, number), part)])
            await follower.leads.wait()
            assert follower.led.durable_sequence >= last
            await put(follower.led, (NAMES, b"b", b"2"))
            third = Replica(coordinator, 3)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(third.run)
                while third.metadata is None:  # noqa: ASYNC110 - on a clock that jumps
                    await trio.sleep(0.1)
                await same(follower, third)
                nursery.cancel_scope.cancel()

    run(scenario)


def test_what_two_replicas_have_is_trimmed() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2, SMALL) as (leader, follower):
            for number in range(50):
                await put(leader.led, (NAMES, b"%d" % number, b"v"))
            await same(leader, follower)
            await trio.sleep(3)
            assert await _trimmed(coordinator) == leader.led.durable_sequence
            page = await coordinator.range(*KEYS.groups, limit=10)
            assert not page.entries

    run(scenario)


def test_nothing_is_trimmed_that_one_of_two_replicas_lacks() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2, SMALL) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"v"))
            await same(leader, follower)
            await trio.sleep(3)
            had = leader.led.durable_sequence
            await follower.kill()
            for number in range(50):
                await put(leader.led, (NAMES, b"%d" % number, b"v"))
            await trio.sleep(10)
            assert await _trimmed(coordinator) == had
            async with trio.open_nursery() as nursery:
                follower = follower.again()
                nursery.start_soon(follower.run)
                await trio.sleep(3)
                await same(leader, follower)
                assert await _trimmed(coordinator) == leader.led.durable_sequence
                nursery.cancel_scope.cancel()

    run(scenario)


class _LostLog:
    """A log that is lost just now: its last group is durable, is not in the journal, and the committer goes on."""

    def __init__(self, kept: Sequence) -> None:
        self.kept = kept

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_kept(self, sequence: Sequence) -> None:
        await trio.lowlevel.checkpoint()


def test_a_log_that_is_lost_while_the_index_waits_for_the_journal_leaves_the_index_behind_it() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(), clean=False) as metadata:
            kept = metadata.durable_sequence
            await metadata.lead(_LostLog(kept), lambda: None, lambda: None)
            assert await put(metadata, (NAMES, b"a", b"1")) > kept
            await trio.sleep(5)
            assert metadata.applied_sequence <= kept
            metadata.stop_leading(CoordinatorLost("another replica leads"))

    run(scenario)


def test_a_log_that_is_lost_before_the_index_freezes_ends_the_term_alone() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(), clean=False) as metadata:
            await metadata.lead(_LostLog(metadata.durable_sequence), lambda: None, lambda: None)
            _, sequence = await metadata.commit(lambda txn: txn.put(NAMES, b"a", b"1"), durable=False)
            freeze = metadata._committer.freeze

            async def lost() -> Layer:
                metadata.stop_leading(CoordinatorLost("another replica leads"))
                return await freeze()

            metadata._committer.freeze = lost  # type: ignore[method-assign]
            with pytest.raises(CoordinatorLost):
                await metadata.wait_durable(sequence)
                await trio.sleep(5)
                await metadata.commit(lambda txn: txn.put(NAMES, b"a", b"2"))

    run(scenario)


async def _trimmed(coordinator: MemoryCoordinator) -> Sequence:
    entry = (await coordinator.get(KEYS.log)).entry
    assert entry is not None
    return decode(LogRecord, entry.value).trimmed


def test_a_replica_that_has_more_than_the_log_is_refused() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 1) as (leader,):
            await put(leader.led, (NAMES, b"a", b"v"))
            await leader.stop()
        async with memory_coordinator() as other:
            disk, leader = leader.disk, Replica(other, 1)
            leader.disk = disk
            await leader.run()
            assert isinstance(leader.error, StoreUnusable)
            assert "no log of these names" in leader.error.message

    run(scenario)
