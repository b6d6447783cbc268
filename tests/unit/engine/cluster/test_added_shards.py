"""Names shards are added by the leader of the first one, one after the other, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.coordinator.names_shards import shards_of
from engine.coordinator.records import SHARDS_KEY, LeaderRecord, LogRecord, ShardsRecord, decode, encode
from engine.coordinator.shard_requests import NAMES_SHARDS_MAX, SERVED_WITHIN_S, ShardRequests
from engine.coordinator.term_coordinator import TermCoordinator
from engine.format.group_parts import FIRST_SHARD, LogKeys
from lakefs.errors import CoordinatorLost, InvalidArgument, PreconditionFailed
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.unit.support.metadata_rig import run

LAKE = b"a lake of shards"
REPLICA = b"first replica..."


def with_leader(main: Callable[[MemoryCoordinator, ShardRequests], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            await lead(coordinator, FIRST_SHARD, REPLICA)
            await main(coordinator, ShardRequests(TermCoordinator(coordinator, REPLICA), LAKE))

    run(scenario)


async def lead(coordinator: Coordinator, shard: NamesShard, replica: bytes = b"another replica.") -> None:
    record = LeaderRecord(replica, f"machine of {shard}", ())
    await coordinator.transact([], [Put(LogKeys(shard).leader, encode(record))])


async def added(requests: ShardRequests) -> dict[str, object]:
    reply = (await requests.add()).message
    assert isinstance(reply, m.ReportReply)
    found: dict[str, object] = json.loads(reply.report_json)
    return found


def test_a_shard_is_added_with_an_empty_log_and_the_answer_waits_for_its_leader() -> None:
    async def main(coordinator: MemoryCoordinator, requests: ShardRequests) -> None:
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await trio.sleep(2)
                assert await shards_of(coordinator) == 2
                await lead(coordinator, NamesShard(1))

            nursery.start_soon(serve)
            assert await added(requests) == {"shard": 1, "machine": "machine of 1"}
        log = coordinator.entries[LogKeys(NamesShard(1)).log]
        assert decode(LogRecord, log.value) == LogRecord(LAKE)

    with_leader(main)


def test_no_shard_is_added_while_the_last_one_is_not_served() -> None:
    async def main(coordinator: MemoryCoordinator, requests: ShardRequests) -> None:
        began = trio.current_time()
        assert await added(requests) == {"shard": 1, "machine": ""}
        assert trio.current_time() - began == pytest.approx(SERVED_WITHIN_S, abs=1)
        with pytest.raises(PreconditionFailed, match="no machine serves names shard 1"):
            await requests.add()
        assert await shards_of(coordinator) == 2
        await lead(coordinator, NamesShard(1))
        await lead(coordinator, NamesShard(2))
        assert (await added(requests))["shard"] == 2

    with_leader(main)


def test_there_are_so_many_at_most_and_a_log_of_another_time_is_never_taken() -> None:
    async def main(coordinator: MemoryCoordinator, requests: ShardRequests) -> None:
        await coordinator.transact([], [Put(LogKeys(NamesShard(1)).log, encode(LogRecord(LAKE)))])
        with pytest.raises(PreconditionFailed, match="has a log of names shard 1 already"):
            await requests.add()
        assert await shards_of(coordinator) == 1
        await coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(NAMES_SHARDS_MAX)))])
        with pytest.raises(PreconditionFailed, match=f"has {NAMES_SHARDS_MAX} names shards"):
            await requests.add()

    with_leader(main)


def test_two_that_add_at_once_add_two_or_one_is_refused() -> None:
    async def main(coordinator: MemoryCoordinator, requests: ShardRequests) -> None:
        for shard in range(1, 4):
            await lead(coordinator, NamesShard(shard))
        shards: list[object] = []
        async with trio.open_nursery() as nursery:

            async def add() -> None:
                shards.append((await added(requests))["shard"])

            for _ in range(2):
                nursery.start_soon(add)
        assert sorted(shards, key=str) == [1, 2]
        assert await shards_of(coordinator) == 3

    with_leader(main)


def test_a_leader_that_was_deposed_adds_none() -> None:
    async def main(coordinator: MemoryCoordinator, requests: ShardRequests) -> None:
        await lead(coordinator, FIRST_SHARD, b"another replica.")
        with pytest.raises(CoordinatorLost):
            await requests.add()
        assert SHARDS_KEY not in coordinator.entries

    with_leader(main)


def test_a_lake_without_etcd_gets_no_other_shard() -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidArgument, match="names shards are added to lakes with etcd"):
            await ShardRequests(None, LAKE).add()

    run(scenario)
