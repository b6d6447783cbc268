"""The contract of `Coordinator`: watches and leases, over every implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from engine.coordinator.coordinator import (
    END,
    Change,
    Changes,
    Coordinator,
    Delete,
    Entry,
    Outcome,
    Put,
    ReadAnew,
    Watch,
)
from lakefs.errors import InvalidArgument, RequestTooLarge
from lakefs.ids import LeaseId, Revision
from lakefs.limits import COORDINATOR_LEASE_KEYS_MAX
from tests.contract.coordinators import (
    KINDS,
    SCHEDULES,
    CoordinatorKind,
    Opened,
    as_values,
    entry_of,
    events_to_the_end,
    keys_of,
    next_changes,
    opened_by,
    put,
)
from tests.memory_coordinator import HISTORY
from tests.unit.support.metadata_rig import run

FIRST = Revision(1)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> CoordinatorKind:
    found: CoordinatorKind = request.param
    return found


@pytest.fixture
def opened(request: pytest.FixtureRequest, kind: CoordinatorKind, tmp_path: Path) -> Opened:
    """Open a new coordinator: `async with opened() as coordinator`."""
    return opened_by(request, kind, tmp_path)


def test_a_watch_from_an_old_revision_sees_each_change_of_its_range_once_and_in_order(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            await put(coordinator, b"a", b"before")
            await coordinator.transact([], [Put(b"a", b"1"), Put(b"b", b"1"), Put(b"c", b"1"), Put(b"x", b"1")])
            await put(coordinator, b"x", b"2")
            await coordinator.transact([], [Delete(b"b"), Put(b"a", b"2")])
            async with coordinator.watch(b"a", b"c", Revision(2)) as watch:
                assert await next_changes(watch) == Changes(
                    Revision(2), tuple(_change(key, b"1", 2) for key in (b"a", b"b"))
                )
                event = await next_changes(watch)
                assert (event.revision, as_values(event)) == (4, {b"b": None, b"a": b"2"})
                await put(coordinator, b"c", b"outside")
                await put(coordinator, b"b", b"3")
                event = await next_changes(watch)
                assert (event.revision, as_values(event)) == (6, {b"b": b"3"})

    run(scenario)


def _change(key: bytes, value: bytes, revision: int) -> Change:
    return Change(key, Entry(key, value, Revision(revision)))


def test_a_watch_from_a_revision_to_come_leaves_out_those_before(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator, coordinator.watch(b"a", b"b", Revision(3)) as watch:
            for number in range(4):
                await put(coordinator, b"a", b"%d" % number)
                await trio.testing.wait_all_tasks_blocked()
            assert [(await next_changes(watch)).revision for _ in range(2)] == [3, 4]

    run(scenario)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_watches_beside_many_writers_miss_nothing_and_repeat_nothing(opened: Opened, seed: int) -> None:
    writers, times = 4, 6
    done: dict[Revision, bytes] = {}

    async def write(coordinator: Coordinator, number: int) -> None:
        for turn in range(times):
            key = b"%s%d" % (b"ax"[turn % 2 : turn % 2 + 1], number)
            done[await put(coordinator, key)] = key

    async def follow(coordinator: Coordinator, begin: bytes, end: bytes, first: int, seen: list[Revision]) -> None:
        async with coordinator.watch(begin, end, Revision(first)) as watch:
            async for event in watch:
                assert isinstance(event, Changes)
                assert event.revision <= (await coordinator.get(b"a0")).revision, "a watch sees nothing too early"
                seen.append(event.revision)

    async def scenario() -> None:
        seen: dict[tuple[bytes, bytes, int], list[Revision]] = {}
        async with opened() as coordinator, trio.open_nursery() as nursery:
            for place in ((b"a", b"b", 1), (b"x", b"y", 1), (b"a", b"y", 1), (b"a", b"y", 10), (b"m", b"n", 1)):
                nursery.start_soon(follow, coordinator, *place, seen.setdefault(place, []))
            async with trio.open_nursery() as writing:
                for number in range(writers):
                    writing.start_soon(write, coordinator, number)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        assert sorted(done) == list(range(1, writers * times + 1))
        for (begin, end, first), revisions in seen.items():
            assert revisions == [r for r in sorted(done) if begin <= done[r] < end and r >= first]

    run(scenario, seed)


def test_a_watch_from_a_change_that_is_not_held_any_more_says_so_and_ends(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            for number in range(HISTORY + 10):
                await put(coordinator, b"a", b"%d" % number)
            async with coordinator.watch(b"a", b"b", Revision(5)) as watch:
                assert await events_to_the_end(watch) == [ReadAnew()]
            async with coordinator.watch(b"a", b"b", Revision(11)) as watch:
                assert [(await next_changes(watch)).revision for _ in range(HISTORY)] == [*range(11, HISTORY + 11)]

    run(scenario)


def test_a_slow_watch_is_ended_by_read_anew_and_one_that_waits_is_not_by_other_keys(
    opened: Opened, kind: CoordinatorKind
) -> None:
    async def wait(watch: Watch, seen: list[Changes]) -> None:
        seen.append(await next_changes(watch))

    async def scenario() -> None:
        seen: list[Changes] = []
        async with (
            opened() as coordinator,
            coordinator.watch(b"a", b"b", FIRST) as slow,
            coordinator.watch(b"x", b"y", FIRST) as other,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(wait, other, seen)
            await put(coordinator, b"a", b"first")
            assert as_values(await next_changes(slow)) == {b"a": b"first"}
            for number in range(HISTORY + 1):
                await put(coordinator, b"a", b"%d" % number)
            await put(coordinator, b"x", b"seen")
            if kind.is_etcd:  # what is under way to the watch is held, too
                for number in range(HISTORY + 1):
                    assert as_values(await next_changes(slow)) == {b"a": b"%d" % number}
            else:
                assert await events_to_the_end(slow) == [ReadAnew()]
        assert [as_values(event) for event in seen] == [{b"x": b"seen"}]

    run(scenario)


def test_a_compaction_forgets_what_was_before_a_revision_and_no_key(opened: Opened, kind: CoordinatorKind) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            for number in range(6):
                await put(coordinator, b"a", b"%d" % number)
            removed = (await coordinator.transact([], [Delete(b"a")])).revision
            await put(coordinator, b"b", b"kept")
            for revision in (Revision(4), removed, removed, Revision(2), Revision(0), FIRST):
                await coordinator.compact(revision)
            async with coordinator.watch(b"a", b"c", removed) as watch:
                assert as_values(await next_changes(watch)) == {b"a": None}
                assert as_values(await next_changes(watch)) == {b"b": b"kept"}
            if kind.forgets:
                async with coordinator.watch(b"a", b"c", Revision(removed - 1)) as watch:
                    assert await events_to_the_end(watch) == [ReadAnew()]
            assert await entry_of(coordinator, b"b") == Entry(b"b", b"kept", Revision(removed + 1))
            last = (await coordinator.get(b"a")).revision
            await coordinator.compact(Revision(last + 1))
            if kind.forgets:
                with pytest.raises(InvalidArgument):
                    await coordinator.compact(Revision(last + 9))
            async with coordinator.watch(b"a", b"c", Revision(last + 1)) as watch:
                await put(coordinator, b"a", b"later")
                assert as_values(await next_changes(watch)) == {b"a": b"later"}
            assert await keys_of(coordinator) == [b"a", b"b"]

    run(scenario)


def test_a_range_read_by_pages_and_watched_from_behind_the_first_is_known_whole(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            await coordinator.transact([], [Put(b"k%d" % number, b"old") for number in range(9)])
            known: dict[bytes, bytes | None] = {}
            page = await coordinator.range(b"k", b"l", limit=4)
            first = page.revision
            await coordinator.transact([], [Put(b"k1", b"new"), Delete(b"k7"), Put(b"k9", b"new")])
            known |= {entry.key: entry.value for entry in page.entries}
            while page.more:
                page = await coordinator.range(b"k", b"l", limit=4, after=page.entries[-1].key)
                known |= {entry.key: entry.value for entry in page.entries}
            async with coordinator.watch(b"k", b"l", Revision(first + 1)) as watch:
                known |= as_values(await next_changes(watch))
            assert {key for key, value in known.items() if value is not None} == {*await keys_of(coordinator)}
            assert (known[b"k1"], known[b"k9"], known[b"k2"]) == (b"new", b"new", b"old")

    run(scenario)


def test_another_watch_from_where_one_has_stopped_misses_nothing_and_repeats_nothing(
    opened: Opened, kind: CoordinatorKind
) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            seen: list[Revision] = []
            place = FIRST
            for turn in range(8):
                await put(coordinator, b"ax"[turn % 2 : turn % 2 + 1])
                await put(coordinator, b"xa"[turn // 4 : turn // 4 + 1])
                async with coordinator.watch(b"a", b"b", place) as watch:
                    with trio.move_on_after(kind.quiet_s * (100 if turn == 7 else 1)):
                        while True:
                            seen.append((await next_changes(watch)).revision)
                            assert watch.resumes_at > seen[-1]
                            if turn == 5:
                                break  # others are left for the next
                            if kind.is_etcd and seen[-1] == 16:
                                break  # no other will come
                    assert watch.resumes_at >= place
                    place = watch.resumes_at
            assert place == 17 or kind.is_etcd, "changes of other keys are behind it too"
        assert seen == [1, 5, 9, 10, 12, 13, 14, 16]

    run(scenario)


def test_a_cancelled_watch_has_taken_no_event(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator, coordinator.watch(b"a", b"b", FIRST) as watch:
            for wait in range(4):
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_cancel_after, scope, wait)
                        await anext(watch)
                assert scope.cancelled_caught
            await put(coordinator, b"a")
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(watch)
            assert scope.cancelled_caught
            assert (await next_changes(watch)).revision == 1

    run(scenario)


async def _cancel_after(scope: trio.CancelScope, checkpoints: int) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


# --- leases ----------------------------------------------------------------------------------------------


def test_the_keys_of_a_lease_that_nobody_keeps_alive_are_removed_at_one_revision(
    opened: Opened, kind: CoordinatorKind
) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            lease = await coordinator.lease(5)
            other = await coordinator.lease(60)
            assert lease != other
            await coordinator.transact([], [Put(b"a", b"1", lease), Put(b"b", b"1", lease), Put(b"c", b"1", other)])
            await coordinator.transact([], [Put(b"d", b"1", lease), Put(b"e", b"1")])
            assert await entry_of(coordinator, b"a") == Entry(b"a", b"1", FIRST, lease)
            async with coordinator.watch(b"a", b"f", Revision(3)) as watch:
                await trio.sleep(0.5 if kind.is_outside else 4.5)
                assert len(await keys_of(coordinator)) == 5
                with trio.fail_after(20 if kind.is_outside else 3):
                    event = await next_changes(watch)
            assert (event.revision, as_values(event)) == (3, {b"a": None, b"b": None, b"d": None})
            assert await keys_of(coordinator) == [b"c", b"e"]
            assert not await coordinator.keep_alive(lease)

    run(scenario)


def test_a_lease_that_is_kept_alive_lasts_and_ends_when_its_holder_vanishes(
    opened: Opened, kind: CoordinatorKind
) -> None:
    async def hold(coordinator: Coordinator, lease: LeaseId) -> None:
        for _ in range(100):
            assert await coordinator.keep_alive(lease)
            await trio.sleep(1)

    async def scenario() -> None:
        async with opened() as coordinator:
            lease = await coordinator.lease(3)
            await put(coordinator, b"a", lease=lease)
            with trio.move_on_after(20):
                await hold(coordinator, lease)
            assert await keys_of(coordinator) == [b"a"]
            await trio.sleep(0 if kind.is_outside else 1.5)
            assert await keys_of(coordinator) == [b"a"]
            await trio.sleep(6 if kind.is_outside else 3)
            assert await keys_of(coordinator) == []

    run(scenario)


def test_a_key_ends_with_the_last_lease_that_it_was_put_with(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            short, long = await coordinator.lease(2), await coordinator.lease(8)
            await coordinator.transact([], [Put(key, b"1", short) for key in (b"a", b"b", b"c", b"d")])
            await put(coordinator, b"a", b"2", long)
            await put(coordinator, b"b", b"2")
            await coordinator.transact([], [Delete(b"c")])
            await put(coordinator, b"c", b"2")
            await trio.sleep(4)
            assert await keys_of(coordinator) == [b"a", b"b", b"c"]
            await trio.sleep(6)
            assert await keys_of(coordinator) == [b"b", b"c"]

    run(scenario)


def test_a_lease_that_ended_takes_no_key_and_a_branch_that_names_it_does_nothing(
    opened: Opened, kind: CoordinatorKind
) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            lease = await coordinator.lease(60)
            await put(coordinator, b"a", b"1", lease)
            await coordinator.revoke(lease)
            assert await keys_of(coordinator) == []
            revision = (await coordinator.get(b"a")).revision
            for gone in (lease, LeaseId(999)):
                await coordinator.revoke(gone)
                assert not await coordinator.keep_alive(gone)
                refused = await coordinator.transact([], [Put(b"b", b"1"), Put(b"a", b"1", gone)])
                assert (refused.outcome, refused.succeeded) == (Outcome.LEASE_GONE, False)
                assert refused.revision == revision or (kind.is_etcd and refused.revision > revision)
            assert await keys_of(coordinator) == []
            assert (await coordinator.transact([], [Put(b"b", b"1")], [Put(b"a", b"1", lease)])).succeeded
            assert await coordinator.lease(60) not in (lease, 0)

    run(scenario)


def test_a_lease_has_as_many_keys_as_are_removed_at_once_and_no_more(opened: Opened, kind: CoordinatorKind) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            lease = await coordinator.lease(60)
            keys = [b"k%03d" % number for number in range(COORDINATOR_LEASE_KEYS_MAX)]
            for value in (b"", b"again"):
                for some in (keys[:64], keys[64:]):
                    await coordinator.transact([], [Put(key, value, lease) for key in some])
            if not kind.is_etcd:
                with pytest.raises(RequestTooLarge, match="128 keys"):
                    await put(coordinator, b"one more", lease=lease)
            await coordinator.transact([], [Delete(keys[0])])
            await put(coordinator, b"one more", lease=lease)
            await coordinator.revoke(lease)
            assert await keys_of(coordinator) == []
            assert (await coordinator.get(b"x")).revision == 7

    run(scenario)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_lease_kept_alive_at_its_last_moment_keeps_all_its_keys_or_none(
    opened: Opened, kind: CoordinatorKind, seed: int
) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            for late_ms in (0, 100, 250, 500, 501, 750, 1000):
                lease = await coordinator.lease(2)
                await coordinator.transact([], [Put(b"a", b"", lease), Put(b"b", b"", lease)])
                await trio.sleep(2 + late_ms / 1000)
                is_kept = await coordinator.keep_alive(lease)
                assert await keys_of(coordinator) == ([b"a", b"b"] if is_kept else [])
                await trio.sleep(0.5 if kind.is_outside else 1.5)
                assert await keys_of(coordinator) == ([b"a", b"b"] if is_kept else [])
                await coordinator.revoke(lease)

    run(scenario, seed)


def test_a_watch_of_all_keys_sees_them(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            watch: Watch
            async with coordinator.watch(b"\0", END, FIRST) as watch:
                await put(coordinator, b"\0")
                await put(coordinator, b"~" * 256)
                assert [(await next_changes(watch)).revision for _ in range(2)] == [1, 2]

    run(scenario)
