"""`WorkThreads`: results, ends and bounds; and that no interrupt of the thread that waits leaves anything wedged."""

from __future__ import annotations

import _thread
import gc
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from lakefs.host import work_threads
from lakefs.host.work_threads import WorkThreads
from tests.interrupts import WAIT_S, Interrupter, ends

COUNT = 2


@pytest.fixture
def threads() -> Iterator[WorkThreads]:
    pool = WorkThreads(COUNT)
    yield pool
    assert ends(pool.close)


def native_count() -> int:
    return _thread._count()


def comes_to(count: int) -> bool:
    """Return True once this process has that many threads."""
    limit = time.monotonic() + WAIT_S
    while native_count() != count and time.monotonic() < limit:
        time.sleep(0.001)
    return native_count() == count


def test_a_call_has_its_arguments_and_its_result_once_or_its_error(threads: WorkThreads) -> None:
    assert threads.submit(divmod, 7, 2).result() == (3, 1)
    assert threads.submit(int, "11", base=2).result() == 3
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result()
    assert [work.result() for work in [threads.submit(pow, 2, index) for index in range(100)]] == [
        2**index for index in range(100)
    ]


def test_there_are_never_more_threads_than_said_and_none_before_there_is_work() -> None:
    before = native_count()
    pool = WorkThreads(COUNT)
    assert native_count() == before
    is_free = threading.Event()
    works = [pool.submit(is_free.wait, WAIT_S) for _ in range(5 * COUNT)]
    assert comes_to(before + COUNT)
    is_free.set()
    assert [work.result() for work in works] == [True] * len(works)
    assert ends(pool.close)
    assert comes_to(before)


def test_one_call_after_another_needs_one_thread() -> None:
    before = native_count()
    pool = WorkThreads(COUNT)
    for _ in range(20):
        pool.submit(int).result()
        limit = time.monotonic() + WAIT_S
        while not pool._shared.idle and time.monotonic() < limit:  # it has answered and is about to wait
            time.sleep(0.0001)
    assert native_count() == before + 1
    assert ends(pool.close)


def test_what_has_not_begun_can_be_cancelled_and_what_has_begun_is_waited_for(threads: WorkThreads) -> None:
    is_free, done = threading.Event(), []
    works = [threads.submit(lambda: done.append(is_free.wait(WAIT_S))) for _ in range(COUNT)]
    waiting = threads.submit(done.append, False)
    assert waiting.cancel()
    assert not waiting.cancel()
    waiting.wait()
    is_free.set()
    for work in works:
        work.wait()
        assert not work.cancel()
    assert threads.submit(len, done).result() == COUNT
    assert done == [True] * COUNT


def test_close_cancels_what_waits_and_waits_for_what_has_begun() -> None:
    pool = WorkThreads(1)
    has_begun, is_free, done = threading.Event(), threading.Event(), []

    def call() -> None:
        has_begun.set()
        done.append(is_free.wait(WAIT_S))

    pool.submit(call)
    assert has_begun.wait(WAIT_S)
    waiting = pool.submit(done.append, False)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    waiting.wait()
    assert not done
    assert closing.is_alive()
    is_free.set()
    closing.join(WAIT_S)
    assert done == [True]
    assert ends(pool.close)  # a second close does nothing


def test_a_pool_that_nobody_closed_ends_its_threads() -> None:
    before = native_count()
    pool = WorkThreads(COUNT)
    pool.submit(int).result()
    del pool
    gc.collect()
    assert comes_to(before)


def test_without_any_thread_a_call_is_refused_and_with_one_it_is_done() -> None:
    pool = WorkThreads(COUNT)
    with mock.patch.object(work_threads, "start_new_thread", side_effect=RuntimeError("can't start new thread")):
        with pytest.raises(RuntimeError):
            pool.submit(int)
    is_free = threading.Event()
    first = pool.submit(is_free.wait, WAIT_S)
    with mock.patch.object(work_threads, "start_new_thread", side_effect=RuntimeError("can't start new thread")):
        second = pool.submit(int)
    is_free.set()
    assert (first.result(), second.result()) == (True, 0)
    assert ends(pool.close)


def test_an_interrupt_anywhere_leaves_no_thread_wedged() -> None:
    for at in range(1, 1000):
        pool, results = WorkThreads(COUNT), list[int]()

        def use(pool: WorkThreads = pool, results: list[int] = results) -> None:
            works = [pool.submit(pow, 3, index) for index in range(4)]
            for work in works[2:]:
                work.cancel()
            results.extend(work.result() for work in works[:2])
            pool.close()

        tracer = Interrupter(work_threads, at)
        if not tracer.interrupt(use):
            assert results == [1, 3]
            assert at > 20
            return
        if not pool._shared.queue.qsize():  # else the interrupt came after close had begun
            again = pool.submit(pow, 2, 5)
            assert ends(again.wait), f"interrupted at {tracer.where}"
            assert again.result() == 32
        assert ends(pool.close), f"interrupted at {tracer.where}"
    raise AssertionError("the calls have no end")
