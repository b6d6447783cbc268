"""Faults of a lake's names over an etcd: of the machines that have replicas, of the etcd, of the ways to both.

The events are those of `tests.sim.replicas`, where the clients are heads.  A lake owes no answer from an event's
beginning until names are served again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial, update_wrapper
from typing import Final

import trio

from lakefs.errors import LakeError
from lakefs.wire import messages as m
from tests.sim.cluster.etcd_names import EtcdNames
from tests.sim.cluster.lake import SimLake, until
from tests.sim.replicas.faults import Faults, draw_faults

Event = Callable[[], Awaitable[None]]
_OF_MACHINES: Final = ("crash", "stop", "restart", "slow_disk", "cut_off_replica")
"""Events of a machine, which may have replicas of several names shards."""
_CHANCES: Final = 0.0, 0.0, 0.1, 0.4


class ReplicaFaults:
    """Each event begins a fault, and returns when that has ended."""

    def __init__(self, lake: SimLake, names: EtcdNames) -> None:
        self._lake = lake
        self._names = names
        heads = [head.host for head in lake.heads]
        self._faults = [Faults(place.machines, heads, names.met) for place in names.places]
        names.machines.nodes.faults = draw_faults(lake.rng.choice(_CHANCES))
        self.kinds: Sequence[tuple[int, Event]] = [
            (weight, update_wrapper(partial(self._happens, number), kind))
            for number, (weight, kind) in enumerate(self._faults[0].kinds)
        ]

    async def _happens(self, number: int) -> None:
        """Let an event happen, to the machines of one names shard, or of all at once, as to one that has all."""
        present = self._faults[: self._names.count]
        if len(present) > 1 and (
            present[0].kinds[number][1].__name__ not in _OF_MACHINES or self._lake.rng.random() < 0.7
        ):
            present = [self._lake.rng.choice(present)]
        self._lake.health.begin_elsewhere()
        async with trio.open_nursery() as nursery:
            for faults in present:
                nursery.start_soon(faults.kinds[number][1])
        await trio.sleep(self._lake.rng.choice((1.0, 10.0)))
        for place in self._names.places:
            for replica in place.replicas:
                replica.disk.crash_at = None
        await until(lambda: self._names.is_up)
        self._lake.health.end_elsewhere()


async def add_shards(lake: SimLake, names: EtcdNames) -> None:
    """Add names shards while the lake is at work, as an operator does, until there are all that there may be."""
    while names.count < len(names.places):
        await trio.sleep(lake.rng.choice((1.0, 10.0, 40.0)))
        await add_shard(lake, names)


async def add_shard(lake: SimLake, names: EtcdNames) -> None:
    """Ask for another names shard until there is one, and wait until it is served."""
    wanted = names.count + 1
    lake.log(f"operator: names add, for {wanted} shards")
    lake.met["names shard added"] += 1
    while names.count < wanted:
        try:
            async with lake.rng.choice(lake.heads).connect() as client:
                await client.call(m.Hello(1, "operator"))
                (await client.call(m.AddNamesShard())).body.release()
        except LakeError as error:
            lake.log(f"operator: names add: {error!r}")
            await trio.sleep(1.0)
    await until(lambda: names.is_up)
