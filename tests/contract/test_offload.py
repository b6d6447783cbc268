"""One suite for every `Offload`: threads, and inline."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from lakefs.host.offload import InlineOffload, ThreadOffload
from lakefs.ports import Offload

KINDS = ["threads", "inline"]


@asynccontextmanager
async def offload_of(kind: str) -> AsyncIterator[Offload]:
    if kind == "inline":
        yield InlineOffload()
    else:
        async with ThreadOffload(3, "test") as offload:
            yield offload


def drive(kind: str, body: Callable[[Offload], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with offload_of(kind) as offload:
                await body(offload)

    trio.run(main)


def add(left: int, right: int) -> int:
    return left + right


def fail(message: str) -> None:
    raise KeyError(message)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_comes_back(kind: str) -> None:
    async def body(offload: Offload) -> None:
        assert await offload.run(add, 1, 2) == 3

    drive(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_comes_back_and_the_next_call_works(kind: str) -> None:
    async def body(offload: Offload) -> None:
        with pytest.raises(KeyError, match="planted"):
            await offload.run(fail, "planted")
        assert await offload.run(add, 2, 2) == 4

    drive(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_many_callers_each_get_their_own_result(kind: str) -> None:
    async def body(offload: Offload) -> None:
        results: dict[int, int] = {}

        async def one(number: int) -> None:
            for step in range(20):
                results[number * 100 + step] = await offload.run(add, number * 100, step)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)
        assert len(results) == 1000
        assert all(key == value for key, value in results.items())

    drive(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_caller_starts_no_call(kind: str) -> None:
    async def body(offload: Offload) -> None:
        calls: list[int] = []
        with trio.CancelScope() as scope:
            scope.cancel()
            await offload.run(calls.append, 1)
        assert scope.cancelled_caught
        assert calls == []

    drive(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_cancelled_meanwhile_still_gets_the_result(kind: str) -> None:
    async def body(offload: Offload) -> None:
        begun, results = threading.Event(), []

        with trio.CancelScope() as scope:

            def call() -> int:
                begun.set()
                return 7

            async with trio.open_nursery() as nursery:

                async def caller() -> None:
                    results.append(await offload.run(call))
                    await trio.lowlevel.checkpoint()
                    results.append(8)

                nursery.start_soon(caller)
                while not begun.is_set():
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert results == [7], "the result came, then the next checkpoint was cancelled"

    drive(kind, body)


@pytest.mark.parametrize("kind", KINDS)
def test_other_tasks_run_while_a_call_is_made(kind: str) -> None:
    async def body(offload: Offload) -> None:
        steps: list[str] = []

        async def caller() -> None:
            await offload.run(steps.append, "call")
            steps.append("after")

        async def other() -> None:
            for _ in range(3):
                steps.append("other")
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            nursery.start_soon(other)
        assert "other" in steps[: steps.index("after")]

    drive(kind, body)


def test_threads_run_calls_at_the_same_time() -> None:
    async def body(offload: Offload) -> None:
        barrier = threading.Barrier(3)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(offload.run, barrier.wait, 30)

    drive("threads", body)


def test_closing_waits_for_calls_and_ends_the_threads() -> None:
    async def main() -> None:
        offload = ThreadOffload(2, "closing")
        offload.start()
        results: list[int] = []
        release = threading.Event()

        async def caller(number: int) -> None:
            await offload.run(release.wait, 30)
            results.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(caller, number)
            await trio.testing.wait_all_tasks_blocked()
            release.set()
            offload.close()
            assert not any(thread.name.startswith("closing") for thread in threading.enumerate())
        assert sorted(results) == [0, 1, 2, 3, 4]
        offload.close()

    trio.run(main)
