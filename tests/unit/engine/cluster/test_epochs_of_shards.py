"""A ring epoch is retired when the names of all shards refuse answers under it, durably."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
from structlog.testing import capture_logs

from engine.coordinator.lake_state import LakeState
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from lakefs.errors import SessionLost
from lakefs.ids import RingEpoch
from lakefs.wire import messages as m
from tests.lake_rig import SmallLake
from tests.names_shards_rig import NEAR, WAYS, LedShard, Reach, ShardedLake, noticed, sharded_lake
from tests.store_rig import run

Main = Callable[[ShardedLake], Awaitable[None]]
each_way = pytest.mark.parametrize(("reach", "count"), WAYS, ids=lambda way: getattr(way, "value", way))


def with_second_epoch(main: Main, reach: Reach = Reach.BY_REQUESTS, count: int = 2) -> None:
    """Run a test with two tables, the older of which nothing needs but names."""

    async def opened() -> None:
        async with sharded_lake(reach, count) as lake:
            await lake.first.next_epoch(0, 1)
            assert await retire(lake) == [], "what changed is noted first"
            await lake.first.state.clear_dirty(await lake.first.state.dirty())
            await main(lake)

    run(opened)


async def retire(lake: ShardedLake) -> list[RingEpoch]:
    return await lake.first.upkeep.membership.retire()


async def is_refused(shards: Sequence[SmallLake], epoch: int) -> list[bool]:
    """Return for each shard if it binds nothing on answers under an epoch."""
    refused: list[bool] = []
    for number, shard in enumerate(shards):
        blob = await shard.put(f"first {epoch} {number}", b"content")
        try:
            await shard.bind("key", blob, await shard.state.generation(), epoch=epoch)
            refused.append(False)
        except SessionLost:
            refused.append(True)
    return refused


@each_way
def test_each_shard_refuses_a_retired_epoch_and_so_does_its_next_leader(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        assert await is_refused(lake.shards, 1) == [False] * count
        assert await retire(lake) == [1]
        assert await is_refused(lake.shards, 1) == [True] * count
        assert await is_refused(lake.shards, 2) == [False] * count
        with pytest.MonkeyPatch.context() as plant:
            plant.setattr(ShardUpkeep, "begin", nothing_more)  # what its log says is enough
            for shard in lake.others:
                await shard.stop_names(crash=True)
                await shard.start_names()
        assert await is_refused(lake.others, 1) == [True] * (count - 1)

    with_second_epoch(main, reach, count)


async def nothing_more(self: ShardUpkeep) -> None:
    return


def test_a_shard_that_cannot_be_asked_keeps_the_epoch_and_is_logged_once() -> None:
    async def main(lake: ShardedLake) -> None:
        await lake.others[1].stop_names()
        with capture_logs() as logs:
            for _ in range(3):
                assert await retire(lake) == []
        assert [line["reason"] for line in logs if "cannot be asked to refuse" in line["event"]] == [
            "names shard 2: no replica of the names leads"
        ]
        assert list(await lake.first.state.epoch_tables()) == [1, 2]
        await lake.others[1].start_names()
        assert await is_refused(lake.others[1:], 1) == [False]
        assert await retire(lake) == [1]
        assert await is_refused(lake.shards, 1) == [True] * 3

    with_second_epoch(main, count=3)


def add_while_an_epoch_is_retired(reach: Reach) -> None:
    """A shard is added, and its first leader reads the epochs, when the others are asked to refuse the older one."""

    async def main(lake: ShardedLake) -> None:
        count = len(lake.shards)
        refuse = type(lake.others[0].upkeep_of_shard.names).refuse_below

        async def adding(names: object, epoch: RingEpoch) -> None:
            if len(lake.shards) == count:
                await lake.add()
            await refuse(names, epoch)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as plant:
            plant.setattr(type(lake.others[0].upkeep_of_shard.names), "refuse_below", adding)
            retired = await retire(lake)
        assert await is_refused(lake.others[-1:], 1) == [bool(retired)], "it binds what is retired"
        assert retired or await retire(lake) == [1]
        assert await is_refused(lake.shards, 1) == [True] * 3

    with_second_epoch(main, reach)


@pytest.mark.parametrize("reach", NEAR)
def test_a_shard_that_is_added_meanwhile_is_asked_too(reach: Reach) -> None:
    add_while_an_epoch_is_retired(reach)


def test_retiring_without_a_look_at_the_number_of_shards_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LakeState.retire_epoch

    async def retire_epoch(self: LakeState, epoch: RingEpoch, *, shards: int = 1) -> bool:
        return await original(self, epoch, shards=await self.names_shards())

    monkeypatch.setattr(LakeState, "retire_epoch", retire_epoch)
    with noticed("it binds what is retired"):
        add_while_an_epoch_is_retired(Reach.BY_REQUESTS)


def test_a_new_shard_begins_with_the_oldest_epoch_that_is_not_retired() -> None:
    async def main(lake: ShardedLake) -> None:
        assert await retire(lake) == [1]
        added = await lake.add()
        assert await is_refused([added], 1) == [True]
        assert await is_refused([added], 2) == [False]

    with_second_epoch(main)


def test_a_lost_request_to_refuse_keeps_the_epoch() -> None:
    async def main(lake: ShardedLake) -> None:
        asked: list[m.Request] = []

        async def hook(shard: LedShard, request: m.Request) -> None:
            asked.append(request)
            if len(asked) == 1:
                shard.ended.set()
                shard.ended = type(shard.ended)()

        lake.hook = hook
        assert await retire(lake) == []
        assert list(await lake.first.state.epoch_tables()) == [1, 2]
        assert await retire(lake) == [1]

    with_second_epoch(main)
