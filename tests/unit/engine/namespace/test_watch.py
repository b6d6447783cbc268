"""Watching: order, bounds, and the end of a watch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from engine.host.user_shares import user_of
from engine.namespace.tree import NameEvent
from engine.namespace.watch import Watch, Watchers
from lakefs.errors import EngineBusy
from lakefs.ids import NodeId, Sequence
from lakefs.wire.messages import WatchEvent
from tests.unit.support.shelf import Shelf


def in_trio(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with trio.fail_after(10):
            await body()

    trio.run(limited)


async def taken(watch: Watch, count: int) -> list[WatchEvent]:
    return [await anext(watch) for _ in range(count)]


def put(key: str, bucket: str = "b") -> NameEvent:
    return NameEvent("put", bucket, key, NodeId(9))


def feed(watchers: Watchers, shelf: Shelf) -> None:
    """Publish events, as the committer does when groups are durable."""
    for sequence, note in shelf.store.notes:
        watchers.publish(sequence, [note])


def test_a_watcher_sees_the_changes_of_its_bucket_in_order() -> None:
    async def body() -> None:
        shelf, watchers = Shelf("b", "c"), Watchers()
        watch = watchers.subscribe("b")
        shelf.put("dir/a")
        shelf.put("dir/b")
        shelf.move("dir/", "moved/")
        shelf.remove("moved/a")
        shelf.buckets.reverse()
        shelf.put("elsewhere")
        feed(watchers, shelf)
        events = await taken(watch, 5)
        assert [(e.kind, e.key, e.to_key) for e in events] == [
            ("put", "dir/", ""),
            ("put", "dir/a", ""),
            ("put", "dir/b", ""),
            ("rename", "dir/", "moved/"),
            ("delete", "moved/a", ""),
        ]
        assert [e.sequence for e in events] == sorted(e.sequence for e in events)
        assert {e.bucket for e in events} == {"b"}

    in_trio(body)


def test_a_move_between_buckets_is_told_once_to_both() -> None:
    async def body() -> None:
        shelf, watchers = Shelf("b", "c"), Watchers()
        watches = [watchers.subscribe("b"), watchers.subscribe("c"), watchers.subscribe("other")]
        shelf.put("a")
        shelf.store.notes.clear()
        shelf.move("a", "a2", to=shelf.buckets[1])
        feed(watchers, shelf)
        for watch in watches[:2]:
            (event,) = await taken(watch, 1)
            assert (event.kind, event.bucket, event.key, event.to_bucket, event.to_key) == (
                "rename", "b", "a", "c", "a2",
            )  # fmt: skip
            watch.close()
            assert [e async for e in watch] == []

    in_trio(body)


def test_a_full_queue_becomes_one_resync_and_what_follows_is_kept() -> None:
    async def body() -> None:
        watchers = Watchers(queue_max=3)
        slow, fast = watchers.subscribe("b"), watchers.subscribe("b")
        for number in range(1, 6):
            watchers.publish(Sequence(number), [put(f"k{number}")])
            assert (await anext(fast)).key == f"k{number}"
        events = await taken(slow, 2)
        assert [(e.kind, e.key, e.sequence, e.bucket) for e in events] == [
            ("resync", "", 4, "b"),
            ("put", "k5", 5, "b"),
        ]
        watchers.publish(Sequence(6), [put(f"{i}") for i in range(100)])
        kinds = [e.kind for e in await taken(slow, 1)]
        assert kinds == ["resync"]

    in_trio(body)


def test_a_waiting_watcher_wakes_for_an_event_and_for_the_end() -> None:
    async def body() -> None:
        watchers = Watchers()
        watch = watchers.subscribe("b")
        seen: list[str] = []

        async def follow() -> None:
            seen.extend([event.key async for event in watch])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await wait_all_tasks_blocked()
            watchers.publish(Sequence(1), [put("a"), "another note", put("b"), put("c", bucket="c")])
            await wait_all_tasks_blocked()
            watch.close()
        assert seen == ["a", "b"]

    in_trio(body)


def test_changes_are_asked_for_only_while_somebody_watches() -> None:
    calls: list[str] = []

    def begin(publish: object) -> Callable[[], None]:
        calls.append("begin")
        return lambda: calls.append("end")

    async def body() -> None:
        watchers = Watchers(begin)
        assert calls == []
        first = watchers.subscribe("b")
        second = watchers.subscribe("")
        assert calls == ["begin"]
        first.close()
        first.close()
        assert calls == ["begin"]
        second.close()
        assert calls == ["begin", "end"]
        with watchers.subscribe("b"):
            assert calls == ["begin", "end", "begin"]
        assert calls == ["begin", "end", "begin", "end"]

    in_trio(body)


def test_a_cancelled_wait_loses_no_event() -> None:
    async def body() -> None:
        watchers = Watchers()
        watch = watchers.subscribe("b")
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(watch)
        watchers.publish(Sequence(1), [put("a")])
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(watch)
        assert (await anext(watch)).key == "a"

    in_trio(body)


def test_a_closed_watch_is_forgotten() -> None:
    async def body() -> None:
        watchers = Watchers(watchers_max=2)
        with watchers.subscribe("b") as first, watchers.subscribe("b"):
            with pytest.raises(EngineBusy, match="2 watches already"):
                watchers.subscribe("c")
            first.close()
            first.close()
            assert len(watchers) == 1
            with watchers.subscribe("c"):
                assert len(watchers) == 2
        assert len(watchers) == 0
        watchers.publish(Sequence(1), [put("a")])
        assert [event async for event in first] == []

    in_trio(body)


def test_one_user_leaves_watches_to_others() -> None:
    async def body() -> None:
        watchers = Watchers(watchers_max=4)
        with watchers.subscribe("b", user=user_of(4711)):
            with pytest.raises(EngineBusy, match="1 watches already, of user 4711"):
                watchers.subscribe("b", user=user_of(4711))
            with watchers.subscribe("b"), watchers.subscribe("b", user=user_of(4712)):
                assert len(watchers) == 3
        assert len(watchers) == 0

    in_trio(body)


def test_the_removal_of_a_bucket_is_the_deletion_of_its_empty_key() -> None:
    async def body() -> None:
        watchers = Watchers()
        watch = watchers.subscribe("b")
        watchers.publish(Sequence(3), [NameEvent("delete", "b", "", NodeId(5))])
        assert await anext(watch) == WatchEvent("delete", 3, "b", "", "", "", 5)

    in_trio(body)
