"""A server among clients that are broken, slow, hostile, or newer than it: it answers, disconnects, and goes on."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from functools import partial

import pytest
import trio
import trio.testing

from engine.server.connection import ServerLimits
from lakefs.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineUnreachable,
    LakeError,
    PermissionDenied,
    ProtocolError,
    RequestTooLarge,
    UnsupportedVersion,
)
from lakefs.ids import data_chunk_id
from lakefs.limits import STRANGERS_MAX
from lakefs.wire.connection import FailureReceived, ReplyReceived
from lakefs.wire.frames import FRAME_HEADER, HEADER_BYTES, Kind, pack_frame
from lakefs.wire.messages import Hello, Ping, ReadChunks, Status, StoreChunks
from tests.descriptors import descriptor_count
from tests.raw_client import RawClient, Running, raw_client, real, simulated

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


def test_refusals_to_a_client_that_reads_nothing_are_bounded_too() -> None:
    async def test(served: Running) -> None:
        async with served.client() as client:
            unknown = pack_frame(Kind.REQUEST, 4000, 9, Ping()) * 1000
            sent = 0
            with pytest.raises(EngineUnreachable):
                while True:
                    await client.send(unknown)
                    sent += 1
                    assert sent < 1000, "the engine piles up answers"

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


def test_strangers_over_tcp_have_places_of_their_own_and_the_oldest_makes_room(unix: str) -> None:
    async def test(served: Running) -> None:
        friend = Hello(1, "friend", 0, "secret")
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            listener = await served.network.listen("tcp://127.0.0.1:0")
            nursery.start_soon(partial(served.server.serve, listener, trusted=False))

            async def over_tcp() -> RawClient:
                return await stack.enter_async_context(raw_client(served.network, listener.address))

            strangers = [await over_tcp() for _ in range(STRANGERS_MAX + 5)]
            for stranger in strangers[:5]:
                told = await stranger.end()
                assert isinstance(told, EngineBusy)
                assert f"{STRANGERS_MAX} connections over TCP have not shown the token" in told.message
            while served.server.connection_count > STRANGERS_MAX:
                await trio.lowlevel.checkpoint()
            local = [await stack.enter_async_context(served.client()) for _ in range(3)]
            known = await over_tcp()
            await known.hello(friend)
            one_too_many = await over_tcp()
            with pytest.raises(EngineBusy, match="1 connections already, of all clients over TCP"):
                await one_too_many.hello(friend)
            for client in [*local, known]:
                assert await client.is_served()
            await known.stream.aclose()
            while served.server.connection_count > STRANGERS_MAX + 2:  # one stranger was accepted, and one refused
                await trio.lowlevel.checkpoint()
            assert (await strangers[-1].hello(friend)).protocol == 1
            nursery.cancel_scope.cancel()

    real(unix, test, connections_max=4, token="secret")


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
    "say", [b"", PING[:20], pack_frame(Kind.REQUEST, 1, 1, Hello(1, "gone"))], ids=["silent", "truncated", "hello"]
)
def test_ten_thousand_connections_opened_and_dropped_leave_nothing(unix: str, say: bytes) -> None:
    async def test(served: Running) -> None:
        before = descriptor_count()
        for _ in range(10_000 // 3 // 16):
            clients = [RawClient(await served.network.connect(served.address)) for _ in range(16)]
            for client in clients:
                if say:
                    await client.send(say)
            for client in clients:
                await client.stream.aclose()
        while served.server.connection_count:
            await trio.lowlevel.checkpoint()
        assert descriptor_count() == before
        assert not served.service.clients

    real(unix, test)
