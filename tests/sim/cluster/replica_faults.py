"""Faults of a lake's names over an etcd: of the machines that have replicas, of the etcd, of the ways to both.

The events are those of `tests.sim.replicas`, where the clients are heads.  A lake owes no answer from an event's
beginning until names are served again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial, update_wrapper
from typing import Final

import trio

from tests.sim.cluster.etcd_names import EtcdNames
from tests.sim.cluster.lake import SimLake, until
from tests.sim.replicas.faults import Faults, draw_faults

Event = Callable[[], Awaitable[None]]
_CHANCES: Final = 0.0, 0.0, 0.1, 0.4


class ReplicaFaults:
    """Each event begins a fault, and returns when that has ended."""

    def __init__(self, lake: SimLake, names: EtcdNames) -> None:
        self._lake = lake
        self._names = names
        faults = Faults(names.machines, [head.host for head in lake.heads], names.met)
        names.machines.nodes.faults = draw_faults(lake.rng.choice(_CHANCES))
        self.kinds: Sequence[tuple[int, Event]] = [
            (weight, update_wrapper(partial(self._happens, kind), kind)) for weight, kind in faults.kinds
        ]

    async def _happens(self, event: Event) -> None:
        self._lake.health.begin_elsewhere()
        await event()
        await trio.sleep(self._lake.rng.choice((1.0, 10.0)))
        for replica in self._names.replicas:
            replica.disk.crash_at = None
        await until(lambda: self._names.is_up)
        self._lake.health.end_elsewhere()
