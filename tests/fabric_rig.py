"""An engine, or a head of a lake, on TCP with a DRAM tier and simulated RDMA; and clients of both kinds that use it.

def test_...(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake("blocking") as lake:
            assert await lake.get("bkt/object") == content

    run(body)

The fixture `run` of the contract suites runs a test at each of `SERVED`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import trio

from engine.chunks.chunk_store import find_chunk
from engine.fabric.engine_fabric import EngineFabric
from engine.format.layouts import SegmentKind
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.requests.table import Service
from engine.segments.files import segment_path
from engine.server.listener import Server
from engine.store.opening import open_store
from engine.store.store import Store
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.content.verify import Check
from lakefs.fabric.client_fabric import ClientFabric
from lakefs.fabric.counts import FabricCounts
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, ENGINE_SILENCE_S, ENGINE_WAIT_S, MIB
from lakefs.steps.steps import Steps
from lakefs.transport.fabric import Fabric
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import EngineService
from tests.head_rig import lake_of
from tests.simulated_fabric import SimulatedWire, Weather
from tests.store_rig import SMALL_SIZES

T = TypeVar("T")
SLAB: Final = 9 * MIB
TOKEN: Final = "secret"
KINDS: Final = ("trio", "blocking")
_MEMORY: Final = Path("/dev/shm")


class RiggedLake:
    """A lake of either kind; calls of the blocking one run in a thread."""

    def __init__(self, lake: Lake | TrioLake, fabric: ClientFabric) -> None:
        self.lake = lake
        self.fabric = fabric

    @property
    def rdma(self) -> FabricCounts:
        return self.lake.rdma

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        bound = partial(getattr(self.lake, method), *args, **kwargs)
        if isinstance(self.lake, TrioLake):
            return await bound()
        return await trio.to_thread.run_sync(bound)

    async def get(self, name: str) -> bytes:
        content: bytes = await self.call("get", name)
        return content

    async def put(self, name: str, content: Any) -> None:
        await self.call("put", name, content, create_bucket=True)

    async def run(self, steps: Steps[T]) -> T:
        if isinstance(self.lake, TrioLake):
            return await driver_of(self.lake).run(steps)
        return await trio.to_thread.run_sync(driver_of(self.lake).run, steps)


class Asked(NamedTuple):
    """An engine or a head, which clients ask."""

    service: EngineService
    tier: DramTier
    buffers: BufferPool
    damage: Callable[[ChunkId], None]
    """Damages a stored chunk beyond repair."""


@dataclass
class FabricWorld:
    """A served engine or head, its tier, its wire, and clients."""

    asked: Asked
    offload: ThreadOffload
    wire: SimulatedWire
    address: str
    server: Server
    fabric: EngineFabric
    admitted: dict[ChunkId, trio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tier.on_admitted.append(lambda chunk, *_: self._event(chunk).set())

    @property
    def tier(self) -> DramTier:
        """The DRAM tier."""
        return self.asked.tier

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for payload that requests hold."""
        return self.asked.buffers.in_use

    def _event(self, chunk: ChunkId) -> trio.Event:
        return self.admitted.setdefault(chunk, trio.Event())

    @asynccontextmanager
    async def lake(
        self,
        kind: str,
        *,
        check: Check = Check.BLAKE3,
        open_fabric: Callable[[str], Fabric | str] | None = None,
        timeout_s: float = ENGINE_SILENCE_S,
        patience_s: float = ENGINE_WAIT_S,
    ) -> AsyncIterator[RiggedLake]:
        """Connect a lake over TCP, with a fabric of its own on the wire."""
        opens = open_fabric or (lambda name: self.wire.fabric())
        if kind == "trio":
            connecting = connect_reconnecting(self.address, token=TOKEN, silence_s=timeout_s, patience_s=patience_s)
            async with connecting as engine:
                fabric = ClientFabric(engine, opens)
                lake = TrioLake(engine, self.offload, network=True, check=check, fabric=fabric)
                try:
                    yield RiggedLake(lake, fabric)
                finally:
                    await lake.aclose()
            return
        client = await trio.to_thread.run_sync(
            partial(connect_blocking, self.address, token=TOKEN, timeout_s=timeout_s)
        )
        fabric = ClientFabric(client, opens)
        blocking = Lake(client, check=check, fabric=fabric)
        try:
            yield RiggedLake(blocking, fabric)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(blocking.close)

    async def warm(self, content: bytes, name: str = "bkt/object") -> list[ChunkId]:
        """Store content under a name, and read it over TCP until the tier has all of it; return its chunks."""
        chunks = [data_chunk_id(content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES)]
        async with self.lake("trio", open_fabric=lambda name: "none here") as lake:
            await lake.put(name, content)
            for _ in range(2):
                assert await lake.get(name) == content
        for chunk in chunks:
            await self.is_admitted(chunk)
        return chunks

    async def is_admitted(self, chunk: ChunkId) -> None:
        """Wait until the tier has taken a chunk."""
        await self._event(chunk).wait()

    def spoil(self, chunk: ChunkId) -> None:
        """Overwrite the chunk's cell as demotion and the next fill would, without telling any client."""
        cell = self.tier._cells[chunk]
        memory = self.tier.arena.memory(cell)
        memory[:] = os.urandom(len(memory))

    def demote(self, chunk: ChunkId) -> None:
        """Drop the chunk from the tier, and let others have its cell's memory."""
        memory = self.tier.arena.memory(self.tier._cells[chunk])
        self.tier.forget(chunk)
        memory[:] = os.urandom(len(memory))


async def posted(world: FabricWorld) -> None:
    """Wait until a READ or WRITE is in flight."""
    while not any(link.operations for link in list(world.wire._links.values())):  # noqa: ASYNC110 - in a thread
        await trio.sleep(0.001)


Body = Callable[[FabricWorld], Awaitable[None]]
Opens = Callable[[Path, EngineFabric, int, ThreadOffload], AbstractAsyncContextManager[Asked]]
"""Opens an engine or a head: in a folder, with this device and so many slabs."""


@asynccontextmanager
async def an_engine(folder: Path, fabric: EngineFabric, slabs: int, offload: ThreadOffload) -> AsyncIterator[Asked]:
    """One engine, with its store on a local disk."""
    tier = DramTier(Arena(slabs, SLAB, registered=fabric.registered))
    disk = LocalDisk(folder / "store")
    opening = open_store(
        disk, SystemClock(), offload, grace_s=0.0, verify_index=False, sizes=SMALL_SIZES, tier=tier, fabric=fabric
    )
    async with opening as store:
        yield Asked(Service(store), tier, store.buffers, partial(_flip, store, disk))
    tier.close()


def _flip(store: Store, disk: LocalDisk, chunk: ChunkId) -> None:
    """Flip a bit of a stored chunk, on the disk."""
    with store.metadata.view() as view:
        record = find_chunk(view, chunk)
    assert record is not None
    path = disk.local_path(segment_path(record.segment, SegmentKind.LARGE))
    with Path(path).open("r+b") as file:
        file.seek(record.offset + 100)
        (byte,) = file.read(1)
        file.seek(record.offset + 100)
        file.write(bytes([byte ^ 8]))


@asynccontextmanager
async def a_head(folder: Path, fabric: EngineFabric, slabs: int, offload: ThreadOffload) -> AsyncIterator[Asked]:
    """A head of a lake, over chunks in memory."""
    async with lake_of(offload=offload, clock=SystemClock(), slabs=slabs, fabric=fabric) as lake:
        tier = lake.head.parts.tier.dram.tier
        assert tier is not None
        yield Asked(lake.head, tier, lake.head.parts.buffers, lake.stripes.rotten.add)


SERVED: Final[dict[str, Opens]] = {"engine": an_engine, "head": a_head}


class Run(Protocol):
    """Runs a test with an engine or a head; afterwards it holds no queue pair, and the wire no region."""

    def __call__(
        self,
        body: Body,
        *,
        slabs: int = 3,
        weather: Weather | None = None,
        has_device: bool = True,
        links_max: int = 64,
        registered_bytes_max: int = 1 << 40,
    ) -> None: ...


def run_at(
    opens: Opens,
    body: Body,
    *,
    slabs: int = 3,
    weather: Weather | None = None,
    has_device: bool = True,
    links_max: int = 64,
    registered_bytes_max: int = 1 << 40,
    sharers: int = 1,
) -> None:
    """Run a test: see `Run`.  `sharers`: the heads that divide the memory to move bytes through."""

    async def main(folder: Path, wire: SimulatedWire) -> None:
        device = wire.fabric(links_max=links_max, registered_bytes_max=registered_bytes_max) if has_device else None
        fabric = EngineFabric(device, "" if has_device else "no device", sharers=sharers)
        async with (
            ThreadOffload(4, "fabric") as offload,
            opens(folder, fabric, slabs, offload) as asked,
            trio.open_nursery() as nursery,
        ):
            server = Server(asked.service, TrioNetwork(), token=TOKEN)
            address = await nursery.start(server.listen_and_serve, "tcp://127.0.0.1:0")
            with trio.fail_after(60):
                await body(FabricWorld(asked, offload, wire, address, server, fabric))
            with trio.CancelScope(shield=True):
                await server.drain(5)
            assert fabric.statistics().get("queue_pairs", 0) == 0, "a queue pair outlives its connection"
        fabric.shutdown()
        if device is not None:
            assert not device.regions, "memory stays registered"

    with (
        tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name,
        SimulatedWire(7, weather) as wire,
    ):
        trio.run(main, Path(name), wire)
