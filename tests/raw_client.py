"""A client that sends whatever a test wants, also what no real client sends."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import trio
import trio.testing

from engine.server.connection import ServerLimits
from engine.server.listener import Server
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import Buffer
from lakefs.limits import CONNECTIONS_MAX
from lakefs.ports import Network, Stream
from lakefs.transport.framing import FrameReceiver
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.connection import ClientConnection, ClientEvent, FailureReceived, ReplyReceived
from lakefs.wire.messages import Hello, HelloReply, Message, Ping, Request
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork


class RawClient:
    """One connection, without the rules that clients keep."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.wire = ClientConnection()
        self.receiver = FrameReceiver[ClientEvent](stream, self.wire, frame_timeout_s=1e6, before_wait=lambda: None)
        self.body = b""

    async def send(self, *parts: Buffer, descriptors: Sequence[int] = ()) -> None:
        """Send bytes as they are."""
        await self.stream.send(parts, descriptors)

    async def ask(self, request: Request, body: bytes = b"", *, deadline_ms: int = 0) -> int:
        """Send a request; return its stream."""
        stream_id, frame = self.wire.request(request, len(body), deadline_ms=deadline_ms)
        await self.send(frame, body)
        return stream_id

    async def answer(self) -> ClientEvent:
        """Wait for the next frame; its body is in `body`.  Raises the error that a failure on stream 0 carries."""
        event = await self.receiver.next_event()
        assert event is not None, "the engine closed the connection"
        if isinstance(event, ReplyReceived) and event.body_bytes:
            memory = bytearray(event.body_bytes)
            await self.receiver.fill([memory])
            self.body = bytes(memory)
        return event

    async def message(self) -> Message:
        """Return the next frame's message; raise the error if it is a failure."""
        event = await self.answer()
        if isinstance(event, FailureReceived):
            raise event.error
        assert isinstance(event, ReplyReceived), "an answer was expected"
        return event.message

    async def hello(self, hello: Hello | None = None) -> HelloReply:
        """Send Hello; return the reply."""
        await self.ask(hello or Hello(1, "raw"))
        message = await self.message()
        assert isinstance(message, HelloReply), "Hello is answered with HelloReply"
        return message

    async def is_served(self) -> bool:
        """Return whether the connection still works."""
        await self.ask(Ping())
        return isinstance(await self.answer(), ReplyReceived)

    async def end(self) -> LakeError | None:
        """Wait until the engine ends the connection; return its farewell, or None when it only closed."""
        try:
            while await self.receiver.next_event() is not None:
                pass
        except EngineUnreachable:
            return None
        except LakeError as farewell:
            return farewell
        return None


@asynccontextmanager
async def raw_client(network: Network, address: str) -> AsyncIterator[RawClient]:
    """Connect without Hello."""
    client = RawClient(await network.connect(address))
    try:
        yield client
    finally:
        client.receiver.close()
        await client.stream.aclose()


class Running:
    """A server for one test, and where it is."""

    def __init__(self, server: Server, service: FakeService, network: Network, address: str) -> None:
        self.server = server
        self.service = service
        self.network = network
        self.address = address

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[RawClient]:
        """Connect without Hello."""
        async with raw_client(self.network, self.address) as client:
            yield client

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        """Connect, and say Hello."""
        async with self.stranger() as client:
            await client.hello()
            yield client


@asynccontextmanager
async def running(
    network: Network,
    address: str,
    *,
    token: str | None = None,
    trusted: bool = True,
    connections_max: int = CONNECTIONS_MAX,
    limits: ServerLimits | None = None,
) -> AsyncIterator[Running]:
    """Serve a `FakeService`; afterwards nobody is connected and no body is out."""
    service = FakeService()
    server = Server(service, network, token=token, connections_max=connections_max, limits=limits)
    async with trio.open_nursery() as nursery:
        listener = await network.listen(address)

        async def serve(task_status: trio.TaskStatus[str]) -> None:
            await server.serve(listener, trusted=trusted, task_status=task_status)

        await nursery.start(serve)
        yield Running(server, service, network, listener.address)
        await server.drain(0)
    assert not service.clients, "a connection was not ended"
    assert service.bodies_out == 0, "a body was not released"
    assert server.connection_count == 0


def real(address: str, test: Callable[[Running], Awaitable[None]], **options: object) -> None:
    """Run a test against a server on a real socket."""

    async def main() -> None:
        async with running(TrioNetwork(), address, **options) as served:  # type: ignore[arg-type]
            await test(served)

    trio.run(main)


def simulated(test: Callable[[Running], Awaitable[None]], **options: object) -> None:
    """Run a test against a server in simulated time."""

    async def main() -> None:
        network = SimulatedNetwork(random.Random(5))
        async with running(network, "tcp://simulated:0", **options) as served:  # type: ignore[arg-type]
            await test(served)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
