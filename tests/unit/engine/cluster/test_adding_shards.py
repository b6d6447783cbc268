"""A names shard is added in one transaction, which also ends the part of releases that know of one shard only."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from unittest import mock

import pytest
import trio

from engine.coordinator import records
from engine.coordinator.coordinator import Put
from engine.coordinator.fenced_coordinator import FencedCoordinator, open_fenced_coordinator
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import take_charge
from engine.coordinator.records import (
    CHARGE_KEY,
    SHARDS_KEY,
    ChargeRecord,
    LeaderRecord,
    ShardsChargeRecord,
    ShardsRecord,
    decode,
    encode,
)
from engine.coordinator.shard_requests import ShardRequests
from engine.format.group_parts import LogKeys
from lakefs.errors import EngineUnreachable, StoreUnusable
from lakefs.ids import GcGeneration, NamesShard
from lakefs.wire import messages as m
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.unit.support.metadata_rig import run

LAKE = b"a lake of tests."
SECOND = NamesShard(1)


async def add(coordinator: FencedCoordinator) -> None:
    """Add the second shard, which is served at once."""
    leader = Put(LogKeys(SECOND).leader, encode(LeaderRecord(b"replica", "machine", ())))
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            message = (await ShardRequests(coordinator, LAKE).add()).message
            assert isinstance(message, m.ReportReply)
            assert json.loads(message.report_json) == {"shard": 1, "machine": "machine"}

        nursery.start_soon(ask)
        await trio.sleep(0.1)
        await coordinator.transact([], [leader])


def with_lake(main: Callable[[MemoryCoordinator, FencedCoordinator], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator:
            await take_charge(coordinator, LAKE)
            async with open_fenced_coordinator(coordinator, LAKE, "the etcd") as fenced:
                await fenced.check()
                await main(coordinator, fenced)

    run(scenario)


def test_processes_that_were_there_go_on_when_a_shard_is_added() -> None:
    async def main(coordinator: MemoryCoordinator, fenced: FencedCoordinator) -> None:
        async with open_fenced_coordinator(coordinator, LAKE, "the etcd") as other:
            await other.check()
            await add(fenced)
            assert decode(ShardsRecord, coordinator.entries[SHARDS_KEY].value).count == 2
            charge = decode(ChargeRecord, coordinator.entries[CHARGE_KEY].value)
            assert isinstance(charge, ShardsChargeRecord)
            assert charge.is_in_charge
            assert await LakeState(other).advance_generation(GcGeneration(0)) == 1, "it is tried once more"
            assert await LakeState(fenced).advance_generation(GcGeneration(1)) == 2

    with_lake(main)


def test_a_release_that_knows_of_one_shard_takes_no_part_any_more() -> None:
    async def main(coordinator: MemoryCoordinator, fenced: FencedCoordinator) -> None:
        async with open_fenced_coordinator(coordinator, LAKE, "the etcd") as older:
            await older.check()
            await add(fenced)
            with mock.patch.object(records, "_SHARDS_VERSION", -1):  # as its release reads records
                with pytest.raises(EngineUnreachable, match="of a later release"):
                    await LakeState(older).advance_generation(GcGeneration(0))
                with pytest.raises(StoreUnusable, match="of a later release"):
                    await older.check()

    with_lake(main)
