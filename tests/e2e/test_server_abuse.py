"""A server among clients that are broken, slow, hostile, or of another time: it answers, drops, and goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from engine.served_connection import ServerLimits
from lakefs.errors import (
    BucketNotFound,
    DeadlineExceeded,
    EngineBusy,
    EngineUnreachable,
    InternalError,
    LakeError,
    PermissionDenied,
    ProtocolError,
    RequestTooLarge,
    UnsupportedVersion,
)
from lakefs.ids import data_chunk_id
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX, WATCHES_PER_CONNECTION_MAX
from lakefs.net import TrioNetwork
from lakefs.wire.connection import (
    EventReceived,
    FailureReceived,
    GoodbyeReceived,
    ReplyReceived,
    StreamEnded,
)
from lakefs.wire.frames import FRAME_HEADER, HEADER_BYTES, Kind, pack_frame
from lakefs.wire.messages import (
    Done,
    Hello,
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
from tests.raw_client import RawClient, Running, running
from tests.sim.network import SimulatedNetwork

Test = Callable[[Running], Awaitable[None]]


@pytest.fixture
def unix(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/socket"


def real(address: str, test: Test, **options: object) -> None:
    """Run a test against a server on a real socket."""

    async def main() -> None:
        async with running(TrioNetwork(), address, **options) as served:  # type: ignore[arg-type]
            await test(served)

    trio.run(main)


def simulated(test: Test, **options: object) -> None:
    """Run a test against a server in simulated time."""

    async def main() -> None:
        network = SimulatedNetwork(random.Random(5))
        async with running(network, "tcp://simulated:0", **options) as served:  # type: ignore[arg-type]
            await test(served)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- broken frames -------------------------------------------------------------------------------------


def damaged(frame: bytes, position: int) -> bytes:
    changed = bytearray(frame)
    changed[position] ^= 0x10
    return bytes(changed)


PING = pack_frame(Kind.REQUEST, Ping.OP, 9, Ping())
HUGE = FRAME_HEADER.pack(b"LAK1", 1, 0, 2, 9, 2**32 - 1, 2**32 - 1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("garbage", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n", ProtocolError),
        (random.Random(1).randbytes(5000), ProtocolError),
        (bytes(HEADER_BYTES), ProtocolError),
        (HUGE, RequestTooLarge),
        *[(damaged(PING, position), LakeError) for position in (0, 4, 5, 6, 8, 24, 28, 31, HEADER_BYTES)],
    ],
    ids=lambda value: value[:5].hex() if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize("greeted", [True, False])
def test_garbage_is_answered_once_and_only_its_connection_ends(
    unix: str, garbage: bytes, error: type[LakeError], greeted: bool
) -> None:
    async def test(served: Running) -> None:
        async with served.client() as bystander:
            async with served.client() if greeted else served.stranger() as client:
                await client.send(garbage)
                assert isinstance(await client.end(), error)
            assert await bystander.is_served()

    real(unix, test)


@pytest.mark.parametrize("length", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_client_that_goes_in_the_middle_of_a_frame_leaves_nothing(unix: str, length: int) -> None:
    async def test(served: Running) -> None:
        for _ in range(3):
            async with served.client() as client:
                await client.send(PING[:length])
        async with served.client() as client:
            assert await client.is_served()

    real(unix, test)


def test_a_client_that_goes_in_the_middle_of_a_body_leaves_nothing(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            frame = pack_frame(Kind.REQUEST, StoreChunks.OP, 9, StoreChunks(b"s", [1], [1 << 20]), 1 << 20)
            await client.send(frame, bytes(300_000))
            while not served.service.bodies_out:
                await trio.lowlevel.checkpoint()
        while served.service.bodies_out:
            await trio.lowlevel.checkpoint()

    real(unix, test)


# --- slow clients --------------------------------------------------------------------------------------


def test_a_client_that_does_not_say_hello_is_dropped_in_time() -> None:
    async def test(served: Running) -> None:
        async with served.stranger() as client:
            began = trio.current_time()
            assert isinstance(await client.end(), DeadlineExceeded)
            assert trio.current_time() - began == pytest.approx(5)

    simulated(test)


def test_a_hello_that_trickles_in_is_dropped_in_time() -> None:
    async def test(served: Running) -> None:
        async with served.stranger() as client:
            frame = pack_frame(Kind.REQUEST, 1, 1, Hello(1, "slow"))
            with pytest.raises(EngineUnreachable):
                for position in range(len(frame)):
                    await client.send(frame[position : position + 1])
                    await trio.sleep(0.5)
            assert trio.current_time() < 7

    simulated(test)


@pytest.mark.parametrize("length", [1, HEADER_BYTES, len(PING)])
def test_a_frame_that_has_begun_has_to_end_in_time(length: int) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            await trio.sleep(1000)
            began = trio.current_time()
            frame = pack_frame(Kind.REQUEST, StoreChunks.OP, 9, StoreChunks(b"s", [1], [500]), 500)
            await client.send(frame[:length] if length < len(PING) else frame + bytes(20))
            assert isinstance(await client.end(), DeadlineExceeded)
            assert trio.current_time() - began == pytest.approx(30)

    simulated(test)


def test_a_busy_client_whose_frames_always_overlap_is_not_taken_for_a_slow_one() -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            await client.send(PING[:10])
            for _ in range(100):
                await trio.sleep(1)
                client.wire._open[9] = Ping.OP
                await client.send(PING[10:], PING[:10])
                assert isinstance(await client.answer(), ReplyReceived)

    simulated(test)


def test_a_client_that_reads_nothing_is_served_no_further_and_dropped() -> None:
    payload = bytes(100_000)

    async def test(served: Running) -> None:
        chunk = data_chunk_id(payload)
        served.service.chunks[chunk] = payload
        async with served.client() as client:
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                while True:
                    await client.ask(ReadChunks([chunk], [0], [0]))
                    assert served.service.bodies_out <= 8
            assert trio.current_time() - began < 61
            assert served.service.served.count("ReadChunks") <= 9
        assert served.service.bodies_out == 0

    simulated(test, limits=ServerLimits(inflight_max=8))


def test_small_answers_to_a_client_that_reads_nothing_are_bounded_too() -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            with pytest.raises(EngineUnreachable):
                while True:
                    await client.ask(Ping())
            assert len(served.service.served) < 20_000

    simulated(test)


def test_requests_over_the_limit_wait_until_others_have_ended(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            for _ in range(100):
                await client.ask(Status())
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert served.service.served.count("Status") == 64
            served.service.gate.set()
            answers = [await client.answer() for _ in range(100)]
            assert all(isinstance(answer, ReplyReceived) for answer in answers)

    real(unix, test)


# --- from the future -----------------------------------------------------------------------------------


def test_operations_flags_and_kinds_of_the_future_leave_the_connection_alive(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            for frame, answered in (
                (pack_frame(Kind.REQUEST, 4000, 9, Ping(), 70_000), True),
                (pack_frame(Kind.REQUEST, Ping.OP, 9, Ping(), 70_000, flags=0x80), True),
                (pack_frame(77, 2, 9, Ping(), 70_000), False),  # type: ignore[arg-type]
            ):
                client.wire._open[9] = Ping.OP
                await client.send(frame, bytes(70_000))
                if answered:
                    answer = await client.answer()
                    assert isinstance(answer, FailureReceived)
                    assert isinstance(answer.error, UnsupportedVersion)
                assert await client.is_served()

    real(unix, test)


def test_a_client_of_another_version_is_told(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.stranger() as client:
            with pytest.raises(UnsupportedVersion):
                await client.hello(Hello(0, "ancient"))
            assert await client.end() is None
        async with served.stranger() as client:
            assert (await client.hello(Hello(99, "future"))).protocol == 1

    real(unix, test)


# --- who may come in -----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong", "secret "])
def test_a_wrong_token_lets_nobody_in(token: str) -> None:
    async def test(served: Running) -> None:
        async with served.stranger() as client:
            with pytest.raises(PermissionDenied):
                await client.hello(Hello(1, "thief", 0, token))
            assert await client.end() is None
        assert served.service.connected_total == 0
        async with served.stranger() as client:
            await client.hello(Hello(1, "friend", 0, "secret"))
            assert await client.is_served()

    real("tcp://127.0.0.1:0", test, token="secret", trusted=False)


def test_a_server_without_token_lets_no_stranger_in() -> None:
    async def test(served: Running) -> None:
        async with served.stranger() as client:
            with pytest.raises(PermissionDenied):
                await client.hello()

    real("tcp://127.0.0.1:0", test, trusted=False)


def test_connections_over_the_limit_are_refused_politely_and_let_in_later(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as first:
            async with served.client():
                async with served.stranger() as third:
                    assert isinstance(await third.end(), EngineBusy)
                assert await first.is_served()
            while served.server.connection_count > 1:
                await trio.lowlevel.checkpoint()
            async with served.client() as third:
                assert await third.is_served()

    real(unix, test, connections_max=2)


@pytest.mark.parametrize(
    "say",
    [b"", PING[:20], pack_frame(Kind.REQUEST, 1, 1, Hello(1, "gone"))],
    ids=["silent", "truncated", "hello"],
)
def test_ten_thousand_connections_opened_and_dropped_leave_nothing(unix: str, say: bytes) -> None:
    async def test(served: Running) -> None:
        before = open_descriptors()
        for _ in range(10_000 // 3 // 16):
            clients = [RawClient(await served.network.connect(served.address)) for _ in range(16)]
            for client in clients:
                if say:
                    await client.send(say)
            for client in clients:
                await client.stream.aclose()
        while served.server.connection_count:
            await trio.lowlevel.checkpoint()
        assert open_descriptors() == before
        assert not served.service.clients

    real(unix, test)


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
            await trio.sleep(10)
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
            before = open_descriptors()
            for _ in range(50):
                await client.send(pack_frame(Kind.REQUEST, Ping.OP, 9, Ping()), descriptors=[0] * 10)
                client.wire._open[9] = Ping.OP
                await client.answer()
            assert await client.is_served()
            assert open_descriptors() == before

    real(unix, test)


def test_a_flood_of_descriptors_ends_the_connection(unix: str) -> None:
    async def test(served: Running) -> None:
        before = open_descriptors()
        async with served.client() as client:
            frame = pack_frame(Kind.REQUEST, Ping.OP, 9, Ping(), 1000)
            with pytest.raises(EngineUnreachable):
                await client.send(frame)
                for _ in range(1000):
                    await client.send(b"x", descriptors=[0] * DESCRIPTORS_PER_FRAME_MAX)
                    await trio.lowlevel.checkpoint()
            assert isinstance(await client.end(), ProtocolError)
        while open_descriptors() > before:
            await trio.lowlevel.checkpoint()

    real(unix, test)


@pytest.mark.parametrize("request_frame", [SourceOpen.OP, 4000])
def test_descriptors_of_refused_requests_are_closed(unix: str, request_frame: int) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            before = open_descriptors()
            client.wire._open[9] = Ping.OP
            await client.send(
                pack_frame(Kind.REQUEST, request_frame, 9, SourceOpen(), descriptor_count=3),
                descriptors=[0, 1],
            )
            assert isinstance(await client.answer(), FailureReceived)
            assert await client.is_served()
            assert open_descriptors() == before

    real(unix, test)


# --- watch, drain --------------------------------------------------------------------------------------


def test_a_watch_sends_events_until_it_is_cancelled(unix: str) -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            watch = await client.ask(Watch("b"))
            assert await client.message() == Done()
            events = [WatchEvent("put", number, "b", f"k{number}") for number in range(1, 4)]
            served.service.publish(*events)
            assert [await client.answer() for _ in events] == [
                EventReceived(watch, event) for event in events
            ]
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
