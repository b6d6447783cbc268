"""The requests of one connection at a server: order, cancel, deadline, descriptors, watches, shutdown."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.server.connection import ServerLimits
from engine.server.listener import Server
from lakefs.errors import BucketNotFound, DeadlineExceeded, EngineBusy, EngineUnreachable, InternalError, ProtocolError
from lakefs.ids import data_chunk_id
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX, WATCHES_PER_CONNECTION_MAX
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.connection import EventReceived, FailureReceived, GoodbyeReceived, ReplyReceived, StreamEnded
from lakefs.wire.frames import Kind, pack_frame
from lakefs.wire.messages import (
    Done,
    Ping,
    ReadChunks,
    RunFsck,
    SourceOpen,
    Status,
    StatusReply,
    StoreChunks,
    Watch,
    WatchEvent,
)
from tests.descriptors import descriptor_count
from tests.fake_service import FakeService
from tests.raw_client import RawClient, Running, real, simulated
from tests.sim.world.network import SimulatedNetwork

# --- pipelining, cancel, deadline ----------------------------------------------------------------------


def test_quick_requests_overtake_slow_ones(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            slow = await client.ask(Status())
            quick = [await client.ask(Ping()) for _ in range(500)]
            assert [(await client.answer()).stream_id for _ in quick] == quick  # type: ignore[union-attr]
            served.service.gate.set()
            assert await client.answer() == ReplyReceived(slow, StatusReply("{}"), 0, 0)

    real(unix, test)


def test_what_an_answer_did_not_need_is_done_behind_it_and_harms_nobody_when_it_fails(unix: str) -> None:
    async def test(served: Running) -> None:
        done: list[str] = []

        def then() -> None:
            done.append("behind")
            raise ZeroDivisionError("planted")

        async with served.client() as client:
            served.service.then = then
            for count in (1, 2):
                stream_id = await client.ask(Ping())
                assert await client.answer() == ReplyReceived(stream_id, Done(), 0, 0)
                assert await client.is_served()
                assert len(done) == 2 * count
            served.service.then = None
            assert await client.is_served()

    real(unix, test)


def test_a_cancelled_request_stops_and_gets_its_final_frame(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            kept = await client.ask(Status())
            given_up = [await client.ask(Status()) for _ in range(3)]
            for stream_id in given_up:
                await client.send(client.wire.cancel(stream_id))
            ended = [await client.answer() for _ in given_up]
            assert sorted(map(str, ended)) == [str(StreamEnded(stream_id)) for stream_id in given_up]
            assert served.service.cancelled == ["Status"] * 3
            assert await client.is_served()
            served.service.gate.set()
            assert await client.answer() == ReplyReceived(kept, StatusReply("{}"), 0, 0)
            await client.send(client.wire.cancel(kept), client.wire.cancel(12345))
            assert await client.is_served()

    real(unix, test)


def test_a_deadline_stops_a_request_and_says_so() -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            began = trio.current_time()
            await client.ask(Status(), deadline_ms=2500)
            answer = await client.answer()
            assert isinstance(answer, FailureReceived)
            assert isinstance(answer.error, DeadlineExceeded)
            assert trio.current_time() - began == pytest.approx(2.5)
            await client.ask(Ping(), deadline_ms=1)
            assert isinstance(await client.answer(), ReplyReceived)
            stored, frame = client.wire.request(StoreChunks(b"s", [1], [4]), 4)
            await client.send(frame, b"ab")
            await trio.sleep(10)
            await client.send(b"cd")
            answer = await client.answer()
            assert isinstance(answer, ReplyReceived), "the deadline was another request's"
            assert answer.stream_id == stored
            served.service.gate.set()
            await client.ask(Status())
            assert isinstance(await client.answer(), ReplyReceived)

    simulated(test)


def test_a_bug_in_one_request_is_answered_and_logged_and_the_connection_lives(
    unix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            await client.ask(RunFsck())
            answer = await client.answer()
            assert isinstance(answer, FailureReceived)
            assert isinstance(answer.error, InternalError)
            assert "planted" not in answer.error.message
            assert await client.is_served()

    real(unix, test)
    assert "ZeroDivisionError: planted" in capsys.readouterr().out


# --- descriptors ---------------------------------------------------------------------------------------


def test_descriptors_that_nobody_announced_are_closed(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            before = descriptor_count()
            for _ in range(50):
                await client.send(pack_frame(Kind.REQUEST, Ping.OP, 9, Ping()), descriptors=[0] * 10)
                client.wire._open[9] = Ping.OP
                await client.answer()
            assert await client.is_served()
            assert descriptor_count() == before

    real(unix, test)


def test_a_flood_of_descriptors_ends_the_connection(unix: str) -> None:
    async def test(served: Running) -> None:
        before = descriptor_count()
        async with served.client() as client:
            frame = pack_frame(Kind.REQUEST, Ping.OP, 9, Ping(), 1000)
            with pytest.raises(EngineUnreachable):
                await client.send(frame)
                for _ in range(1000):
                    await client.send(b"x", descriptors=[0] * DESCRIPTORS_PER_FRAME_MAX)
                    await trio.lowlevel.checkpoint()
            assert isinstance(await client.end(), ProtocolError)
        while descriptor_count() > before:
            await trio.lowlevel.checkpoint()

    real(unix, test)


@pytest.mark.parametrize("request_frame", [SourceOpen.OP, 4000])
def test_descriptors_of_refused_requests_are_closed(unix: str, request_frame: int) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            before = descriptor_count()
            client.wire._open[9] = Ping.OP
            await client.send(
                pack_frame(Kind.REQUEST, request_frame, 9, SourceOpen(), descriptor_count=3), descriptors=[0, 1]
            )
            assert isinstance(await client.answer(), FailureReceived)
            assert await client.is_served()
            assert descriptor_count() == before

    real(unix, test)


# --- watch, drain --------------------------------------------------------------------------------------


def test_a_watch_sends_events_until_it_is_cancelled(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            watch = await client.ask(Watch("b"))
            assert await client.message() == Done()
            events = [WatchEvent("put", number, "b", f"k{number}") for number in range(1, 4)]
            served.service.publish(*events)
            assert [await client.answer() for _ in events] == [EventReceived(watch, event) for event in events]
            assert await client.is_served()
            await client.send(client.wire.cancel(watch))
            assert await client.answer() == StreamEnded(watch)
            assert served.service.watching == 0

    real(unix, test)


def test_watches_are_bounded_and_do_not_count_as_requests_in_flight(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            for _ in range(WATCHES_PER_CONNECTION_MAX):
                await client.ask(Watch("b"))
                assert await client.message() == Done()
            await client.ask(Watch("b"))
            with pytest.raises(EngineBusy):
                await client.message()
            await client.ask(Watch("none"))
            with pytest.raises(EngineBusy):
                await client.message()
            assert await client.is_served()
        async with served.client() as client:
            await client.ask(Watch("none"))
            with pytest.raises(BucketNotFound):
                await client.message()

    real(unix, test, limits=ServerLimits(inflight_max=1))


def test_draining_finishes_what_is_in_flight_and_refuses_the_rest(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client, served.client() as idle, served.stranger() as stranger:
            slow, watch = await client.ask(Status()), await client.ask(Watch("b"))
            assert await client.answer() == ReplyReceived(watch, Done(), 0, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.server.drain, 1000)
                assert await client.answer() == GoodbyeReceived()
                assert await idle.answer() == GoodbyeReceived()
                assert await client.answer() == StreamEnded(watch)
                await client.ask(Ping())
                with pytest.raises(EngineBusy):
                    await client.message()
                with pytest.raises(EngineUnreachable):
                    await served.network.connect(served.address)
                served.service.gate.set()
                assert await client.answer() == ReplyReceived(slow, StatusReply("{}"), 0, 0)
            for ended in (client, idle, stranger):
                assert await ended.end() is None

    real(unix, test)


def test_draining_gives_up_on_what_does_not_end() -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            await client.ask(Status())
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            await served.server.drain(7)
            assert trio.current_time() - began == pytest.approx(7)
            assert served.service.cancelled == ["Status"]

    simulated(test)


def test_cutting_every_connection_at_random_leaves_nothing() -> None:
    payload = random.Random(3).randbytes(50_000)

    async def work(client: RawClient, rng: random.Random) -> None:
        try:
            while True:
                await client.ask(rng.choice([Ping(), Status(), Watch("b")]))
                await client.ask(StoreChunks(b"s", [1], [len(payload)]), payload)
                await client.ask(ReadChunks([data_chunk_id(payload)], [0], [0]))
                await client.answer()
        except EngineUnreachable:
            return

    async def test(served: Running) -> None:
        assert isinstance(served.network, SimulatedNetwork)
        rng = random.Random(11)
        for _ in range(20):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    client = RawClient(await served.network.connect(served.address))
                    await client.hello()
                    nursery.start_soon(work, client, rng)
                await trio.sleep(rng.random())
                served.network.cut_all()
            await trio.testing.wait_all_tasks_blocked()
            assert served.server.connection_count == 0
            assert served.service.bodies_out == 0

    simulated(test)


def test_a_server_that_is_cancelled_tells_the_service_of_every_end(unix: str) -> None:
    service = FakeService()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            server = Server(service, TrioNetwork(), token=None)
            await nursery.start(server.listen_and_serve, unix)
            clients = [RawClient(await TrioNetwork().connect(unix)) for _ in range(3)]
            for client in clients:
                await client.hello()
                await client.ask(Status())
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert len(service.clients) == 3
            nursery.cancel_scope.cancel()
        for client in clients:
            await client.stream.aclose()

    trio.run(main)
    assert not service.clients
    assert service.cancelled == ["Status"] * 3
    assert not Path(unix.removeprefix("unix:")).exists()
