"""Memory for arriving payloads: bounded, given back, and not kept from others by a client that stalls."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from gateway.s3.request.receiving import STALLED_S, Received, ReceiveMemory
from lakefs.host.buffers import BUFFER_BYTES, PooledPayload
from lakefs.limits import CHUNK_BYTES


class FakeBody:
    """The body of a client that sends, or stalls."""

    def __init__(self, waits_since: float = math.inf) -> None:
        self.length = CHUNK_BYTES
        self.waits_since = waits_since
        self.held: Received | None = None
        self.is_ended = False

    async def receive_into(self, target: memoryview) -> int:
        raise AssertionError("nothing is received here")

    async def end(self) -> None:
        self.is_ended = True
        if self.held is not None:
            self.held.release()


async def taken(memory: ReceiveMemory, body: FakeBody) -> Received:
    body.held = await memory.take(body, CHUNK_BYTES)
    return body.held


def run(body: object) -> None:
    trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 64 << 10, (64 << 10) + 1, CHUNK_BYTES])
def test_memory_is_as_long_as_what_is_asked_for(length: int) -> None:
    async def body() -> None:
        received = await ReceiveMemory(BUFFER_BYTES).take(FakeBody(), length)
        assert len(received.memory) == length
        received.release()

    run(body)


def test_only_a_chunk_that_has_its_buffer_to_itself_is_stored_from_there() -> None:
    async def body() -> None:
        memory = ReceiveMemory(BUFFER_BYTES)
        received = await memory.take(FakeBody(), CHUNK_BYTES)
        whole, first = received.memory, received.memory[: CHUNK_BYTES // 2]
        assert isinstance(received.body(whole), PooledPayload)
        assert list(received.body(whole)) == [whole]
        assert not isinstance(received.body(first), PooledPayload)
        assert list(received.body(first)) == [first]
        received.release()
        small = await memory.take(FakeBody(), 1)
        assert not isinstance(small.body(small.memory), PooledPayload)

    run(body)


def test_small_payloads_take_no_pooled_buffer() -> None:
    async def body() -> None:
        memory = ReceiveMemory(BUFFER_BYTES)
        await taken(memory, FakeBody())
        with trio.fail_after(1):
            await memory.take(FakeBody(), 64 << 10)
        assert memory.in_use == 1

    run(body)


def test_a_buffer_is_given_back_when_the_last_user_lets_go() -> None:
    async def body() -> None:
        memory = ReceiveMemory(BUFFER_BYTES)
        received = await memory.take(FakeBody(), CHUNK_BYTES)
        received.retain()
        received.release()
        assert memory.in_use == 1
        received.release()
        assert memory.in_use == 0

    run(body)


def test_who_finds_no_buffer_waits_until_one_is_given_back() -> None:
    async def body() -> None:
        memory = ReceiveMemory(BUFFER_BYTES)
        first = await taken(memory, FakeBody())
        async with trio.open_nursery() as nursery:
            second = FakeBody()
            nursery.start_soon(taken, memory, second)
            await trio.sleep(3 * STALLED_S)  # the first holder's client sends, so the holder is left alone
            assert second.held is None
            first.release()
        assert second.held is not None

    run(body)


def test_the_client_that_stalls_longest_is_ended_when_another_waits() -> None:
    async def body() -> None:
        memory = ReceiveMemory(3 * BUFFER_BYTES)
        now = trio.current_time()
        sends, stalls, stalls_longer = FakeBody(), FakeBody(now), FakeBody(now - 1)
        for holder in (sends, stalls, stalls_longer):
            await taken(memory, holder)
        await taken(memory, FakeBody())
        assert stalls_longer.is_ended
        assert not sends.is_ended
        assert not stalls.is_ended
        assert trio.current_time() - now >= STALLED_S - 1

    run(body)


def test_nobody_is_ended_while_there_is_memory() -> None:
    async def body() -> None:
        memory = ReceiveMemory(2 * BUFFER_BYTES)
        stalls = FakeBody(trio.current_time() - 100)
        await taken(memory, stalls)
        await taken(memory, FakeBody())
        assert not stalls.is_ended

    run(body)


def test_a_cancelled_wait_takes_nothing() -> None:
    async def body() -> None:
        memory = ReceiveMemory(BUFFER_BYTES)
        first = await taken(memory, FakeBody())
        with trio.move_on_after(0.5):
            await memory.take(FakeBody(), CHUNK_BYTES)
        first.release()
        assert memory.in_use == 0

    run(body)
