"""A simulated etcd, the hosts around it, and a run of a scenario with them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest
import trio

from engine.etcd.etcd_coordinator import EtcdCoordinator
from tests.sim.cluster.etcd_nodes import HOSTS, EtcdNodes, etcd_nodes
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.network import Network, Way
from tests.sim.cluster.process import causes_of
from tests.sim.judges.history import SimFailure
from tests.sim.judges.registers import Registers
from tests.sim.world.determinism import run_seeded
from tests.sim.world.sim_time import SimTime


@dataclass
class World:
    """An etcd, the network, and coordinators of processes on hosts."""

    network: Network
    nodes: EtcdNodes
    rng: random.Random
    registers: Registers = field(default_factory=Registers)
    values: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    elected_at: float = math.inf

    def process(self, host: str) -> AbstractAsyncContextManager[EtcdCoordinator]:
        """The coordinator of a process on a host."""
        return far_etcd(self.nodes, host)

    async def note_election(self, old: str) -> None:
        """Note when another node than this one leads."""
        while self.nodes.leader in (None, old):
            await self.nodes.wait_changed()
        self.elected_at = trio.current_time()

    def heal(self) -> None:
        """Let all ways and nodes be well."""
        self.network.heal()
        for host in HOSTS:
            self.nodes.start(host)
            self.nodes.resume(host)

    def separate(self, *hosts: str, way: Way = Way.CUT) -> None:
        """Cut these hosts off from all nodes of etcd, other than themselves."""
        for host in hosts:
            for other in HOSTS:
                if other not in hosts:
                    self.network.set_way(host, other, way)
                    self.network.set_way(other, host, way)


def play(scenario: Callable[[World], Awaitable[None]], seed: int = 1, *, quota_bytes: int | None = None) -> World:
    """Run a scenario in a new world, and return the world as it was at the end."""
    worlds: list[World] = []

    async def main() -> None:
        rng = random.Random(seed)
        async with trio.open_nursery() as nursery:
            network = Network(rng, nursery)
            async with etcd_nodes(network, rng, quota_bytes=quota_bytes) as nodes:
                worlds.append(World(network, nodes, rng))
                await scenario(worlds[0])
            nursery.cancel_scope.cancel()

    run_seeded(main, seed, clock=SimTime())
    return worlds[0]


def noticed(plays: Iterable[Callable[[], object]], words: str) -> None:
    """Play until an assertion fails, which must be with these words."""
    with pytest.raises((AssertionError, SimFailure, BaseExceptionGroup)) as failed:
        for one in plays:
            one()
    cause = causes_of(failed.value)[0]
    assert isinstance(cause, AssertionError | SimFailure)
    assert words in str(cause)
