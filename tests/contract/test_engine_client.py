"""The contract of `EngineClient`: the same behaviour, whichever way requests take to the engine."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from engine.process.embedded import EmbeddedEngine
from engine.server.listener import Server
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.trio.engine import connect_engine
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.errors import BucketNotFound, ChunkNotFound, InternalError, InvalidArgument
from lakefs.host.buffers import BUFFER_BYTES, BufferPool, PooledPayload
from lakefs.host.descriptors import close_all
from lakefs.ids import Buffer, data_chunk_id
from lakefs.limits import INFLIGHT_PER_CONNECTION
from lakefs.ports import Network
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import (
    BucketRemove,
    Done,
    OpenSegments,
    Ping,
    ReadChunks,
    ReadChunksReply,
    RunFsck,
    SegmentsOpened,
    SourceOpen,
    StatNames,
    Status,
    StatusReply,
    StoreChunks,
    Stored,
    WatchEvent,
)
from tests.contract.engines import InThreads
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork

Opened = Callable[[FakeService], AbstractAsyncContextManager[EngineClient]]
SESSION = b"s" * 16


@asynccontextmanager
async def served(service: FakeService, network: Network, address: str) -> AsyncIterator[str]:
    """Serve the service; yield the address."""
    server = Server(service, network, token="secret")
    async with trio.open_nursery() as nursery:
        yield await nursery.start(server.listen_and_serve, address)
        with trio.CancelScope(shield=True):
            await server.drain(5)


def remote(network: Callable[[], Network], address: str, *, reconnecting: bool = False) -> Opened:
    @asynccontextmanager
    async def opened(service: FakeService) -> AsyncIterator[EngineClient]:
        made = network()
        async with served(service, made, address) as real:
            connect = connect_reconnecting if reconnecting else connect_engine
            async with connect(real, token="secret", network=made) as engine:
                yield engine

    return opened


def blocking(address: str) -> Opened:
    @asynccontextmanager
    async def opened(service: FakeService) -> AsyncIterator[EngineClient]:
        async with served(service, TrioNetwork(), address) as real:
            engine = await trio.to_thread.run_sync(lambda: connect_blocking(real, token="secret"))
            try:
                yield InThreads(engine)
            finally:
                engine.close()

    return opened


@asynccontextmanager
async def embedded(service: FakeService) -> AsyncIterator[EngineClient]:
    engine = EmbeddedEngine(service)
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest.fixture(params=["embedded", "unix", "tcp", "simulated", "reconnecting", "blocking-unix", "blocking-tcp"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    unix, tcp = f"unix:{tmp_path}/socket", "tcp://127.0.0.1:0"
    kinds: dict[str, Opened] = {
        "embedded": embedded,
        "unix": remote(TrioNetwork, unix),
        "tcp": remote(TrioNetwork, tcp),
        "simulated": remote(lambda: SimulatedNetwork(random.Random(3)), "tcp://simulated:0"),
        "reconnecting": remote(TrioNetwork, unix, reconnecting=True),
        "blocking-unix": blocking(unix),
        "blocking-tcp": blocking(tcp),
    }
    return kinds[request.param]


def run(opened: Opened, body: Callable[[EngineClient, FakeService], Awaitable[None]]) -> FakeService:
    """Run `body` with a client; afterwards every body is released and nobody is connected."""
    service = FakeService()

    async def main() -> None:
        async with opened(service) as engine:
            await body(engine, service)

    trio.run(main)
    assert service.bodies_out == 0, "a body was not released"
    assert not service.clients, "a connection was not ended"
    return service


def store(*payloads: bytes) -> StoreChunks:
    return StoreChunks(SESSION, [1] * len(payloads), [len(payload) for payload in payloads])


def read(*payloads: bytes) -> ReadChunks:
    return ReadChunks([data_chunk_id(payload) for payload in payloads], [0] * len(payloads), [0] * len(payloads))


def test_a_request_is_answered(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        reply = await engine.call(Ping())
        assert reply.message == Done()
        assert reply.body.nbytes == 0
        assert list(reply.descriptors) == []

    run(opened, body)


@pytest.mark.parametrize("sizes", [[0], [1], [5000], [20_000, 1, 70_000], [4 << 20, 3 << 20]])
def test_payloads_arrive_as_they_were_sent(opened: Opened, sizes: list[int]) -> None:
    payloads = [random.Random(size).randbytes(size) for size in sizes]

    async def body(engine: EngineClient, service: FakeService) -> None:
        stored = (await engine.call(store(*payloads), payloads)).message
        assert stored == Stored([data_chunk_id(payload) for payload in payloads], [True] * len(payloads))
        reply = await engine.call(read(*payloads))
        assert isinstance(reply.message, ReadChunksReply)
        assert reply.body.joined() == b"".join(payloads)
        reply.body.release()

    run(opened, body)


def test_a_request_body_may_come_in_any_parts(opened: Opened) -> None:
    payload = random.Random(1).randbytes(100_000)

    async def body(engine: EngineClient, service: FakeService) -> None:
        parts: list[Buffer] = [payload[:1], bytearray(payload[1:60_000]), memoryview(payload)[60_000:]]
        await engine.call(store(payload), parts)
        assert service.chunks[data_chunk_id(payload)] == payload

    run(opened, body)


def test_a_pooled_payload_is_stored_as_it_was_sent_though_its_buffer_is_filled_anew_at_once(opened: Opened) -> None:
    payloads = [random.Random(size).randbytes(size) for size in (1, 70_000, 4 << 20)]

    async def body(engine: EngineClient, service: FakeService) -> None:
        buffer = BufferPool(BUFFER_BYTES).try_acquire()
        assert buffer is not None
        for payload in payloads:
            buffer.view[: len(payload)] = payload
            await engine.call(store(payload), PooledPayload(buffer, len(payload)))
            buffer.view[:] = bytes(BUFFER_BYTES)
        buffer.release()
        assert service.chunks == {data_chunk_id(payload): payload for payload in payloads}

    run(opened, body)


@pytest.mark.parametrize("bodies_max", [0, 1])
def test_a_pooled_buffer_is_the_callers_once_its_call_was_cancelled(opened: Opened, bodies_max: int) -> None:
    """Cancelled before the engine has taken the body (no room), or while it is at work on it."""
    payload = random.Random(4).randbytes(4 << 20)

    async def body(engine: EngineClient, service: FakeService) -> None:
        if isinstance(engine, InThreads):
            pytest.skip("threads cannot be cancelled")
        service.waits, service.bodies_max = (StoreChunks,), bodies_max
        buffer = BufferPool(BUFFER_BYTES).try_acquire()
        assert buffer is not None
        buffer.view[: len(payload)] = payload

        async def call() -> None:
            try:
                await engine.call(store(payload), PooledPayload(buffer, len(payload)))
            finally:
                buffer.view[:] = bytes(BUFFER_BYTES)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
            service.bodies_max = 1
            service.body_back.set()
        service.gate.set()
        await engine.call(Ping())
        assert set(service.chunks) <= {data_chunk_id(payload)}

    run(opened, body)


def test_a_reply_is_received_into_the_callers_memory(opened: Opened) -> None:
    payload = random.Random(2).randbytes(300_000)

    async def body(engine: EngineClient, service: FakeService) -> None:
        await engine.call(store(payload), [payload])
        memory = bytearray(400_000)
        into = [memoryview(memory)[:100_000], memoryview(memory)[100_000:]]
        reply = await engine.call(read(payload), into=into)
        assert memory[:300_000] == payload
        assert memory[300_000:] == bytes(100_000)
        assert reply.body.joined() == payload

    run(opened, body)


def test_a_reply_that_does_not_fit_goes_elsewhere(opened: Opened) -> None:
    payload = random.Random(2).randbytes(3000)

    async def body(engine: EngineClient, service: FakeService) -> None:
        await engine.call(store(payload), [payload])
        memory = bytearray(2999)
        reply = await engine.call(read(payload), into=[memoryview(memory)])
        assert reply.body.joined() == payload
        assert memory == bytes(2999)
        reply.body.release()

    run(opened, body)


def test_the_engines_error_is_raised_with_its_words(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        with pytest.raises(BucketNotFound, match="does not exist") as error:
            await engine.call(BucketRemove("photos"))
        assert error.value.subject == "photos"
        with pytest.raises(ChunkNotFound):
            await engine.call(read(b"never stored"))
        assert (await engine.call(Ping())).message == Done()

    run(opened, body)


def test_a_body_of_another_length_is_refused_and_the_next_request_is_served(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        for payload in (b"short", b"x" * 100_000):
            with pytest.raises(InvalidArgument):
                await engine.call(StoreChunks(SESSION, [1], [50]), [payload])
        with pytest.raises(InvalidArgument):
            await engine.call(Ping(), [b"nobody asked for it"])
        assert (await engine.call(Ping())).message == Done()

    run(opened, body)


def test_a_bug_of_the_engine_is_an_error_of_that_request_only(opened: Opened, request: pytest.FixtureRequest) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        expected = ZeroDivisionError if isinstance(engine, EmbeddedEngine) else InternalError
        with pytest.raises(expected):
            await engine.call(RunFsck())
        assert (await engine.call(Ping())).message == Done()

    run(opened, body)


def test_many_callers_get_their_own_answers_in_any_order(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        slow: list[Any] = []

        async def wait_for_gate() -> None:
            slow.append((await engine.call(Status())).message)

        async def stat(key: str) -> None:
            reply = await engine.call(StatNames([("b", key)]))
            assert reply.message.results[0].failure.message == key  # type: ignore[attr-defined]

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(wait_for_gate)
            async with trio.open_nursery() as quick:
                for number in range(100):
                    quick.start_soon(stat, f"key-{number}")
            assert slow == [], "the quick ones did not wait for the slow ones"
            service.gate.set()
        assert slow == [StatusReply("{}")] * 10

    run(opened, body)


def test_descriptors_go_to_the_engine_and_come_back_as_new_ones(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"segment")

    async def body(engine: EngineClient, service: FakeService) -> None:
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            if not engine.carries_descriptors:
                with pytest.raises(InvalidArgument):
                    await engine.call(SourceOpen(), (), [descriptor])
                return
            await engine.call(SourceOpen(), (), [descriptor])
            assert service.source_text == b"segment"
            service.segments = {5: descriptor, 6: descriptor}
            reply = await engine.call(OpenSegments([4, 5, 6]))
            assert reply.message == SegmentsOpened([5, 6])
            assert len(set(reply.descriptors) | {descriptor}) == 3
            assert [os.pread(received, 9, 0) for received in reply.descriptors] == [b"segment"] * 2
            close_all(reply.descriptors)
        finally:
            os.close(descriptor)

    run(opened, body)


def test_what_is_told_is_sent_when_nothing_is_under_way_and_dropped_when_the_engine_is_slow(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        if isinstance(engine, EmbeddedEngine):
            assert not engine.tell(Ping())
            return
        assert engine.tell(Status())
        assert not engine.tell(Ping()), "what was told before is not answered yet"
        await engine.call(Ping())
        assert not engine.tell(Ping())
        service.gate.set()
        while not engine.tell(Ping()):
            await engine.call(StatNames([]))
        await engine.call(StatNames([]))
        assert service.served.count("Status") == 1
        assert service.served.count("Ping") == 2

    run(opened, body)


def test_nothing_is_told_while_a_call_waits_for_its_answer(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.call, Status())
            while "Status" not in service.served:
                await trio.lowlevel.checkpoint()
            assert not engine.tell(Ping())
            service.gate.set()
        assert "Ping" not in service.served

    run(opened, body)


def test_a_cancelled_call_ends_and_the_client_lives(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        if isinstance(engine, InThreads):
            pytest.skip("threads cannot be cancelled")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.call, Status())
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
        assert (await engine.call(Ping())).message == Done()

    service = run(opened, body)
    assert "Status" in service.cancelled


def test_calls_cancelled_while_the_engine_serves_them_in_several_tasks_make_room_for_others(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        if isinstance(engine, InThreads):
            pytest.skip("threads cannot be cancelled")
        service.tasks = 2
        async with trio.open_nursery() as nursery:
            for _ in range(INFLIGHT_PER_CONNECTION):
                nursery.start_soon(engine.call, Status())
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
        with trio.fail_after(30):
            assert (await engine.call(Ping())).message == Done()

    run(opened, body)


def test_a_watch_gives_events_in_order_and_ends_with_its_block(opened: Opened) -> None:
    async def body(engine: EngineClient, service: FakeService) -> None:
        if isinstance(engine, InThreads):
            pytest.skip("a blocking connection cannot watch")
        events = [WatchEvent("put", number, "b", f"k{number}") for number in range(1, 4)]
        async with engine.watch("b") as watch:
            service.publish(*events)
            assert [await anext(watch) for _ in events] == events
        with pytest.raises(BucketNotFound):
            async with engine.watch("none"):
                raise AssertionError("there is no such bucket")
        assert (await engine.call(Ping())).message == Done()

    assert run(opened, body).watching == 0
