"""The history behind watches: bounded in bytes and watches, and without traces of watches that have ended."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from engine.coordinator.coordinator import Change, Changes, Entry, ReadAnew
from engine.coordinator.watch_history import History, HistoryWatch
from lakefs.errors import EngineBusy
from lakefs.ids import Revision
from tests.unit.support.metadata_rig import run

FIRST = Revision(1)


def add(history: History, key: bytes, value: bytes = b"v") -> None:
    revision = Revision(history.last + 1)
    history.add(Changes(revision, (Change(key, Entry(key, value, revision)),)))


def test_bytes_are_bounded_and_the_last_revision_is_held_however_long_it_is() -> None:
    history = History(Revision(0), bytes_max=10_000)
    for size in (1000, 1000, 8000, 20_000):
        add(history, b"a", bytes(size))
        assert history.changes_between(b"a", b"b", history.last) is not None
    assert (history.forgotten, history.last) == (3, 4)
    add(history, b"a", b"")
    assert (history.forgotten, history.last) == (4, 5)


def test_there_are_so_many_watches_and_one_that_ends_makes_room() -> None:
    async def scenario() -> None:
        history = History(Revision(0), watches_max=2)
        async with HistoryWatch(history, b"a", b"b", FIRST), HistoryWatch(history, b"a", b"b", FIRST):
            with pytest.raises(EngineBusy, match="2 watches"):
                async with HistoryWatch(history, b"a", b"b", FIRST):
                    pass
        async with HistoryWatch(history, b"a", b"b", FIRST):
            assert len(history.watches) == 1
        assert (history.watches, history.waiting) == ({}, {})

    run(scenario)


def test_a_watch_that_ends_leaves_nothing_wherever_it_was() -> None:
    async def scenario() -> None:
        history = History(Revision(0), count_max=2)
        async with HistoryWatch(history, b"a", b"b", FIRST) as behind, HistoryWatch(history, b"x", b"y", FIRST) as calm:
            add(history, b"a")
            with trio.move_on_after(1):
                await anext(calm)
            for _ in range(3):
                add(history, b"a")
            assert await anext(behind) == ReadAnew()
            with pytest.raises(StopAsyncIteration):
                await anext(behind)
            add(history, b"a")
        assert (history.watches, history.waiting) == ({}, {})

    run(scenario)


def test_changes_of_other_keys_wake_nobody_and_forget_nothing_of_a_watch_that_waits() -> None:
    async def scenario() -> None:
        history = History(Revision(0), count_max=2)
        steps = 0

        async def follow(watch: HistoryWatch) -> None:
            nonlocal steps
            async for _ in watch:
                steps += 1

        async with HistoryWatch(history, b"a", b"b", FIRST) as watch, trio.open_nursery() as nursery:
            nursery.start_soon(follow, watch)
            for _ in range(5):
                add(history, b"b")
                await trio.testing.wait_all_tasks_blocked()
                assert list(history.waiting) == [(b"a", b"b")]
            add(history, b"a")
            await trio.testing.wait_all_tasks_blocked()
            assert steps == 1
            nursery.cancel_scope.cancel()

    run(scenario)
