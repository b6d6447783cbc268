"""A machine has a replica of each names shard; one that is added gets one, and none ends with another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.names_shards import NamesShards, open_names_shards
from engine.coordinator.records import SHARDS_KEY, HeadRecord, ReplicaRecord, ShardsRecord, encode, present_key
from engine.format.group_parts import LogKeys
from engine.lake.names_replica import NamesReplica
from engine.lake.shard_replicas import ShardReplicas, machines_before, running_replicas
from lakefs.ids import NamesShard, Sequence
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.unit.support.metadata_rig import run


class FakeReplica:
    """Runs until it is stopped, or ends by itself."""

    def __init__(self, shard: NamesShard, steps: list[str]) -> None:
        self.shard = shard
        self.steps = steps
        self.leads = False
        self.connect = f"connect {shard}"
        self._stopping = trio.Event()
        self._ended = trio.Event()

    async def run(self) -> None:
        self.steps.append(f"runs {self.shard}")
        await self._stopping.wait()
        self._ended.set()

    async def stop(self) -> None:
        self._stopping.set()
        await self._ended.wait()
        self.steps.append(f"stopped {self.shard}")


def with_shards(main: Callable[[MemoryCoordinator, NamesShards], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, open_names_shards(coordinator) as shards:
            with trio.fail_after(60):
                await main(coordinator, shards)

    run(scenario)


async def add(coordinator: MemoryCoordinator, count: int) -> None:
    await coordinator.transact([], [Put(SHARDS_KEY, encode(ShardsRecord(count)))])


def test_a_shard_that_is_added_gets_a_replica_at_once_and_all_are_stopped() -> None:
    async def main(coordinator: MemoryCoordinator, shards: NamesShards) -> None:
        steps: list[str] = []
        replicas = ShardReplicas(shards, lambda shard: cast(NamesReplica, FakeReplica(shard, steps)))
        assert cast(Any, replicas.connect(NamesShard(0))) == "connect 0"
        assert steps == [], "it was not run yet"
        async with running_replicas(replicas):
            await trio.sleep(1)
            assert steps == ["runs 0"]
            await add(coordinator, 3)
            await trio.sleep(1)
            assert sorted(steps) == ["runs 0", "runs 1", "runs 2"]
            assert cast(Any, replicas.connect(NamesShard(2))) == "connect 2"
        assert sorted(steps[3:]) == ["stopped 0", "stopped 1", "stopped 2"]

    with_shards(main)


def test_a_bucket_that_is_known_before_its_shard_has_a_replica_that_runs() -> None:
    async def main(coordinator: MemoryCoordinator, shards: NamesShards) -> None:
        steps: list[str] = []
        replicas = ShardReplicas(shards, lambda shard: cast(NamesReplica, FakeReplica(shard, steps)))
        async with running_replicas(replicas):
            await trio.sleep(1)
            replicas.connect(NamesShard(1))
            await trio.sleep(1)
            await add(coordinator, 2)
            await trio.sleep(1)
        assert sorted(steps) == ["runs 0", "runs 1", "stopped 0", "stopped 1"]

    with_shards(main)


def test_new_replicas_are_left_to_machines_that_have_fewer() -> None:
    async def main(coordinator: MemoryCoordinator, shards: NamesShards) -> None:
        for number, machine in enumerate("abcde"):
            head = HeadRecord(machine, "host", 1, 1, has_members=machine != "e")
            await coordinator.transact([], [Put(present_key(bytes([number]) * 16), encode(head))])
        for number, machine in enumerate("ab"):
            await replica(coordinator, 0, number, machine)
        await add(coordinator, 2)
        await trio.sleep(1)

        async def before(machine: str) -> int:
            return await machines_before(coordinator, NamesShard(1), shards, machine)

        assert [await before(machine) for machine in "cdab"] == [0, 1, 2, 3], "c and d have none; e has no members"
        await replica(coordinator, 1, 2, "c")
        assert [await before(machine) for machine in "dab"] == [0, 1, 2], "c has one of it"

    with_shards(main)


async def replica(coordinator: MemoryCoordinator, shard: int, number: int, machine: str) -> None:
    key = LogKeys(NamesShard(shard)).replica(bytes([number]) * 16)
    await coordinator.transact([], [Put(key, encode(ReplicaRecord(machine, Sequence(1))))])
