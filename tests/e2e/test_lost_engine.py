"""Clients whose engine goes, comes back, hangs, or was never one: every call ends, none with another's answer."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.served_connection import ServerLimits
from engine.server import Server
from lakefs import sockets
from lakefs.client import remote
from lakefs.client.blocking_remote import BlockingEngine, connect_blocking
from lakefs.client.reconnecting import ReconnectingEngine, connect_reconnecting
from lakefs.client.remote import RemoteEngine, connect_engine
from lakefs.errors import (
    BucketNotFound,
    EngineUnreachable,
    InvalidArgument,
    LakeError,
    ProtocolError,
    RequestTooLarge,
    SessionLost,
    UnsupportedVersion,
)
from lakefs.ids import data_chunk_id
from lakefs.limits import BODY_BYTES_MAX
from lakefs.net import TrioNetwork
from lakefs.ports import Network, Stream
from lakefs.service import Reply
from lakefs.wire.connection import RequestReceived, ServerConnection
from lakefs.wire.messages import (
    BucketCreate,
    Buckets,
    Done,
    HelloReply,
    Ping,
    ReadChunks,
    ReadChunksReply,
    Request,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    Status,
    StatusReply,
    StoreChunks,
    StoreFromSource,
    Watch,
    WatchEvent,
)
from tests.fake_service import FakeService
from tests.sim.network import SimulatedNetwork

SIMULATED = "tcp://simulated:1"


@pytest.fixture
def unix(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/socket"


def in_simulated_time(main: Callable[[SimulatedNetwork], Awaitable[None]]) -> None:
    async def run() -> None:
        await main(SimulatedNetwork(random.Random(9)))

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def engine_at(
    network: Network, address: str, service: FakeService, *, limits: ServerLimits | None = None
) -> AsyncIterator[Server]:
    """An engine that is drained at the end of the block."""
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


# --- one connection ------------------------------------------------------------------------------------


def test_a_lost_connection_ends_every_call_and_every_later_one() -> None:
    async def main(network: SimulatedNetwork) -> None:
        errors: list[LakeError] = []

        async def call(engine: RemoteEngine) -> None:
            with pytest.raises(EngineUnreachable) as error:
                await engine.call(Status())
            errors.append(error.value)

        service = FakeService()
        async with engine_at(network, SIMULATED, service):
            async with connect_engine(SIMULATED, token="secret", network=network) as engine:
                async with trio.open_nursery() as nursery:
                    for _ in range(100):
                        nursery.start_soon(call, engine)
                    await trio.testing.wait_all_tasks_blocked()
                    network.cut_all()
                assert len(errors) == len(set(map(id, errors))) == 100
                assert engine.lost is not None
                with pytest.raises(EngineUnreachable):
                    await engine.call(Ping())
            await trio.testing.wait_all_tasks_blocked()
            assert not service.clients

    in_simulated_time(main)


def test_errors_leave_the_block_as_they_are(unix: str) -> None:
    async def main() -> None:
        async with engine_at(TrioNetwork(), unix, FakeService()):
            with pytest.raises(KeyError, match="mine"):
                async with connect_engine(unix):
                    raise KeyError("mine")
            with pytest.raises(KeyError, match="mine"):
                async with connect_reconnecting(unix):
                    raise KeyError("mine")
            with trio.move_on_after(10) as scope:
                async with connect_engine(unix) as engine:
                    scope.cancel()
                    await engine.call(Status())
            assert scope.cancelled_caught

    trio.run(main)


async def answer_with(stream: Stream, payload: bytes) -> None:
    await stream.send([payload])
    buffer = memoryview(bytearray(1000))
    while await stream.receive_into(buffer):
        pass


@pytest.mark.parametrize("payload", [b"220 mail.example ESMTP ready, what do you want?\r\n", b""])
def test_something_that_is_no_engine_is_found_out(payload: bytes) -> None:
    async def main(network: SimulatedNetwork) -> None:
        listener = await network.listen(SIMULATED)

        async def serve() -> None:
            stream = await listener.accept()
            await answer_with(stream, payload)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            began = trio.current_time()
            with pytest.raises(ProtocolError if payload else EngineUnreachable):
                async with connect_engine(SIMULATED, network=network):
                    raise AssertionError("that was no engine")
            assert trio.current_time() - began <= 5
            nursery.cancel_scope.cancel()

    in_simulated_time(main)


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
            protocol,
            "scripted",
            b"s" * 16,
            b"e" * 16,
            b"b" * 16,
            0,
            [],
            inflight_max,
            BODY_BYTES_MAX,
            4096,
            False,
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


def test_a_call_cancelled_while_its_body_is_sent_waits_and_no_byte_is_missing(unix: str) -> None:
    body = random.Random(1).randbytes(8_000_000)

    async def main() -> None:
        async with scripted(TrioNetwork(), unix) as (engine, played):
            memory = bytearray(body)
            ended = trio.Event()

            async def call() -> None:
                with trio.CancelScope() as scope:
                    nursery.start_soon(cancel_later, scope)
                    await engine.call(store(body), [memory])
                assert scope.cancelled_caught
                memory[:] = bytes(len(memory))
                ended.set()

            async def cancel_later(scope: trio.CancelScope) -> None:
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert not ended.is_set(), "the memory is still being sent"

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await trio.testing.wait_all_tasks_blocked(0.05)
                event = await played.request(whole_body=False)
                assert await played.take_body(event) == body
                await ended.wait()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.call, Ping())
                while (cancel := played.wire.next_event()) is None:
                    played.wire.reader.received(await played.stream.receive_into(played.wire.reader.space()))
                assert getattr(cancel, "stream_id", None) == event.stream_id
                ping = await played.request()
                await played.stream.send(
                    [played.wire.end(event.stream_id), played.wire.reply(ping.stream_id, Done())]
                )

    trio.run(main)


def test_a_call_cancelled_while_its_memory_is_filled_ends_when_that_is_over(unix: str) -> None:
    payload = random.Random(2).randbytes(100_000)

    async def main() -> None:
        async with scripted(TrioNetwork(), unix) as (engine, played):
            memory = bytearray(len(payload))
            replies: list[Reply] = []

            async def call() -> None:
                replies.append(await engine.call(read(payload), into=[memoryview(memory)]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                event = await played.request()
                await played.stream.send(
                    [played.wire.reply(event.stream_id, ReadChunksReply([]), len(payload)), payload[:70_000]]
                )
                await trio.testing.wait_all_tasks_blocked(0.02)
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked(0.02)
                    assert replies == []
                    await played.stream.send([payload[70_000:]])
            assert memory == payload

    trio.run(main)


def test_a_client_asks_no_more_at_a_time_than_the_engine_allows(unix: str) -> None:
    async def main() -> None:
        service = FakeService()
        async with (
            engine_at(TrioNetwork(), unix, service, limits=ServerLimits(inflight_max=3)),
            connect_engine(unix) as engine,
            trio.open_nursery() as nursery,
        ):
            assert engine.hello.inflight_max == 3
            for _ in range(20):
                nursery.start_soon(engine.call, Status())
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert engine._wire.open_count == 3
            service.gate.set()

    trio.run(main)


def test_requests_that_cannot_be_sent_leave_the_connection_as_it_was(unix: str) -> None:
    async def main() -> None:
        async with engine_at(TrioNetwork(), unix, FakeService()), connect_engine(unix) as engine:
            with pytest.raises(RequestTooLarge):
                await engine.call(store(b""), [bytes(BODY_BYTES_MAX + 1)])
            assert engine._wire.open_count == 0
            assert (await engine.call(Ping())).message == Done()

    trio.run(main)


# --- watching ------------------------------------------------------------------------------------------


def test_a_watch_gives_events_and_ends_with_its_block(unix: str) -> None:
    async def main() -> None:
        service = FakeService()
        events = [WatchEvent("put", number, "b", "k") for number in range(1, 6)]
        async with engine_at(TrioNetwork(), unix, service), connect_engine(unix) as engine:
            async with engine.watch("b") as watch:
                service.publish(*events)
                assert [await anext(watch) for _ in events] == events
            with pytest.raises(BucketNotFound):
                async with engine.watch("none"):
                    raise AssertionError("there is no such bucket")
            assert (await engine.call(Ping())).message == Done()
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert service.watching == 0

    trio.run(main)


def test_a_watcher_that_falls_behind_looks_at_everything_again(
    unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WATCH_QUEUE_MAX", 10)

    async def main() -> None:
        service = FakeService()
        async with (
            engine_at(TrioNetwork(), unix, service),
            connect_engine(unix) as engine,
            engine.watch("b") as watch,
        ):
            service.publish(*[WatchEvent("put", number, "b", "k") for number in range(1, 13)])
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert [(await anext(watch)).kind for _ in range(2)] == ["resync", "put"]

    trio.run(main)


def test_a_watch_ends_with_an_error_when_the_engine_is_lost_and_without_when_it_drains() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with engine_at(network, SIMULATED, FakeService()) as server:
            connect = partial(connect_engine, SIMULATED, token="secret", network=network)
            async with connect() as engine, engine.watch("b") as watch:
                network.cut_all()
                with pytest.raises(EngineUnreachable):
                    await anext(watch)
            async with connect() as engine, engine.watch("b") as watch:
                await server.drain(1)
                assert [event async for event in watch] == []

    in_simulated_time(main)


# --- an engine that comes back -------------------------------------------------------------------------


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


def test_an_engine_that_was_never_there_is_not_waited_for() -> None:
    async def main(network: SimulatedNetwork) -> None:
        began = trio.current_time()
        with pytest.raises(EngineUnreachable):
            async with connect_reconnecting(SIMULATED, network=network):
                raise AssertionError("nobody is there")
        assert trio.current_time() == began

    in_simulated_time(main)


def test_a_lost_engine_is_waited_for_five_seconds() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with (
            restarting(network, SIMULATED, FakeService()) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            await served.stop()
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                await engine.call(Ping())
            assert trio.current_time() - began == pytest.approx(5, abs=0.1)

    in_simulated_time(main)


def test_a_restarted_engine_is_asked_again_only_what_may_be_asked_again() -> None:
    first, second = FakeService(boot_id=b"1" * 16), FakeService(boot_id=b"2" * 16)
    first.waits = (Status, BucketCreate, StoreFromSource)
    outcomes: dict[str, object] = {}

    async def call(engine: ReconnectingEngine, request: Request) -> None:
        try:
            outcomes[type(request).__name__] = (await engine.call(request)).message
        except LakeError as error:
            outcomes[type(request).__name__] = error

    async def main(network: SimulatedNetwork) -> None:
        second.gate.set()
        async with (
            restarting(network, SIMULATED, first) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            sessions = [(await engine.call(SessionOpen())).message for _ in range(2)]
            kept, ended = [message.session for message in sessions if isinstance(message, SessionOpened)]
            await engine.call(SessionEnd(ended))
            assert (engine.epoch, engine.hello.boot_id) == (1, b"1" * 16)
            async with trio.open_nursery() as nursery:
                for request in (Status(), BucketCreate("b"), StoreFromSource(kept, 1, [0], [1])):
                    nursery.start_soon(call, engine, request)
                await trio.testing.wait_all_tasks_blocked()
                network.cut_all()
                await served.stop()
                await trio.sleep(2)
                await served.start(second)
            assert (engine.epoch, engine.hello.boot_id) == (2, b"2" * 16)
            assert second.joined == [kept]

    in_simulated_time(main)
    assert outcomes["Status"] == StatusReply("{}")
    assert isinstance(outcomes["BucketCreate"], EngineUnreachable)
    assert "may or may not" in str(outcomes["BucketCreate"])
    assert isinstance(outcomes["StoreFromSource"], SessionLost)


def test_nothing_is_lost_when_an_engine_drains_and_another_takes_over() -> None:
    async def main(network: SimulatedNetwork) -> None:
        answered = 0

        async def ask(engine: ReconnectingEngine) -> None:
            nonlocal answered
            for _ in range(30):
                await engine.call(BucketCreate("b"))
                answered += 1
                await trio.sleep(0.1)

        async with (
            restarting(network, SIMULATED, FakeService()) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(ask, engine)
                for _ in range(3):
                    await trio.sleep(0.7)
                    await served.stop(within_s=10)
                    await served.start(FakeService())
            assert engine.epoch == 4
        assert answered == 300

    in_simulated_time(main)


def test_a_request_that_ends_the_engine_each_time_is_given_up() -> None:
    async def main(network: SimulatedNetwork) -> None:
        service = FakeService()
        async with restarting(network, SIMULATED, service) as served:
            async with connect_reconnecting(SIMULATED, token="secret", network=network) as engine:

                async def cut() -> None:
                    while True:
                        await trio.testing.wait_all_tasks_blocked()
                        if service.served[-1] == "Status":
                            network.cut_all()
                        await trio.sleep(0.2)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cut)
                    with pytest.raises(EngineUnreachable):
                        await engine.call(Status())
                    nursery.cancel_scope.cancel()
                assert service.served.count("Status") == 3
            await served.stop()

    in_simulated_time(main)


# --- the blocking client -------------------------------------------------------------------------------


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


@pytest.fixture
def engine_thread(unix: str) -> Iterator[InThread]:
    engine = InThread(unix)
    engine.start()
    yield engine
    engine.stop()


def wait_until_served(engine: InThread, name: str, count: int = 1) -> None:
    while engine.service.served.count(name) < count:
        threading.Event().wait(0.001)


def test_the_blocking_client_finishes_tickets_in_any_order(engine_thread: InThread) -> None:
    with connect_blocking(engine_thread.address) as client:
        slow = client.start(Status())
        quick = [client.start(store(bytes([number])), [bytes([number])]) for number in range(60)]
        for number, ticket in reversed(list(enumerate(quick))):
            assert client.finish(ticket).message.chunks == [data_chunk_id(bytes([number]))]  # type: ignore[attr-defined]
        engine_thread.open_gate()
        assert client.finish(slow).message == StatusReply("{}")


def test_many_large_bodies_both_ways_cannot_block_each_other(engine_thread: InThread) -> None:
    payload = random.Random(5).randbytes(3_000_000)
    with connect_blocking(engine_thread.address) as client:
        client.call(store(payload), [payload])
        memories = [bytearray(len(payload)) for _ in range(20)]
        tickets = []
        for memory in memories:
            tickets.append(client.start(read(payload), into=[memoryview(memory)]))
            tickets.append(client.start(store(payload), [payload]))
        for ticket in reversed(tickets):
            client.finish(ticket)
        assert all(memory == payload for memory in memories)


def test_more_tickets_than_the_engine_allows_take_their_turns(unix: str) -> None:
    engine = InThread(unix)
    engine.start(limits=ServerLimits(inflight_max=4))
    try:
        with connect_blocking(unix) as client:
            tickets = [client.start(Ping()) for _ in range(200)]
            assert [client.finish(ticket).message for ticket in tickets] == [Done()] * 200
    finally:
        engine.stop()


def test_threads_share_a_blocking_client(engine_thread: InThread) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(50):
                payload = rng.randbytes(rng.choice([10, 5000, 200_000]))
                client.call(store(payload), [payload])
                assert client.call(read(payload)).body.joined() == payload
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    with connect_blocking(engine_thread.address) as client:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_blocking_client_waits_for_an_engine_that_restarts(unix: str) -> None:
    engine = InThread(unix)
    engine.start(FakeService(waits=(Status, BucketCreate)))
    with connect_blocking(unix) as client:
        again, never = client.start(Status()), client.start(BucketCreate("b"))
        wait_until_served(engine, "BucketCreate")
        session = client.call(SessionOpen()).message
        assert isinstance(session, SessionOpened)
        engine.stop()
        successor = InThread(unix)
        starting = threading.Timer(0.3, successor.start)
        starting.start()

        def open_when_bound() -> None:
            successor.bound.wait()
            successor.open_gate()

        waiting = threading.Timer(0.6, open_when_bound)
        waiting.start()
        assert client.finish(again).message == StatusReply("{}")
        with pytest.raises(EngineUnreachable, match="may or may not"):
            client.finish(never)
        assert client.epoch == 2
        assert successor.service.joined == [session.session]
        starting.join()
        waiting.join()
        successor.stop()


def test_an_idle_blocking_client_notices_a_restart_before_it_asks(unix: str) -> None:
    with connect_blocking_to_first(unix) as client:
        successor = InThread(unix)
        successor.start()
        assert client.call(BucketCreate("b")).message == Buckets([])
        assert client.epoch == 2
        successor.stop()


def connect_blocking_to_first(unix: str) -> BlockingEngine:
    """A client whose engine has gone since."""
    engine = InThread(unix)
    engine.start()
    client = connect_blocking(unix)
    engine.stop()
    return client


def test_a_blocking_client_does_not_wait_for_an_engine_that_was_never_there(
    unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(EngineUnreachable):
        connect_blocking(unix)


def test_a_closed_blocking_client_ends_its_tickets_and_connects_anew(engine_thread: InThread) -> None:
    client = connect_blocking(engine_thread.address)
    ticket = client.start(Status())
    client.close()
    with pytest.raises(EngineUnreachable):
        client.finish(ticket)
    assert client.call(Ping()).message == Done()
    assert client.epoch == 2
    client.close()
    client.close()


def test_closing_wakes_a_thread_that_waits(engine_thread: InThread) -> None:
    client = connect_blocking(engine_thread.address)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            client.call(Status())
        except LakeError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until_served(engine_thread, "Status")
    client.close()
    thread.join()
    assert isinstance(outcome[0], EngineUnreachable)


def test_a_cancelled_ticket_leaves_its_memory_alone(engine_thread: InThread) -> None:
    payload = random.Random(6).randbytes(50_000)
    engine_thread.service.waits = (ReadChunks,)
    with connect_blocking(engine_thread.address) as client:
        client.call(store(payload), [payload])
        memory = bytearray(len(payload))
        ticket = client.start(read(payload), into=[memoryview(memory)])
        wait_until_served(engine_thread, "ReadChunks")
        client.cancel(ticket)
        engine_thread.open_gate()
        with pytest.raises(LakeError):
            client.finish(ticket)
        assert client.call(Ping()).message == Done()
        assert memory == bytes(len(payload))


def test_an_interruption_breaks_the_connection_and_not_the_order_of_bytes(
    engine_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakefs.client import blocking_link

    receive = sockets.receive_with_descriptors

    def interrupted(sock: socket.socket, buffer: memoryview, descriptors: list[int], flags: int) -> int:
        receive(sock, buffer[:10], descriptors)
        raise KeyboardInterrupt

    with connect_blocking(engine_thread.address) as client:
        ticket = client.start(Ping())
        with monkeypatch.context() as patched:
            patched.setattr(blocking_link, "receive_with_descriptors", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.finish(ticket)
        assert client.finish(ticket).message == Done()
        assert client.epoch == 2


def test_a_blocking_client_cannot_watch(engine_thread: InThread) -> None:
    with connect_blocking(engine_thread.address) as client, pytest.raises(InvalidArgument):
        client.start(Watch("b"))


@pytest.mark.parametrize("payload", [b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", b""])
def test_a_blocking_client_finds_out_what_is_no_engine(
    unix: str, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakefs.client.blocking_link.HELLO_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(unix.removeprefix("unix:"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(payload)
                while connection.recv(1000):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError if payload else EngineUnreachable):
            connect_blocking(unix)
        thread.join()


def test_an_engine_of_another_version_is_refused_by_both_clients(unix: str) -> None:
    async def main() -> None:
        network = TrioNetwork()
        listener = await network.listen(unix)

        async def serve() -> None:
            for _ in range(2):
                played = Scripted(await listener.accept())
                await played.hello(protocol=2)
                await played.stream.receive_into(memoryview(bytearray(10)))
                await played.stream.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            with pytest.raises(UnsupportedVersion):
                async with connect_engine(unix):
                    raise AssertionError("that cannot be understood")
            with pytest.raises(UnsupportedVersion):
                await trio.to_thread.run_sync(connect_blocking, unix)
        await listener.aclose()

    trio.run(main)
