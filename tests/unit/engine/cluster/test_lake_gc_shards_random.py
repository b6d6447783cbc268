"""Gc over a lake with several names shards against a model: the histories of `test_lake_gc_random`, and another leader
of any shard at any time; copies go from shard to shard, as a head makes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from engine.lake_gc.lake_gc import LakeGc
from engine.lake_gc.names_port import ShardNames
from engine.requests.bind import BindGate
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake
from tests.names_shards_rig import Reach, ShardedLake, sharded_lake
from tests.sim.world.determinism import run_seeded
from tests.store_rig import ask
from tests.unit.engine.cluster.test_lake_gc_random import STEPS, History, Writer

SEEDS: Final = range(2)
SHARDS_MAX: Final = 8
"""Leases of the model are numbered by the shards' own numbers, times this, and the shard's."""
WAYS: Final = ((Reach.BY_REQUESTS, 3), (Reach.IN_PROCESS, 2))


class ShardsHistory(History):
    """A history of a lake with several shards: each writer has its names in one of them."""

    def __init__(self, seed: int, reach: Reach, count: int) -> None:
        super().__init__(seed)
        self.reach = reach
        self.count = count
        self.sharded: ShardedLake

    async def run(self) -> None:
        async with sharded_lake(self.reach, self.count, 3, batch=2) as self.sharded:
            self.lake = self.sharded.first
            self.lake.members.hook = self.slowly
            self.sharded.hook = self.slowly_at_names
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.collect)
                async with trio.open_nursery() as writers:
                    for number, shard in enumerate(self.sharded.shards):
                        writers.start_soon(ShardWriter(self, shard, number).run)
                    writers.start_soon(self.operate)
                nursery.cancel_scope.cancel()
            self.lake.members.hook = served_at_once
            await self.end_quietly()

    async def slowly_at_names(self, shard: object, request: m.Request) -> None:
        await self.pause(0.05)

    async def crash_names(self) -> None:
        index = self.rng.randrange(self.count)
        async with self.using_names:
            shard = self.sharded.shards[index]
            if not index or self.reach is Reach.IN_PROCESS:
                self.cycle.cancel()
                await self.idle.wait()
            await shard.stop_names(crash=True)
            await shard.start_names()
            self.met["another leader" if index else "names crashed"] += 1
            for number in [number for number in self.leases if number % SHARDS_MAX == index]:
                del self.leases[number]

    async def operate(self) -> None:
        for _ in range(STEPS // 8):
            await self.pause(0.3)
            await self.crash_names()
        await super().operate()


async def served_at_once(member: MemberId, request: m.Request) -> Reply | None:
    return None


class ShardWriter(Writer):
    """A writer whose copies may have their source in another shard: what is there is offered, and bound here."""

    history: ShardsHistory

    def __init__(self, history: ShardsHistory, shard: SmallLake, index: int) -> None:
        super().__init__(history, f"writer-{index}")
        self.lake = shard
        self.index = index

    async def lease(self) -> None:
        async with self.history.using_names:
            keys = [key for key in self.own() if not key.endswith("/")]
            if keys:
                key = self.rng.choice(keys)
                number = await self.lake.lease(key) * SHARDS_MAX + self.index
                self.history.leases[number] = self.history.names[key]
                self.leased.append(number)

    async def end_lease(self) -> None:
        async with self.history.using_names:
            if self.leased and self.rng.random() < 0.5:
                number = self.leased.pop(0)
                if self.history.leases.pop(number, None) is not None:
                    await ask(self.lake.client, m.CloseLeases([number // SHARDS_MAX]), m.Done)

    async def copy(self) -> None:
        foreign = [name for name in self.history.names if not name.startswith(self.name)]
        if not foreign or self.rng.random() < 0.5:
            await super().copy()
            return
        content = self.history.names[self.rng.choice(foreign)]
        self.history.met["copy from another shard"] += 1
        await self.put_content(content)


def run_history(seed: int, reach: Reach, count: int) -> Counter[str]:
    met: Counter[str] = Counter()

    async def main() -> None:
        history = ShardsHistory(seed, reach, count)
        await history.run()
        met.update(history.met)

    run_seeded(main, seed, clock=MockClock(autojump_threshold=0))
    return met


@pytest.mark.parametrize(("reach", "count"), WAYS, ids=lambda way: getattr(way, "value", way))
def test_bound_content_of_all_shards_stays_and_garbage_goes(reach: Reach, count: int) -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            met.update(run_history(seed, reach, count))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    for what in ("freed", "session lost", "restart", "another leader", "copy from another shard"):
        assert met[what], f"never met: {what}; {met}"


# --- planted bugs --------------------------------------------------------------------------------------


def _plant_only_the_first_shard_is_walked(plant: pytest.MonkeyPatch) -> None:
    walk = LakeGc._walk

    async def first(self: LakeGc, shards: Sequence[ShardNames], *more: Any) -> None:
        await walk(self, shards[:1], *more)

    plant.setattr(LakeGc, "_walk", first)


def _plant_stale_answers_are_bound(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(BindGate, "check", lambda self, answered: None)


PLANTED: Final = [found for name, found in sorted(globals().items()) if name.startswith("_plant_")]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__.removeprefix("_plant_"))
def test_each_weaker_rule_is_noticed(planted: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as plant:
        planted(plant)
        with pytest.raises((AssertionError, ExceptionGroup)):
            for seed in range(40):
                run_history(seed, Reach.BY_REQUESTS, 2)
