"""All names shards of a lake move to an etcd and back, at any crash, with all groups of their logs."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.moving import Side, charge_of
from engine.coordinator.records import SHARDS_KEY, Charge, ChargeRecord, ReplicaRecord, ShardsRecord, encode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.lake import moving_over
from engine.lake.all_shards import open_other_shards
from engine.lake.etcd_place import EtcdPlace
from engine.lake.lake_content import Content
from engine.lake.machine import new_machine
from engine.lake.names_here import open_names, open_table
from engine.namespace.buckets import list_buckets
from engine.process.mirrored_names import LocalNames
from lakefs.errors import PreconditionFailed, StoreUnusable
from lakefs.ids import ReplicaId, Sequence
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.unit.engine.lake.shards_rig import (
    AT_ETCD,
    LAKE,
    SECOND,
    SHARDS,
    make,
    make_bucket,
    notes,
    plan_of,
    replace_time,
)

STEPS = 40
"""More than the transactions of a move."""


@dataclass
class FakeEtcd:
    """The etcd of a lake (`engine.lake.lake_etcd.LakeEtcd`), in memory."""

    coordinator: MemoryCoordinator
    place: EtcdPlace
    cluster: str = "c1"

    @property
    def side(self) -> Side:
        return Side(self.coordinator, self.place.words)

    async def reach(self) -> None:
        await trio.lowlevel.checkpoint()


class Killed(Exception):
    """The process ends."""


@asynccontextmanager
async def killed_at(etcd: MemoryCoordinator, step: int) -> AsyncIterator[None]:
    """Let the process end with a transaction of the etcd, before it is done; as it would in the block."""
    left, transact = step, etcd.transact

    async def counting(*args: object, **more: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return await transact(*args, **more)  # type: ignore[arg-type]

    with mock.patch.object(etcd, "transact", counting):
        yield


@pytest.mark.parametrize("is_cut_off", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_all_shards_move_to_an_etcd_and_back_wherever_they_are_cut_off(tmp_path: Path, is_cut_off: bool) -> None:
    first = 0 if is_cut_off else STEPS
    plan = plan_of(tmp_path)
    there = EtcdPlace(("http://10.0.0.1:2379",), "lake")
    moves = replace(plan, machine=new_machine(LAKE))

    async def main() -> None:
        await make(plan, charge=ChargeRecord(LAKE, Charge.SERVES, 4, b"the table's time"))
        async with memory_coordinator() as coordinator:
            etcd = FakeEtcd(coordinator, there)
            await until_done(etcd, lambda: moving_over._moved_there(moves, etcd), first)  # type: ignore[arg-type]
            charge = await charge_of(coordinator)
            assert charge is not None
            assert charge.state is Charge.SERVES
            found = await notes(plan)
            assert found[FIRST_SHARD].incarnation == found[SECOND].incarnation == charge.incarnation
            assert {each.state for each in found.values()} == {Charge.LEFT}
            for shard in SHARDS:
                async with open_names(plan, shard=shard) as names:
                    origin = (await coordinator.get(LogKeys(shard).origin)).entry
                    assert origin is not None
                    assert origin.value == names.store.superblock.store_id

            await until_done(etcd, lambda: moving_over._moved_back(moves, etcd), first)  # type: ignore[arg-type]
            found = await notes(plan)
            assert found[FIRST_SHARD] == found[SECOND]
            assert found[FIRST_SHARD].state is Charge.SERVES
            left = await charge_of(coordinator)
            assert left is not None
            assert left.state is Charge.LEFT or left.turn < found[FIRST_SHARD].turn

    trio.run(main)


async def until_done(etcd: FakeEtcd, move: Callable[[], Awaitable[object]], first: int) -> None:
    """Cut a move off at a transaction of the etcd, then at the next one, until it is done."""
    for step in range(first, STEPS + 1):
        async with killed_at(etcd.coordinator, step):
            try:
                await move()
            except Killed:
                continue
            except BaseExceptionGroup as group:
                if group.split(Killed)[0] is None:
                    raise
                continue
            return
    raise AssertionError("it is never done")


def test_a_shard_has_all_groups_of_its_log_when_it_leaves_the_etcd(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan, charge=ChargeRecord(LAKE, Charge.SERVES, 4, b"the table's time"))
        async with memory_coordinator() as coordinator:
            etcd = FakeEtcd(coordinator, EtcdPlace(("http://10.0.0.1:2379",), "lake"))
            await moving_over._moved_there(plan, etcd)  # type: ignore[arg-type]
            shutil.copytree(tmp_path / "names.1", tmp_path / "behind")
            led = partial(moving_over._led, plan, etcd, SECOND)  # type: ignore[arg-type]
            async with open_names(plan, led, shard=SECOND) as names:
                await make_bucket(names, "late")
            shutil.rmtree(tmp_path / "names.1")
            (tmp_path / "behind").rename(tmp_path / "names.1")
            restored = replace(plan, restored=True)
            await moving_over._moved_back(restored, etcd)  # type: ignore[arg-type]
        async with open_names(plan, shard=SECOND) as names:
            assert "late" in buckets_of(names)

    trio.run(main)


def buckets_of(names: LocalNames) -> list[str]:
    with names.store.metadata.view() as view:
        return [bucket.name for bucket in list_buckets(view)]


def test_a_shard_of_another_time_is_not_served_with_the_others(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan)
        async with open_names(plan) as first, open_table(first.store) as table, AsyncExitStack() as stack:
            content = cast(Content, None)  # it is not looked at
            with pytest.raises(StoreUnusable, match="are of another time than those of shard 0"):
                await open_other_shards(stack, plan, first.store, table, content, replace_time(AT_ETCD), 2)

    trio.run(main)


def test_a_lake_does_not_leave_its_etcd_for_a_machine_that_lacks_a_shard(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)

    async def main() -> None:
        await make(plan, 1)
        async with memory_coordinator() as coordinator:
            records = ReplicaRecord("elsewhere", Sequence(9)), ReplicaRecord(plan.machine.machine, Sequence(99))
            puts = [
                Put(LogKeys(SECOND).replica(ReplicaId(bytes([number]) * 16)), encode(record))
                for number, record in enumerate(records)
            ]
            await coordinator.transact([], [*puts, Put(SHARDS_KEY, encode(ShardsRecord(2)))])
            before = dict(coordinator.entries)
            etcd = FakeEtcd(coordinator, EtcdPlace(("http://10.0.0.1:2379",), "lake"))
            with pytest.raises(PreconditionFailed, match=r"names shard 1.*at machine elsewhere.*names\.1"):
                await moving_over._moved_back(plan, etcd)  # type: ignore[arg-type]
            assert coordinator.entries == before, "nothing was changed"

    trio.run(main)
