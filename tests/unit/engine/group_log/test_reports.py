"""Reports of replicas at the coordinator, and the operator's word that one is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.coordinator.records import SHARDS_KEY, LeaderRecord, LogRecord, ReplicaRecord, ShardsRecord, decode, encode
from engine.format.group_parts import LogKeys
from engine.group_log.reports import ReplicaRemoved, Reports
from engine.lake_upkeep.names_replicas import LOOK_EVERY_S, SILENT_LOOKS, NamesReplicas
from lakefs.errors import InvalidArgument, PreconditionFailed, StoreFull
from lakefs.ids import NamesShard, ReplicaId, Sequence
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.replica_rig import KEYS, Replica, place_of, replicas_on
from tests.unit.engine.group_log.test_replica import NAMES, run
from tests.unit.support.metadata_rig import put

FIRST, SECOND = ReplicaId(b"1" * 16), ReplicaId(b"2" * 16)


class At(NamedTuple):
    durable_sequence: Sequence


def scenario_of(body: Callable[[MemoryCoordinator], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            await body(coordinator)

    run(scenario)


async def records(coordinator: Coordinator) -> dict[bytes, ReplicaRecord]:
    page = await coordinator.range(*KEYS.replicas, limit=10)
    return {entry.key: decode(ReplicaRecord, entry.value) for entry in page.entries}


async def lead(coordinator: Coordinator, replica: ReplicaId) -> None:
    """Let a replica be the leader, as its key says."""
    await coordinator.transact([], [Put(KEYS.leader, encode(LeaderRecord(replica, "m", ())))])


def record(kept: int, machine: str = "m") -> ReplicaRecord:
    return ReplicaRecord(machine, Sequence(kept))


def test_a_new_replica_of_a_machine_removes_the_record_of_that_before_it() -> None:
    async def body(coordinator: MemoryCoordinator) -> None:
        await Reports(coordinator, KEYS, FIRST).say(record(1))
        await Reports(coordinator, KEYS, ReplicaId(b"3" * 16)).say(record(1, "other"))
        second = Reports(coordinator, KEYS, SECOND)
        await second.say(record(2))
        await second.say(record(3))
        assert sorted(await records(coordinator)) == [KEYS.replica(SECOND), KEYS.replica(b"3" * 16)]
        assert (await records(coordinator))[KEYS.replica(SECOND)].kept == 3

    scenario_of(body)


def test_a_removed_replica_says_nothing_any_more_and_ends() -> None:
    async def body(coordinator: MemoryCoordinator) -> None:
        replicas = NamesReplicas(coordinator, At(Sequence(0)))
        reports = Reports(coordinator, KEYS, FIRST)
        await reports.say(record(1))
        for _ in range(2):
            await replicas.remove(FIRST)
        for again in (reports, Reports(coordinator, KEYS, FIRST)):
            with pytest.raises(ReplicaRemoved, match="was removed from the lake"):
                await again.say(record(2))
        with pytest.raises(ReplicaRemoved):
            await reports.run(lambda: record(2))
        await Reports(coordinator, KEYS, SECOND).say(record(1))
        assert (await records(coordinator))[KEYS.replica(FIRST)] == ReplicaRecord("m", Sequence(1), is_removed=True)

    scenario_of(body)


def test_the_one_that_leads_is_not_removed_and_neither_is_one_that_there_is_not() -> None:
    async def body(coordinator: MemoryCoordinator) -> None:
        replicas = NamesReplicas(coordinator, At(Sequence(0)))
        await Reports(coordinator, KEYS, FIRST).say(record(1))
        await lead(coordinator, FIRST)
        with pytest.raises(PreconditionFailed, match="leads the names"):
            await replicas.remove(FIRST)
        with pytest.raises(InvalidArgument, match="no such replica"):
            await replicas.remove(SECOND)

    scenario_of(body)


def test_a_removed_replica_that_follows_ends_and_holds_up_no_trimming() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"1"))
            await trio.sleep(2)
            gone = ReplicaRecord("machine 2", Sequence(0), is_removed=True)
            await coordinator.transact([], [Put(KEYS.replica(follower.place.replica), encode(gone))])
            await put(leader.led, (NAMES, b"b", b"1"))
            await follower.ended.wait()
            assert isinstance(follower.error, ReplicaRemoved)
            while (await coordinator.range(*KEYS.groups, limit=1)).entries:  # noqa: ASYNC110 - a clock that jumps
                await trio.sleep(0.1)

    run(scenario)


def test_a_replica_is_silent_when_the_leader_has_said_more_and_more_without_it() -> None:
    async def body(coordinator: MemoryCoordinator) -> None:
        replicas = NamesReplicas(coordinator, At(Sequence(9)))
        reports = {FIRST: Reports(coordinator, KEYS, FIRST), SECOND: Reports(coordinator, KEYS, SECOND)}
        await reports[FIRST].say(record(9, "1"))
        await reports[SECOND].say(record(4, "2"))
        await lead(coordinator, FIRST)

        async def states() -> list[str]:
            return [each["state"] for each in (await replicas.read())["replicas"]]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replicas.run)
            await trio.sleep((SILENT_LOOKS + 3.5) * LOOK_EVERY_S)  # so no look is at the same moment as a report
            assert await states() == ["leads", "follows"], "nobody could say anything"
            for _ in range(SILENT_LOOKS):
                await reports[FIRST].say(record(9, "1"))
                await trio.sleep(LOOK_EVERY_S)
            found = await replicas.read()
            assert await states() == ["leads", "silent"]
            assert found["outlives_machines"] == 0
            assert [each["groups_behind"] for each in found["replicas"]] == [0, 5]
            await reports[SECOND].say(record(9, "2"))
            assert await states() == ["leads", "follows"]
            assert (await replicas.read())["outlives_machines"] == 1
            nursery.cancel_scope.cancel()

    scenario_of(body)


def test_replicas_of_further_shards_are_read_and_removed_by_their_own_leaders_records() -> None:
    async def body(coordinator: MemoryCoordinator) -> None:
        keys, third = LogKeys(NamesShard(1)), ReplicaId(b"3" * 16)
        replicas = NamesReplicas(coordinator, At(Sequence(9)))
        await Reports(coordinator, KEYS, FIRST).say(record(9, "1"))
        await lead(coordinator, FIRST)
        await Reports(coordinator, keys, SECOND).say(record(70, "1"))
        await Reports(coordinator, keys, third).say(record(61, "2"))
        assert "shards" not in await replicas.read(), "the lake has one"
        with pytest.raises(InvalidArgument):
            await replicas.remove(third)
        await coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(2)))])
        await coordinator.transact([], [Put(keys.leader, encode(LeaderRecord(SECOND, "m", ())))])
        await coordinator.transact([], [Put(keys.log, encode(LogRecord(b"l" * 16, Sequence(60))))])
        found = await replicas.read()
        assert [each["id"] for each in found["replicas"]] == [FIRST.hex()]
        [second] = found["shards"]
        assert second["shard"] == 1
        assert [(each["state"], each["groups_behind"]) for each in second["replicas"]] == [("leads", 0), ("follows", 9)]
        assert (second["tail"]["groups"], second["outlives_machines"]) == (10, 1)
        with pytest.raises(PreconditionFailed, match="leads the names"):
            await replicas.remove(SECOND)
        await replicas.remove(third)
        [second] = (await replicas.read())["shards"]
        assert [each["state"] for each in second["replicas"]] == ["leads", "removed"]

    scenario_of(body)


def test_a_replica_of_a_further_shard_that_says_nothing_is_silent() -> None:
    async def body(coordinator: MemoryCoordinator) -> None:
        keys = LogKeys(NamesShard(1))
        replicas = NamesReplicas(coordinator, At(Sequence(9)))
        await coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(2)))])
        leader = Reports(coordinator, keys, SECOND)
        await leader.say(record(9, "1"))
        await Reports(coordinator, keys, FIRST).say(record(9, "2"))
        await coordinator.transact([], [Put(keys.leader, encode(LeaderRecord(SECOND, "m", ())))])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replicas.run)
            for number in range(SILENT_LOOKS + 2):
                await trio.sleep(LOOK_EVERY_S)
                await leader.say(record(10 + number, "1"))
            [second] = (await replicas.read())["shards"]
            assert [each["state"] for each in second["replicas"]] == ["silent", "leads"]
            nursery.cancel_scope.cancel()

    scenario_of(body)


def test_names_refuse_decisions_while_the_coordinator_is_full_and_make_room_by_themselves() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            await _fill_and_make_room(coordinator)

    run(scenario)


async def _fill_and_make_room(coordinator: MemoryCoordinator) -> None:
    await coordinator.transact([], [Put(KEYS.origin, place_of(coordinator, 1).replica)])
    transact, full = coordinator.transact, False
    made: list[str] = []

    async def refusing(compares: Any, then_ops: Any, *rest: Any, **options: Any) -> Any:
        if full and all(isinstance(operation, Put) for operation in then_ops):
            raise StoreFull("no space")
        return await transact(compares, then_ops, *rest, **options)

    async def make_room() -> None:
        nonlocal full
        assert not (await coordinator.range(*KEYS.groups, limit=1)).entries, "it was trimmed first"
        made.append("room")
        full = len(made) < 2

    coordinator.transact = refusing  # type: ignore[method-assign]
    replica = Replica(coordinator, 1)
    replica.make_room = make_room
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replica.run)
        await replica.leads.wait()
        await put(replica.led, (NAMES, b"a", b"1"))
        full = True
        nursery.start_soon(put, replica.led, (NAMES, b"b", b"1"))
        await trio.sleep(0.2)
        with pytest.raises(StoreFull, match="no room for more names"):
            await put(replica.led, (NAMES, b"c", b"1"))
        assert replica.contents()[NAMES, b"a"] == b"1", "reads go on"
        await trio.sleep(20)
        assert made == ["room", "room"]
        await put(replica.led, (NAMES, b"c", b"1"))
        assert replica.contents()[NAMES, b"b"] == b"1"
        nursery.cancel_scope.cancel()
