"""Memory for the payloads of requests: bounded, shared, and no request waits for more while it holds some."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import trio
import trio.testing

from engine.chunks.payload import BUFFERS_PER_REQUEST_MAX, PayloadMemory, ReceivedBody
from engine.format.extents import large_extent_bytes
from lakefs.errors import InvalidArgument
from lakefs.host.buffers import BUFFER_BYTES, BufferPool
from lakefs.ids import ChunkKind
from lakefs.limits import BODY_BYTES_MAX, BUFFER_POOL_BYTES, CHUNK_BYTES, KIB, MIB, PAGE_BYTES

WORST = [CHUNK_BYTES, 70_000, CHUNK_BYTES, 70_000, CHUNK_BYTES, 70_000, CHUNK_BYTES - 210_000]


def take(pool: BufferPool, lengths: list[int]) -> ReceivedBody:
    """Take memory for one request; fail if the pool makes it wait."""

    async def main() -> ReceivedBody:
        body: list[ReceivedBody] = []
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                body.append(await PayloadMemory(pool).take([ChunkKind.DATA] * len(lengths), lengths))

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            assert body, "the request waits for memory that nobody holds"
        return body[0]

    return trio.run(main)


@pytest.mark.parametrize("lengths", [[100_000] * 160, [65_536] * 256, [CHUNK_BYTES] * 4, WORST])
def test_a_request_of_the_greatest_length_finds_memory_however_it_is_cut(lengths: list[int]) -> None:
    assert sum(lengths) <= BODY_BYTES_MAX
    pool = BufferPool(BUFFER_POOL_BYTES)
    body = take(pool, lengths)
    assert [len(part) for part in body.parts] == lengths
    assert pool.in_use <= BUFFERS_PER_REQUEST_MAX
    body.release()
    assert pool.in_use == 0


def test_payloads_that_share_a_buffer_have_pages_of_their_own() -> None:
    body = take(BufferPool(BUFFER_POOL_BYTES), [65_536, 65_537, 200_000, CHUNK_BYTES, 10, 65_536])
    taken: list[tuple[int, int]] = []
    for payload in body.payloads:
        if payload.area is None:
            continue
        address = ctypes.addressof(ctypes.c_char.from_buffer(payload.area))
        assert address % PAGE_BYTES == 0
        assert len(payload.area) == large_extent_bytes(payload.length) <= BUFFER_BYTES
        taken.append((address, address + len(payload.area)))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


def test_requests_at_the_same_time_wait_in_turn_and_all_get_their_memory() -> None:
    pool = BufferPool(BUFFERS_PER_REQUEST_MAX * (4 * MIB + PAGE_BYTES))
    served: list[int] = []

    async def main() -> None:
        memory = PayloadMemory(pool)

        async def request(number: int) -> None:
            body = await memory.take([ChunkKind.DATA] * 40, [100_000] * 40)
            await trio.lowlevel.checkpoint()
            served.append(number)
            body.release()

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(request, number)

    trio.run(main)
    assert sorted(served) == list(range(20))
    assert pool.in_use == 0


def test_a_refused_request_holds_no_memory() -> None:
    pool = BufferPool(BUFFER_POOL_BYTES)

    async def main() -> None:
        with pytest.raises(InvalidArgument):
            await PayloadMemory(pool).take([77], [100_000])

    trio.run(main)
    assert pool.in_use == 0


def test_small_payloads_of_all_requests_share_a_bounded_memory_in_turn() -> None:
    order: list[str] = []

    async def main() -> None:
        memory = PayloadMemory(BufferPool(BUFFER_POOL_BYTES), small_memory_bytes=BODY_BYTES_MAX)
        quarter = [64 * KIB - 1] * 64

        async def request(name: str, lengths: list[int]) -> None:
            body = await memory.take([ChunkKind.DATA] * len(lengths), lengths)
            order.append(name)
            body.release()
            body.release()

        held = [await memory.take([ChunkKind.DATA] * 64, quarter) for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for name, lengths in (("many", quarter * 2), ("one", [1000])):
                nursery.start_soon(request, name, lengths)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(request, "large", [100_000])
            await trio.testing.wait_all_tasks_blocked()
            assert order == ["large"], "what needs no such memory does not wait for it"
            with trio.move_on_after(0) as scope:
                await memory.take([ChunkKind.DATA], [1])
            assert scope.cancelled_caught
            for number, body in enumerate(held):
                body.release()
                await trio.testing.wait_all_tasks_blocked()
                assert order == (["large"] if number == 0 else ["large", "many", "one"])
        whole = await memory.take([ChunkKind.DATA] * 256, quarter * 4)
        whole.release()

    trio.run(main)


def test_a_request_that_is_cancelled_while_it_waits_for_buffers_gives_its_small_memory_back() -> None:
    pool = BufferPool(BUFFERS_PER_REQUEST_MAX * BUFFER_BYTES)

    async def main() -> None:
        memory = PayloadMemory(pool, small_memory_bytes=BODY_BYTES_MAX)
        taken = [await pool.acquire() for _ in range(pool.capacity)]
        small = [60_000] * 200
        async with trio.open_nursery() as nursery:
            nursery.start_soon(memory.take, [ChunkKind.DATA] * 201, [*small, 100_000])
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with trio.fail_after(60):
            body = await memory.take([ChunkKind.DATA] * 200, small)
        body.release()
        for buffer in taken:
            buffer.release()

    trio.run(main)


def test_small_payloads_that_follow_each_other_are_received_as_one_part() -> None:
    lengths = [5, 0, 7, 65_536, 70_000, 0, 65_536, 3, 65_535]
    body = take(BufferPool(BUFFER_POOL_BYTES), lengths)
    assert [len(part) for part in body.parts] == [12, 65_536, 70_000, 65_536, 65_538]
    content = bytes(number % 251 for number in range(sum(lengths)))
    at = 0
    for part in body.parts:
        view = memoryview(part)
        view[:] = content[at : at + len(view)]
        at += len(view)
    filled = [
        bytes(payload.small if payload.area is None else payload.area[: payload.length])  # type: ignore[arg-type]
        for payload in body.payloads
    ]
    assert list(map(len, filled)) == lengths
    assert b"".join(filled) == content
    body.release()
