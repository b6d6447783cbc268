"""A client that makes its own requests about RDMA, true ones and false ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.ids import ChunkId
from lakefs.limits import MIB
from lakefs.transport.fabric import Remote
from lakefs.wire import messages as m
from lakefs.wire.fabric_messages import FabricMemory
from tests.fabric_rig import TOKEN, FabricWorld
from tests.simulated_fabric import SimulatedFabric, SimulatedRegion


class Liar:
    """A client that makes its own requests, with a queue pair and memory of 1 MiB."""

    def __init__(self, engine: RemoteEngine, fabric: SimulatedFabric) -> None:
        self.engine = engine
        self.fabric = fabric
        self.memory = bytearray(MIB)
        self.region: SimulatedRegion = fabric.register(self.memory, Remote.READ | Remote.WRITE)

    async def connect(self) -> None:
        link = self.fabric.open_link(Remote.READ | Remote.WRITE)
        opened = (await self.engine.call(m.FabricOpen(link.end))).message
        assert isinstance(opened, m.FabricOpened)
        link.connect(opened.end)

    def named(self, **changes: int) -> FabricMemory:
        fields = {"key": self.region.remote_key, "address": self.region.address, "size_bytes": MIB} | changes
        return FabricMemory(**fields)

    async def load(self, chunks: list[ChunkId], offsets: list[int], memory: FabricMemory, **more: Any) -> m.SlotsLoaded:
        request = m.LoadSlots(0, [bytes(chunk) for chunk in chunks], offsets, fabric=memory, **more)
        loaded = (await self.engine.call(request)).message
        assert isinstance(loaded, m.SlotsLoaded)
        return loaded


@asynccontextmanager
async def liar(world: FabricWorld) -> AsyncIterator[Liar]:
    async with connect_engine(world.address, token=TOKEN) as engine:
        yield Liar(engine, world.wire.fabric())
