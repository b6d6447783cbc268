"""The trio client over one connection: every call ends, with its own answer, whatever the engine does."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
import trio.testing

from engine.server.connection import ServerLimits
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.trio import watch_events
from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.errors import (
    BucketNotFound,
    EngineUnreachable,
    LakeError,
    ProtocolError,
    RequestTooLarge,
    UnsupportedVersion,
)
from lakefs.limits import BODY_BYTES_MAX
from lakefs.ports import Stream
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.messages import Done, Ping, ReadChunksReply, Status, WatchEvent
from tests.engines import SIMULATED, Scripted, engine_at, in_simulated_time, read, scripted, store
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork


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
                await played.stream.send([played.wire.end(event.stream_id), played.wire.reply(ping.stream_id, Done())])

    trio.run(main)


def test_a_call_cancelled_while_its_memory_is_filled_ends_when_that_is_over(unix: str) -> None:
    payload = random.Random(2).randbytes(100_000)

    async def main() -> None:
        async with scripted(TrioNetwork(), unix) as (engine, played):
            memory = bytearray(len(payload))
            ended = trio.Event()

            async def call() -> None:
                try:
                    await engine.call(read(payload), into=[memoryview(memory)])
                finally:
                    ended.set()

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
                    assert not ended.is_set(), "the memory is still being filled"
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


def test_a_watcher_that_falls_behind_looks_at_everything_again(unix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_events, "WATCH_QUEUE_MAX", 10)

    async def main() -> None:
        service = FakeService()
        async with engine_at(TrioNetwork(), unix, service), connect_engine(unix) as engine, engine.watch("b") as watch:
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
