"""The same engine, asked in every way there is: the kinds that the contract of `EngineClient` is tested on."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import trio
from trio.testing import MockClock

from engine.head.head import REFUSAL
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.host.tasks import plain_errors
from engine.process.embedded import EmbeddedBlockingEngine, EmbeddedEngine
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.opening import open_store
from engine.store.store import Store
from engine.superblock.superblock import NO_CLUSTER
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.trio.engine import connect_engine
from lakefs.errors import UnsupportedVersion
from lakefs.host.offload import ThreadOffload
from lakefs.ids import Buffer
from lakefs.ports import Clock, Network
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import BlockingEngineClient, EngineClient, Reply
from lakefs.wire.media import MEDIUM_SEGMENT, MEDIUM_STREAMED
from lakefs.wire.messages import Hello, HelloReply, Request
from lakefs.wire.offers import Offers
from tests.descriptors import open_descriptors
from tests.head_rig import HeadAndNames, head_over, lake_of
from tests.shards_rig import sharded_lake
from tests.sim.world.network import SimulatedNetwork
from tests.store_rig import SMALL_SIZES, in_flight, simulated_store
from tests.unit.engine.cluster import stripe_rig

TOKEN = "secret"
LAKE = b"a lake of tests."
"""The id of the lake whose members the tests open."""
MEMORY_FOLDER = Path("/dev/shm")


class InThreads:
    """A blocking client as an `EngineClient`: each call in a thread."""

    def __init__(self, engine: BlockingEngineClient) -> None:
        self.engine = engine

    @property
    def epoch(self) -> int:
        return self.engine.epoch

    @property
    def carries_descriptors(self) -> bool:
        return self.engine.carries_descriptors

    @property
    def offers(self) -> Offers:
        return self.engine.offers

    def is_connected(self) -> bool:
        return self.engine.is_connected()

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        def blocking() -> Reply:
            return self.engine.finish(self.engine.start(request, body, descriptors, into=into))

        return await trio.to_thread.run_sync(blocking)

    def tell(self, request: Request) -> bool:
        return self.engine.tell(request)

    def watch(self, bucket: str, *, others_only: bool = False) -> AbstractAsyncContextManager[Any]:
        raise AssertionError("a blocking client cannot watch")


class Asked(EngineClient, Protocol):
    """A client of any kind; `watch` where it can."""

    def watch(self, bucket: str, *, others_only: bool = False) -> AbstractAsyncContextManager[Any]: ...


@dataclass
class Engine:
    """One engine being asked: a first client, and how to get more of the same kind."""

    client: Asked
    connect: Callable[[], AbstractAsyncContextManager[Asked]]
    store: Store | None
    folder: Path
    """For files of the test's own, on a local file system."""
    lake: HeadAndNames | None = None
    """The lake of a head."""
    chunk_count: Callable[[], Awaitable[int]] | None = None
    """Returns the number of chunks of which a lake's members have shards."""

    async def keepers(self) -> list[EngineClient]:
        """Return clients of the engines that keep keys: this one, or the members of a head's lake."""
        return [self.client] if self.lake is None else [*await self.lake.keepers()]

    def held(self) -> tuple[int, ...]:
        """Return what is held for requests and clients: buffers, extents or bytes of answers, sessions, leases."""
        if self.lake is not None:
            parts = self.lake.head.parts
            own = parts.references.statistics()
            leases = self.lake.leases() + own["leases"]
            return parts.buffers.in_use, parts.answers.held_bytes, own["sessions"], leases
        assert self.store is not None, "the engine is out of reach"
        clients = self.store.references.statistics()
        return self.store.buffers.in_use, in_flight(self.store), clients["sessions"], clients["leases"]


Body = Callable[[Engine], Awaitable[None]]


async def features_of(client: EngineClient) -> int:
    """Return the features that the engine said when it was greeted; embedded engines are asked now."""
    hello = getattr(getattr(client, "engine", client), "hello", None)
    if hello is None:
        hello = (await client.call(Hello(1, "test"))).message
    assert isinstance(hello, HelloReply)
    return hello.features


@dataclass(frozen=True)
class Kind:
    """One way to ask an engine."""

    name: str
    opened: Callable[[Path], AbstractAsyncContextManager[Engine]]
    simulated: bool = False
    """Time is simulated, and jumps."""
    can_watch: bool = True
    code_of: tuple[str, ...] = ()
    """Kinds that have all of its code, put together another way: `make test` leaves it out, `make test-all` has it."""
    medium: int = MEDIUM_SEGMENT
    """Medium of grants of long content."""
    has_stamps: bool = True
    puts_have_stamps: bool = True
    """Answers to puts have stamps, if they are asked for."""
    homes: int = 1
    """Members that keep keys: each has its share of a quota."""
    keeps_all_keys: bool = True
    """False if homes of keys are away: those keys are misses, and cannot be put."""
    shares_tier: bool = False
    """A head with a DRAM tier, which it shares with its clients."""
    moves_anywhere: bool = True
    """False if names are in several shards, new buckets in turn: nothing is moved between two of them."""
    refusal: str = ""
    """Beginning of the error for a request that it does not offer.  A test that makes such a request is skipped."""

    def need_segments(self) -> None:
        """Skip the test where content does not lie in segments."""
        if self.medium != MEDIUM_SEGMENT:
            pytest.skip("content lies in no segment here")

    def need_what_is_freed_to_be_gone(self) -> None:
        """Skip the test where a DRAM tier may keep the bytes of chunks that are freed."""
        if self.shares_tier:
            pytest.skip("the tier of a head may keep what is freed")

    def need_one_home(self) -> None:
        """Skip the test where a space's quota is shared among homes."""
        if self.homes > 1:
            pytest.skip("each home of keys has its share of the quota here")

    def run(self, body: Body) -> None:
        """Run `body` with an engine; afterwards nothing is held, in flight, or open."""
        if not self.refusal:
            self._run(body)
            return
        try:
            with plain_errors():
                self._run(body)
        except UnsupportedVersion as error:
            if not error.message.startswith(self.refusal):
                raise
            pytest.skip(error.message)

    def _run(self, body: Body) -> None:
        before = open_descriptors()
        with _folder() as folder:

            async def main() -> None:
                async with self.opened(folder) as engine:
                    await body(engine)
                    if engine.store is not None:
                        assert engine.store.buffers.in_use == 0, "a request's memory was not given back"
                        assert in_flight(engine.store) == 0, "an extent was not settled"

            trio.run(main, clock=MockClock(autojump_threshold=0) if self.simulated else None)
        assert open_descriptors() <= before, "descriptors were left open"


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as name:
        yield Path(name)


@asynccontextmanager
async def _local_store(folder: Path, cluster_id: bytes = NO_CLUSTER) -> AsyncIterator[Store]:
    clock: Clock = SystemClock()
    async with ThreadOffload(3, "contract") as offload:
        disk = LocalDisk(folder / "store")
        sizes = SMALL_SIZES
        async with open_store(disk, clock, offload, verify_index=False, sizes=sizes, cluster_id=cluster_id) as store:
            yield store


@asynccontextmanager
async def _simulated_store(folder: Path, cluster_id: bytes = NO_CLUSTER) -> AsyncIterator[Store]:
    async with simulated_store(cluster_id=cluster_id) as store:
        yield store


_Stores = Callable[[Path], AbstractAsyncContextManager[Store]]


def _embedded(stores: _Stores, *, descriptors: bool) -> Callable[[Path], AbstractAsyncContextManager[Engine]]:
    @asynccontextmanager
    async def opened(folder: Path) -> AsyncIterator[Engine]:
        async with stores(folder) as store:
            service = Service(store)

            @asynccontextmanager
            async def connect() -> AsyncIterator[Asked]:
                client = EmbeddedEngine(service, descriptors=descriptors)
                try:
                    yield client
                finally:
                    with trio.CancelScope(shield=True):
                        await client.aclose()

            async with connect() as first:
                yield Engine(first, connect, store, folder)

    return opened


def _served(
    stores: _Stores, network: Callable[[], Network], address: str, *, blocking: bool = False
) -> Callable[[Path], AbstractAsyncContextManager[Engine]]:
    @asynccontextmanager
    async def opened(folder: Path) -> AsyncIterator[Engine]:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(stores(folder))
            made = network()
            server = Server(Service(store), made, token=TOKEN)
            nursery = await stack.enter_async_context(trio.open_nursery())
            real = await nursery.start(server.listen_and_serve, address.format(folder=folder))

            @asynccontextmanager
            async def connect() -> AsyncIterator[Asked]:
                if not blocking:
                    async with connect_engine(real, token=TOKEN, network=made) as engine:
                        yield engine
                    return
                client = await trio.to_thread.run_sync(lambda: connect_blocking(real, token=TOKEN))
                try:
                    yield InThreads(client)
                finally:
                    client.close()

            try:
                async with connect() as first:
                    yield Engine(first, connect, store, folder)
            finally:
                with trio.CancelScope(shield=True):
                    await server.drain(5)

    return opened


@asynccontextmanager
async def _embedded_blocking(folder: Path) -> AsyncIterator[Engine]:
    (folder / "store").mkdir()
    engine = await trio.to_thread.run_sync(EmbeddedBlockingEngine, folder / "store")
    client = InThreads(engine)

    @asynccontextmanager
    async def connect() -> AsyncIterator[Asked]:
        yield client

    try:
        yield Engine(client, connect, None, folder)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(engine.close)


@asynccontextmanager
async def _asked_head(
    lake: HeadAndNames, folder: Path, chunk_count: Callable[[], Awaitable[int]]
) -> AsyncIterator[Engine]:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Asked]:
        client = lake.client()
        try:
            yield client
        finally:
            with trio.CancelScope(shield=True):
                await client.aclose()

    async with connect() as first:
        yield Engine(first, connect, None, folder, lake, chunk_count)


@asynccontextmanager
async def _head(folder: Path) -> AsyncIterator[Engine]:
    async with lake_of() as lake, _asked_head(lake, folder, lake.chunk_count) as engine:
        yield engine


@asynccontextmanager
async def _head_over_shards(folder: Path) -> AsyncIterator[Engine]:
    async with sharded_lake(3) as lake, _asked_head(lake, folder, lake.chunk_count) as engine:
        yield engine


def _head_over_members(*away: int) -> Callable[[Path], AbstractAsyncContextManager[Engine]]:
    """Open a head over six members at 4+2, of which some are away from the beginning."""

    @asynccontextmanager
    async def opened(folder: Path) -> AsyncIterator[Engine]:
        async with stripe_rig.lake("4+2", 6) as rig:
            rig.lose(*away)
            lake_over = head_over(rig.stripes, rig.members, rig.upkeep_of, clients=rig.members.clients)
            async with lake_over as lake, _asked_head(lake, folder, rig.chunk_count) as engine:
                yield engine

    return opened


def _served_head(address: str, *, slabs: int = 0) -> Callable[[Path], AbstractAsyncContextManager[Engine]]:
    @asynccontextmanager
    async def opened(folder: Path) -> AsyncIterator[Engine]:
        async with AsyncExitStack() as stack:
            offload = await stack.enter_async_context(ThreadOffload(3, "contract"))
            lake = await stack.enter_async_context(lake_of(offload=offload, clock=SystemClock(), slabs=slabs))
            network = TrioNetwork()
            server = Server(lake.head, network, token=TOKEN)
            nursery = await stack.enter_async_context(trio.open_nursery())
            real = await nursery.start(server.listen_and_serve, address.format(folder=folder))

            @asynccontextmanager
            async def connect() -> AsyncIterator[Asked]:
                async with connect_engine(real, token=TOKEN, network=network) as engine:
                    yield engine

            try:
                async with connect() as first:
                    yield Engine(first, connect, None, folder, lake, lake.chunk_count)
            finally:
                with trio.CancelScope(shield=True):
                    await server.drain(5)

    return opened


def _simulated_network() -> Network:
    return SimulatedNetwork(random.Random(5))


_OF_HEADS: dict[str, Any] = {"refusal": REFUSAL, "medium": MEDIUM_STREAMED, "puts_have_stamps": False}
UNIX, TCP = "unix:{folder}/socket", "tcp://127.0.0.1:0"
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("simulated", _embedded(_simulated_store, descriptors=False), simulated=True),
        Kind(
            "simulated-network",
            _served(_simulated_store, _simulated_network, "tcp://sim:1"),
            simulated=True,
            code_of=("simulated", "tcp"),  # the store of one, served and asked as that of the other
        ),
        Kind("embedded", _embedded(_local_store, descriptors=True)),
        Kind("unix", _served(_local_store, TrioNetwork, UNIX)),
        Kind("tcp", _served(_local_store, TrioNetwork, TCP)),
        Kind("blocking-unix", _served(_local_store, TrioNetwork, UNIX, blocking=True), can_watch=False),
        Kind(
            "blocking-tcp",
            _served(_local_store, TrioNetwork, TCP, blocking=True),
            can_watch=False,
            code_of=("blocking-unix", "tcp"),  # the client of one, and what an engine offers to the other
        ),
        Kind("blocking-embedded", _embedded_blocking, can_watch=False),
        Kind("head", _head, simulated=True, **_OF_HEADS),
        Kind("head-unix", _served_head(UNIX, slabs=3), shares_tier=True, **_OF_HEADS),
        Kind("head-shards", _head_over_shards, simulated=True, moves_anywhere=False, **_OF_HEADS),
        # The stripes have suites of their own; here all requests go through them.
        Kind("head-members", _head_over_members(), simulated=True, code_of=("head",), homes=6, **_OF_HEADS),
        Kind(
            "head-degraded",
            _head_over_members(1, 4),
            simulated=True,
            code_of=("head",),
            homes=4,
            keeps_all_keys=False,
            **_OF_HEADS,
        ),
    )
}
"""The rule: `make test` has each promise once for each kind with code of its own: a disk, a driver, or a transport
with what it offers (in one process, a Unix socket with descriptors, TCP without).  A kind that puts code of others
together says so by `code_of`, and runs in the rest of `make test-all`.
"""
assert not any(KINDS[other].code_of for kind in KINDS.values() for other in kind.code_of), "all code is in `make test`"

KEYED = [name for name, kind in KINDS.items() if kind.keeps_all_keys]
"""Kinds at which every key can be put; `tests/unit/engine/head/test_key_homes.py` has homes that are away."""

MEMBERS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("simulated", _embedded(partial(_simulated_store, cluster_id=LAKE), descriptors=False), simulated=True),
        Kind("unix", _served(partial(_local_store, cluster_id=LAKE), TrioNetwork, UNIX)),
        Kind("tcp", _served(partial(_local_store, cluster_id=LAKE), TrioNetwork, TCP)),
    )
}
"""Ways to ask a member of a lake: only heads ask it, which use the trio client."""


def every(kinds: Iterable[str] = KINDS) -> list[Any]:
    """Return the named kinds as parameters of a test or fixture: in `make test` those with code of their own."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * bool(KINDS[name].code_of)) for name in kinds]
