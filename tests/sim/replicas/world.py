"""One seed, one history of names with replicas: an etcd, two or three replicas, their clients, and what happens.

made     the first replica begins the log; the others begin anew from it, or follow
busy     clients put, read, move and remove; replicas die, stand still, are cut off, lose their disks; so does etcd
quiet    all faults end; replicas become equal, the log is trimmed; power fails everywhere, and all is still there
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final
from unittest import mock

import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.coordinator.names_leader import open_names_leader
from engine.store.metadata_life import always_leading
from tests.sim.cluster.etcd_nodes import etcd_nodes
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.network import Network
from tests.sim.cluster.process import causes_of
from tests.sim.judges.history import SimFailure
from tests.sim.replicas.customers import Customer, Promises
from tests.sim.replicas.faults import KEYS, Faults, draw_faults, watch_caught_up
from tests.sim.replicas.places import ReplicaPlace, Surroundings
from tests.sim.replicas.quiet import Quiet
from tests.sim.workloads.lives import draw_sizes
from tests.sim.world.determinism import run_seeded
from tests.sim.world.sim_time import SimTime
from tests.sim.world.standstill import _place, _tasks
from tests.sim.world.stopped_tasks import stopping_tasks

CLIENTS: Final = "c0", "c1", "c2"
LONGEST_S: Final = 2000.0


@dataclass
class History:
    """The history of a seed.  `log`: its steps, for people."""

    seed: int
    log: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.seconds:.0f} simulated s, {dict(sorted(self.met.items()))}"


class ReplicasWorld:
    """The run of one seed."""

    def __init__(self, seed: int, operations: int = 15, events: int = 7) -> None:
        self.seed = seed
        self.history = History(seed)
        self._operations = operations
        self._events = events
        self._rng = random.Random(seed)
        self._ids = random.Random(self._rng.getrandbits(64))
        self._count = self._rng.choice((2, 3, 3))
        self._chance = self._rng.choice((0.0, 0.3, 1.0))
        self._piece_bytes = self._rng.choice((400, 2000, 1 << 20))

    @property
    def name(self) -> str:
        """The arguments that run it again."""
        return str(self.seed)

    def run(self) -> History:
        """Live the history; raise SimFailure when the names broke a promise."""
        urandom = SimpleNamespace(urandom=self._ids.randbytes)
        with ExitStack() as stack:
            for target, instead in (
                ("lakefs.ids.os", urandom),
                ("engine.mirror.copy_list.os", urandom),
                ("engine.format.group_parts._PIECE_BYTES", self._piece_bytes),
            ):
                stack.enter_context(mock.patch(target, instead))
            try:
                run_seeded(self._main, self._rng.getrandbits(32), clock=SimTime())
            except BaseExceptionGroup as group:
                causes = [cause for cause in causes_of(group) if not isinstance(cause, trio.Cancelled)]
                failures = [cause for cause in causes if isinstance(cause, SimFailure)]
                raise (failures or causes)[0] from None
        return self.history

    def _log(self, text: str) -> None:
        self.history.log.append(f"{trio.current_time():9.3f}  {text}")

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            with stopping_tasks() as stopped:
                nursery.start_soon(self._watch)
                network = Network(random.Random(self._rng.getrandbits(64)), nursery)
                async with etcd_nodes(network, random.Random(self._rng.getrandbits(64))) as nodes:
                    sizes = draw_sizes(self._rng, huge=False)
                    world = Surroundings(self._rng, network, nodes, stopped, sizes, self._log)
                    world.places += [ReplicaPlace(world, number) for number in range(self._count)]
                    await self._live(world, nursery)
                    self.history.seconds = trio.current_time()
                    nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        await trio.sleep(LONGEST_S)
        root = trio.lowlevel.current_root_task()
        assert root is not None
        waits = "\n".join(f"  {task.name}: {_place(task.coro)}" for task in _tasks(root))
        raise SimFailure(f"the history stands still; tasks wait here:\n{waits}")

    async def _live(self, world: Surroundings, nursery: trio.Nursery) -> None:
        promises = Promises()
        promises.met = self.history.met
        async with far_etcd(world.nodes, "beside") as coordinator, open_names_leader(coordinator) as leader:
            await self._begin(world, coordinator, nursery)
            await self._busy(world, promises)
            self._log("quiet")
            await Quiet(world, promises, world.names_from("beside", leader)).end()

    async def _begin(self, world: Surroundings, coordinator: Coordinator, nursery: trio.Nursery) -> None:
        """Let the first replica begin the log, and the others join it; perhaps all at once."""
        first = world.places[0]
        async with first.open_names(always_leading, None, is_new=True) as names:
            origin = names.store.superblock.store_id
        await coordinator.transact([], [Put(KEYS.origin, origin)])
        first.is_caught_up = True
        for place in world.places:
            nursery.start_soon(place.keep)
            await trio.sleep(self._rng.choice((0.0, 5.0)))

    async def _busy(self, world: Surroundings, promises: Promises) -> None:
        """Let clients work, and things happen."""
        world.nodes.faults = draw_faults(self._chance)
        faults = Faults(world, CLIENTS, self.history.met)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_caught_up, world)
            async with trio.open_nursery() as busy:
                busy.start_soon(faults.run, self._events)
                for host in CLIENTS:
                    busy.start_soon(Customer(host, host, world, promises).work, self._operations)
            nursery.cancel_scope.cancel()
