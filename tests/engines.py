"""Engines that a test starts, stops, plays by hand, or runs in a thread, all over a `FakeService`."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
import trio.testing

from engine.server.connection import ServerLimits
from engine.server.listener import Server
from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.ids import data_chunk_id
from lakefs.limits import BODY_BYTES_MAX
from lakefs.ports import Network, Stream
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.connection import RequestReceived, ServerConnection
from lakefs.wire.messages import HelloReply, ReadChunks, StoreChunks
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork

SIMULATED = "tcp://simulated:1"


def in_simulated_time(main: Callable[[SimulatedNetwork], Awaitable[None]]) -> None:
    async def run() -> None:
        await main(SimulatedNetwork(random.Random(9)))

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def engine_at(
    network: Network, address: str, service: FakeService, *, limits: ServerLimits | None = None
) -> AsyncIterator[Server]:
    """Run an engine that is drained at the end of the block."""
    server = Server(service, network, token="secret", limits=limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.listen_and_serve, address)
        try:
            yield server
        finally:
            with trio.CancelScope(shield=True):
                await server.drain(0)


def store(payload: bytes) -> StoreChunks:
    return StoreChunks(b"s" * 16, [1], [len(payload)])


def read(payload: bytes) -> ReadChunks:
    return ReadChunks([data_chunk_id(payload)], [0], [0])


class Scripted:
    """An engine that a test plays by hand."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.wire = ServerConnection()

    async def request(self, *, whole_body: bool = True) -> RequestReceived:
        while (event := self.wire.next_event()) is None:
            count = await self.stream.receive_into(self.wire.reader.space())
            assert count, "the client went"
            self.wire.reader.received(count)
        assert isinstance(event, RequestReceived), "a request was expected"
        if whole_body:
            await self.take_body(event)
        return event

    async def take_body(self, event: RequestReceived) -> bytes:
        memory = bytearray(event.body_bytes)
        for view in self.wire.reader.take_body([memory]):
            while view:
                view = view[await self.stream.receive_into(view) :]
        return bytes(memory)

    async def hello(self, *, protocol: int = 1, inflight_max: int = 64) -> None:
        event = await self.request()
        assert self.wire.greeted is False
        self.wire.accept_hello(event.request, token=None, trusted=True)  # type: ignore[arg-type]
        reply = HelloReply(
            protocol, "scripted", b"s" * 16, b"e" * 16, b"b" * 16, 0, [], inflight_max, BODY_BYTES_MAX, 4096, False
        )
        await self.stream.send([self.wire.reply(1, reply)])


@asynccontextmanager
async def scripted(network: Network, address: str) -> AsyncIterator[tuple[RemoteEngine, Scripted]]:
    listener = await network.listen(address)
    found: list[Scripted] = []
    async with trio.open_nursery() as nursery:

        async def greet() -> None:
            found.append(Scripted(await listener.accept()))
            await found[0].hello()

        nursery.start_soon(greet)
        async with connect_engine(address, network=network) as engine:
            yield engine, found[0]
        await found[0].stream.aclose()
    await listener.aclose()


class Restarting:
    """An engine that a test starts and stops as it likes."""

    def __init__(self, nursery: trio.Nursery, network: Network, address: str) -> None:
        self._nursery = nursery
        self._network = network
        self._address = address
        self._server: Server | None = None

    async def start(self, service: FakeService) -> None:
        self._server = Server(service, self._network, token="secret")
        await self._nursery.start(self._server.listen_and_serve, self._address)

    async def stop(self, within_s: float = 0) -> None:
        assert self._server is not None, "it was started"
        await self._server.drain(within_s)


@asynccontextmanager
async def restarting(network: Network, address: str, service: FakeService) -> AsyncIterator[Restarting]:
    async with trio.open_nursery() as nursery:
        engine = Restarting(nursery, network, address)
        await engine.start(service)
        try:
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                await engine.stop()


class InThread:
    """Engines in a thread of their own, one after another at the same address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.service = FakeService()
        self.bound = threading.Event()

    def start(self, service: FakeService | None = None, limits: ServerLimits | None = None) -> None:
        self.service = service or FakeService()
        self.bound = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, limits))
        self._thread.start()
        self.bound.wait()

    async def _main(self, limits: ServerLimits | None) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with engine_at(TrioNetwork(), self.address, self.service, limits=limits):
            self.bound.set()
            await self._stop.wait()

    def open_gate(self) -> None:
        self._token.run_sync_soon(self.service.gate.set)

    def stop(self) -> None:
        self._token.run_sync_soon(self._stop.set)
        self._thread.join()
        assert not self.service.clients
        assert self.service.bodies_out == 0


def wait_until_served(engine: InThread, name: str, count: int = 1) -> None:
    while engine.service.served.count(name) < count:
        threading.Event().wait(0.001)
