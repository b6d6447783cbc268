"""The buffer pool: bounded, fair, and safe against cancellation."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs.host import buffers
from lakefs.host.buffers import BUFFER_BYTES, BufferPool, PooledBuffer
from lakefs.limits import BUFFER_POOL_BYTES, CHUNK_BYTES, PAGE_BYTES


def pool_of(count: int) -> BufferPool:
    return BufferPool(count * BUFFER_BYTES + 1)


def taken(pool: BufferPool) -> PooledBuffer:
    buffer = pool.try_acquire()
    assert buffer is not None
    return buffer


def test_buffers_are_page_aligned_and_hold_a_chunk_and_a_page() -> None:
    view = taken(pool_of(1)).view
    assert len(view) == CHUNK_BYTES + PAGE_BYTES
    assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_BYTES == 0


def test_the_pool_never_makes_more_than_its_bytes_allow() -> None:
    pool = BufferPool(BUFFER_POOL_BYTES)
    buffers = [taken(pool) for _ in range(pool.capacity)]
    assert pool.capacity == 15
    assert pool.in_use == 15
    assert pool.try_acquire() is None
    for buffer in buffers:
        buffer.release()
    assert pool.in_use == 0


def test_buffers_on_huge_pages_are_made_together_and_taken_before_others() -> None:
    pool = BufferPool(5 * BUFFER_BYTES, huge_buffers=2)
    first = taken(pool)
    memory = first.view.obj
    assert isinstance(memory, mmap.mmap)
    others = [taken(pool) for _ in range(4)]
    assert pool.try_acquire() is None
    assert [buffer.view.obj is memory for buffer in others] in ([True, False, False, False], [False] * 4)
    places = {ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)) for buffer in [first, *others]}
    assert len(places) == 5
    assert all(place % PAGE_BYTES == 0 for place in places)
    others[0].release()
    others[1].release()
    first.release()
    others[2].release()
    assert pool.in_use == 1
    if len(memory) > BUFFER_BYTES:  # the machine has huge pages
        assert [taken(pool).view.obj is memory for _ in range(4)] == [True, True, False, False]


def test_a_pool_of_fewer_buffers_than_are_wanted_on_huge_pages_has_no_more() -> None:
    pool = BufferPool(2 * BUFFER_BYTES, huge_buffers=6)
    assert [pool.capacity, pool.in_use] == [2, 0]
    held = [taken(pool), taken(pool)]
    assert pool.try_acquire() is None
    for number, buffer in enumerate(held):
        buffer.view[:] = bytes([number]) * BUFFER_BYTES
    assert [set(bytes(buffer.view)) for buffer in held] == [{0}, {1}]


@pytest.mark.parametrize("said", ["always madvise [never]\n", ""])
def test_where_no_huge_pages_are_to_be_had_buffers_are_as_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    monkeypatch.setattr(buffers, "_HUGE_PAGES", tmp_path / "enabled")
    if said:
        (tmp_path / "enabled").write_text(said)
    pool = BufferPool(3 * BUFFER_BYTES, huge_buffers=2)
    held = [taken(pool) for _ in range(3)]
    assert len({id(buffer.view.obj) for buffer in held}) == 3
    assert pool.in_use == 3


def test_released_memory_is_used_again() -> None:
    pool = pool_of(1)
    first = taken(pool)
    first.view[:5] = b"hello"
    first.release()
    assert bytes(taken(pool).view[:5]) == b"hello"


def test_releasing_twice_or_touching_a_released_buffer_is_a_bug() -> None:
    buffer = taken(pool_of(1))
    buffer.release()
    with pytest.raises(AssertionError):
        buffer.release()
    with pytest.raises(AssertionError):
        _ = buffer.view


def test_waiters_get_buffers_in_the_order_they_came() -> None:
    async def main() -> None:
        pool = pool_of(1)
        held = taken(pool)
        order: list[int] = []

        async def waiter(number: int) -> None:
            buffer = await pool.acquire()
            order.append(number)
            buffer.release()

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(waiter, number)
                await trio.testing.wait_all_tasks_blocked()
            assert pool.waiting == 5
            held.release()
            assert pool.try_acquire() is None, "nobody overtakes those who wait"
        assert order == [0, 1, 2, 3, 4]
        assert pool.in_use == 0

    trio.run(main)


def test_a_cancelled_waiter_takes_nothing_and_the_next_one_gets_the_buffer() -> None:
    async def main() -> None:
        pool = pool_of(1)
        held = taken(pool)
        got: list[str] = []

        async def waiter(name: str) -> None:
            buffer = await pool.acquire()
            got.append(name)
            buffer.release()

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def cancelled() -> None:
                with scope:
                    await waiter("cancelled")

            nursery.start_soon(cancelled)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(waiter, "next")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            held.release()
        assert got == ["next"]
        assert pool.in_use == 0

    trio.run(main)


def test_a_buffer_handed_over_in_the_moment_of_cancellation_is_not_lost() -> None:
    async def main() -> None:
        pool = pool_of(1)
        held = taken(pool)
        scope = trio.CancelScope()

        async def waiter() -> None:
            with scope:
                buffer = await pool.acquire()
                buffer.release()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiter)
            await trio.testing.wait_all_tasks_blocked()
            held.release()
            scope.cancel()
        assert pool.in_use == 0
        assert pool.try_acquire() is not None

    trio.run(main)
