"""The way from workloads to a simulated store: in the same process, or over the simulated network."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from engine.process.embedded import EmbeddedEngine
from engine.server.listener import Server
from lakefs.client.trio.engine import connect_engine
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.ports import Offload
from lakefs.wire.engine_port import EngineService
from tests.sim.world.network import SimulatedNetwork

_ADDRESS = "unix:/simulated"


class Gate:
    """The way in.  `wire`: embedded, remote or reconnecting."""

    def __init__(
        self, wire: str, service: EngineService, network: SimulatedNetwork, offload: Offload, rng: random.Random
    ) -> None:
        self._wire = wire
        self._service = service
        self._network = network
        self._offload = offload
        self._rng = rng

    async def open(self, nursery: trio.Nursery) -> None:
        """Let workloads in until the nursery is cancelled."""
        if self._wire != "embedded":
            server = Server(self._service, self._network, token=None)
            await nursery.start(server.listen_and_serve, _ADDRESS)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[TrioLake]:
        """Connect.  When the connection ends, leases end with it and sessions linger."""
        if self._wire == "remote":
            async with connect_engine(_ADDRESS, network=self._network) as remote:
                yield TrioLake(remote, self._offload, network=True)
        elif self._wire == "reconnecting":
            async with connect_reconnecting(_ADDRESS, network=self._network) as reconnecting:
                yield TrioLake(reconnecting, self._offload, network=True)
        else:
            engine = EmbeddedEngine(self._service, descriptors=False)
            try:
                yield TrioLake(engine, self._offload, network=self._rng.random() < 0.5)
            finally:
                with trio.CancelScope(shield=True):
                    await engine.aclose()
