"""A machine has a replica of each names shard; one that is added gets one, and none ends with another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.names_leader import open_names_leader
from engine.coordinator.names_shards import NamesShards, open_names_shards
from engine.coordinator.records import (
    SHARDS_KEY,
    HeadRecord,
    LeaderRecord,
    ReplicaRecord,
    ShardsRecord,
    encode,
    present_key,
)
from engine.format.group_parts import LogKeys
from engine.lake.names_replica import NamesReplica
from engine.lake.shard_replicas import ShardReplicas, copied_from, machines_before, running_replicas
from lakefs.host.offload import InlineOffload
from lakefs.ids import NamesShard, ReplicaId, Sequence
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.sim.world.clock import SimClock
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


# --- copies of another machine's replica -----------------------------------------------------------------

COPIED = ReplicaId(b"c" * 16)


def test_a_replica_is_another_machine_s_only_while_that_is_present() -> None:
    async def main(coordinator: MemoryCoordinator, shards: NamesShards) -> None:
        second = NamesShard(1)
        assert await copied_from(coordinator, second, "m1", COPIED) == "", "nobody has said that it is its own"
        record = encode(ReplicaRecord("m2", Sequence(7)))
        await coordinator.transact([], [Put(LogKeys(second).replica(COPIED), record)])
        assert await copied_from(coordinator, second, "m1", COPIED) == "", "a disk may come from a machine that is gone"
        await coordinator.transact([], [Put(present_key(b"2" * 16), encode(HeadRecord("m2", "host", 1, 1)))])
        assert await copied_from(coordinator, second, "m1", COPIED) == "m2"
        assert await copied_from(coordinator, second, "m2", COPIED) == ""
        assert await copied_from(coordinator, NamesShard(2), "m1", COPIED) == ""

    with_shards(main)


class HostWithCopy:
    """A machine (`engine.lake.replica_host.ReplicaHost`) with a replica that was copied from another one."""

    shard = NamesShard(1)
    clock = SimClock()
    offload = InlineOffload()
    machine = "m1"

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.is_made_anew = trio.Event()

    def has_names(self) -> bool:
        return "aside" not in self.steps

    def set_aside(self) -> None:
        self.steps.append("aside")

    @asynccontextmanager
    async def open_names(self, leading: Any, begin_anew: Any, *, is_new: bool) -> AsyncIterator[None]:
        self.steps.append("new" if is_new else "opened")
        if is_new:
            self.is_made_anew.set()
            await trio.sleep_forever()
        async with leading(None, None):
            yield

    def leader_record(self, superblock: object) -> LeaderRecord:
        return LeaderRecord(COPIED, self.machine, ())


def test_names_that_were_copied_from_a_machine_that_is_present_are_set_aside_and_made_anew() -> None:
    async def main(coordinator: MemoryCoordinator, shards: NamesShards) -> None:
        async def copied(replica: ReplicaId) -> str:
            await trio.lowlevel.checkpoint()
            return "m2" if replica == COPIED else ""

        async with open_names_leader(coordinator, NamesShard(1)) as leader, trio.open_nursery() as nursery:
            host = HostWithCopy()
            replica = NamesReplica(cast(Any, host), b"L" * 16, coordinator, leader, cast(Any, None), copied_from=copied)
            nursery.start_soon(replica.run)
            await host.is_made_anew.wait()
            assert host.steps == ["opened", "aside", "new"]
            await replica.stop()

    with_shards(main)
