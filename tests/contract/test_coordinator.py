"""The contract of `Coordinator`: keys, transactions and ranges, over every implementation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from engine.coordinator.coordinator import (
    END,
    Changes,
    Compare,
    Coordinator,
    Delete,
    Entry,
    HasRevision,
    HasValue,
    IsAbsent,
    Operation,
    Outcome,
    Put,
)
from lakefs.errors import EngineUnreachable, InvalidArgument, RequestTooLarge
from lakefs.ids import LeaseId, Revision
from lakefs.limits import (
    COORDINATOR_KEY_BYTES_MAX,
    COORDINATOR_OPERATIONS_MAX,
    COORDINATOR_PAGE_BYTES_MAX,
    COORDINATOR_PAGE_MAX,
    COORDINATOR_SEEN_BYTES_MAX,
    COORDINATOR_VALUE_BYTES_MAX,
    MIB,
)
from tests.contract.coordinators import KINDS, SCHEDULES, CoordinatorKind, Opened, entry_of, keys_of, opened_by, put
from tests.unit.support.metadata_rig import run

LONG_KEY = b"k" * (COORDINATOR_KEY_BYTES_MAX + 1)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> CoordinatorKind:
    found: CoordinatorKind = request.param
    return found


@pytest.fixture
def opened(request: pytest.FixtureRequest, kind: CoordinatorKind, tmp_path: Path) -> Opened:
    """Open a new coordinator: `async with opened() as coordinator`."""
    return opened_by(request, kind, tmp_path)


def test_a_key_is_read_with_the_revision_that_wrote_it_until_it_is_removed(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            assert await coordinator.get(b"a") == (await coordinator.get(b"b"))
            assert (await coordinator.get(b"a")).revision == 0
            assert await put(coordinator, b"a", b"1") == 1
            assert await put(coordinator, b"b", b"") == 2
            assert await put(coordinator, b"a", b"2") == 3
            assert (await coordinator.get(b"a")).entry == Entry(b"a", b"2", Revision(3))
            assert (await coordinator.get(b"b")).entry == Entry(b"b", b"", Revision(2))
            removed = await coordinator.transact([], [Delete(b"a")])
            assert (removed.outcome, removed.revision) == (Outcome.DONE, 4)
            assert (await coordinator.get(b"a")).entry is None
            assert (await coordinator.get(b"a")).revision == 4

    run(scenario)


def test_a_revision_grows_only_with_a_transaction_that_changes_a_key_and_by_one(
    opened: Opened, kind: CoordinatorKind
) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            done = await coordinator.transact([], [Put(b"a", b"1"), Put(b"b", b"1"), Delete(b"c")])
            assert done.revision == 1
            last = (await coordinator.transact([], [Delete(b"c")])).revision
            assert last == 1 + kind.is_etcd
            assert (await coordinator.transact([IsAbsent(b"a")], [Put(b"a", b"2")])).revision == last
            assert (await coordinator.transact([], [])).revision == last
            await coordinator.lease(10)
            assert (await coordinator.transact([], [Put(b"a", b"1")])).revision == last + 1
            assert {(await entry_of(coordinator, key)).revision for key in (b"a", b"b")} == {last + 1, 1}

    run(scenario)


HOLDING: list[Compare] = [
    IsAbsent(b"absent"),
    HasRevision(b"one", Revision(1)),
    HasRevision(b"two", Revision(3)),
    HasValue(b"one", b"1"),
    HasValue(b"two", b""),
]
FAILING: list[Compare] = [
    IsAbsent(b"one"),
    IsAbsent(b"two"),
    HasRevision(b"one", Revision(2)),
    HasRevision(b"two", Revision(2)),
    HasRevision(b"absent", Revision(1)),
    HasValue(b"one", b"2"),
    HasValue(b"one", b"1\0"),
    HasValue(b"absent", b""),
]


async def _two_keys(coordinator: Coordinator) -> None:
    await put(coordinator, b"one", b"1")
    await put(coordinator, b"two", b"2")
    await put(coordinator, b"two", b"")


def test_a_transaction_is_done_if_each_comparison_holds(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            await _two_keys(coordinator)
            done = await coordinator.transact(HOLDING, [Put(b"three", b"3")], [Put(b"else", b"")])
            assert (done.outcome, done.revision) == (Outcome.DONE, 4)
            assert await keys_of(coordinator) == [b"one", b"three", b"two"]

    run(scenario)


@pytest.mark.parametrize("failing", FAILING, ids=repr)
def test_one_failing_comparison_among_others_does_the_other_branch_and_shows_why(
    opened: Opened, failing: Compare
) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            await _two_keys(coordinator)
            compares = [*HOLDING[:2], failing, *HOLDING[2:]]
            refused = await coordinator.transact(compares, [Put(b"three", b"3"), Delete(b"one")])
            assert (refused.outcome, refused.succeeded, refused.revision) == (Outcome.CONFLICT, False, 3)
            entries = {key: (await coordinator.get(key)).entry for key in (b"one", b"two", b"absent")}
            assert refused.seen == tuple(entries[compare.key] for compare in compares)
            assert await keys_of(coordinator) == [b"one", b"two"]
            other = await coordinator.transact(compares, [Put(b"three", b"3")], [Put(b"else", b"4"), Delete(b"one")])
            assert (other.outcome, other.revision) == (Outcome.CONFLICT, 4)
            assert await keys_of(coordinator) == [b"else", b"two"]

    run(scenario)


async def _count_up(coordinator: Coordinator, times: int) -> None:
    """Raise the number under a key by compare and swap, alternately by revision and by value."""
    for turn in range(times):
        while True:
            found = (await coordinator.get(b"count")).entry
            number = 0 if found is None else int(found.value)
            compare: Compare
            if found is None:
                compare = IsAbsent(b"count")
            elif turn % 2:
                compare = HasRevision(b"count", found.revision)
            else:
                compare = HasValue(b"count", found.value)
            done = await coordinator.transact([compare], [Put(b"count", b"%d" % (number + 1))])
            if done.succeeded:
                break
            assert done.seen[0] is not None, "another was first"


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_number_that_many_tasks_raise_by_compare_and_swap_misses_none(opened: Opened, seed: int) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(_count_up, coordinator, 4)
            assert await entry_of(coordinator, b"count") == Entry(b"count", b"32", Revision(32))

    run(scenario, seed)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_readers_see_what_was_answered_before_and_never_an_older_state(opened: Opened, seed: int) -> None:
    async def scenario() -> None:
        answered = 0

        async def write(coordinator: Coordinator, number: int) -> None:
            nonlocal answered
            for turn in range(5):
                value = b"%d %d" % (number, turn)
                done = await coordinator.transact([], [Put(b"left", value), Put(b"right", value)])
                answered = max(answered, done.revision)

        async def read(coordinator: Coordinator) -> None:
            last = 0
            for _ in range(10):
                least = max(last, answered)
                page = await coordinator.range(b"a", b"z", limit=10)
                assert page.revision >= least, "what was answered is seen, and no state before one that was seen"
                assert len({entry.value for entry in page.entries}) <= 1, "both keys change at one revision"
                assert {entry.revision for entry in page.entries} <= {page.revision}
                last = page.revision

        async with opened() as coordinator, trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(write, coordinator, number)
                nursery.start_soon(read, coordinator)

    run(scenario, seed)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_cancelled_transaction_was_done_whole_or_not_at_all(opened: Opened, seed: int) -> None:
    keys = [b"a", b"b", b"c"]

    async def change(coordinator: Coordinator, number: int, scope: trio.CancelScope, answers: list[Revision]) -> None:
        with scope:
            done = await coordinator.transact([], [Put(key, b"%d" % number) for key in keys])
            answers.append(done.revision)

    async def scenario() -> None:
        async with opened() as coordinator:
            await put(coordinator, b"other")
            outcomes = set()
            for number in range(20):
                scope, answers = trio.CancelScope(), list[Revision]()
                before = (await coordinator.get(b"a")).revision
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(change, coordinator, number, scope, answers)
                    for _ in range(number % 7):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
                page = await coordinator.range(b"a", b"d", limit=10)
                is_done = page.revision == before + 1
                assert is_done or page.revision == before
                assert len({(entry.value, entry.revision) for entry in page.entries}) <= 1
                assert (b"%d" % number in {entry.value for entry in page.entries}) == is_done
                assert not answers or answers == [page.revision], "what was answered was done"
                outcomes.add(is_done)
            assert outcomes == {True, False}, "some came too late to be done, some too late to be stopped"

    run(scenario, seed)


def test_a_range_has_its_keys_in_order_by_pages(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            await coordinator.transact([], [Put(b"k%02d" % number, b"%d" % number) for number in range(20)])
            await put(coordinator, b"l")
            await coordinator.transact([], [Delete(b"k07")])
            expected = [b"k%02d" % number for number in range(20) if number != 7]
            page = await coordinator.range(b"k", b"l", limit=8)
            assert [entry.key for entry in page.entries] == expected[:8]
            assert page.entries[0] == Entry(b"k00", b"0", Revision(1))
            assert (page.more, page.revision) == (True, 3)
            page = await coordinator.range(b"k", b"l", limit=8, after=b"k08")
            assert [entry.key for entry in page.entries] == expected[8:16]
            page = await coordinator.range(b"k", b"l", limit=8, after=b"k16")
            assert [entry.key for entry in page.entries] == expected[16:]
            assert not page.more
            assert [entry.key for entry in (await coordinator.range(b"k03", b"k05", limit=8)).entries] == [
                b"k03",
                b"k04",
            ]
            assert [entry.key for entry in (await coordinator.range(b"k03", b"k05", limit=8, after=b"a")).entries] == [
                b"k03",
                b"k04",
            ]
            exact = await coordinator.range(b"k00", b"k02", limit=2)
            assert (len(exact.entries), exact.more) == (2, False)
            assert (await coordinator.range(b"k", b"l", limit=8, after=b"z")).entries == ()
            assert (await coordinator.range(b"x", b"y", limit=8)).entries == ()

    run(scenario)


def test_a_page_of_long_values_ends_early_and_the_next_has_the_rest(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            for number in range(4):
                await put(coordinator, b"k%d" % number, bytes(COORDINATOR_VALUE_BYTES_MAX))
            page = await coordinator.range(b"k", b"l", limit=100)
            assert sum(len(entry.value) for entry in page.entries) <= COORDINATOR_PAGE_BYTES_MAX + MIB
            assert page.more
            assert await keys_of(coordinator) == [b"k0", b"k1", b"k2", b"k3"]

    run(scenario)


TOO_MANY = [Put(b"%d" % number, b"") for number in range(COORDINATOR_OPERATIONS_MAX + 1)]
REFUSED: dict[str, tuple[list[Compare], list[Operation], list[Operation], type[Exception], str]] = {
    "no key": ([], [Put(b"", b"")], [], InvalidArgument, "1 to 256 bytes"),
    "a long key": ([], [], [Delete(LONG_KEY)], InvalidArgument, "this one has 257"),
    "a long key compared": ([IsAbsent(LONG_KEY)], [], [], InvalidArgument, "this one has 257"),
    "a long value": ([], [Put(b"a", bytes(MIB + 1))], [], InvalidArgument, "at most 1048576 bytes"),
    "a long value compared": ([HasValue(b"a", bytes(MIB + 1))], [], [], InvalidArgument, "at most 1048576 bytes"),
    "revision 0": ([HasRevision(b"a", Revision(0))], [], [], InvalidArgument, "IsAbsent"),
    "a key twice": ([], [Put(b"a", b""), Delete(b"a")], [], InvalidArgument, "each key once"),
    "too many puts": ([], [*TOO_MANY], [], RequestTooLarge, f"at most {COORDINATOR_OPERATIONS_MAX}"),
    "too many in the other branch": ([], [], [*TOO_MANY], RequestTooLarge, f"at most {COORDINATOR_OPERATIONS_MAX}"),
    "too many comparisons": (
        [IsAbsent(put.key) for put in TOO_MANY],
        [],
        [],
        RequestTooLarge,
        f"at most {COORDINATOR_OPERATIONS_MAX}",
    ),
    "too many bytes": ([], [Put(b"a", bytes(MIB))], [Put(b"b", bytes(MIB // 2))], RequestTooLarge, "split it"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_transaction_outside_the_bounds_is_refused_and_changes_nothing(
    opened: Opened, case: tuple[list[Compare], list[Operation], list[Operation], type[Exception], str]
) -> None:
    compares, then_ops, else_ops, error, words = case

    async def scenario() -> None:
        async with opened() as coordinator:
            with pytest.raises(error, match=words):
                await coordinator.transact(compares, then_ops, else_ops)
            assert (await coordinator.get(b"a")).revision == 0

    run(scenario)


def test_a_transaction_at_the_bounds_is_done(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            key = b"k" * COORDINATOR_KEY_BYTES_MAX
            puts = [Put(key, bytes(COORDINATOR_VALUE_BYTES_MAX)), *TOO_MANY[: COORDINATOR_OPERATIONS_MAX - 1]]
            for is_repeatable in (False, True):
                assert (await coordinator.transact([], puts, is_repeatable=is_repeatable)).succeeded
            assert len((await entry_of(coordinator, key)).value) == COORDINATOR_VALUE_BYTES_MAX
            page = await coordinator.range(b"\0", END, limit=COORDINATOR_PAGE_MAX)
            assert len(page.entries) == COORDINATOR_OPERATIONS_MAX

    run(scenario)


def test_long_values_that_comparisons_saw_are_left_out_behind_a_bound(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            keys = [b"k%d" % number for number in range(6)]
            for key in keys:
                await put(coordinator, key, key * (MIB // 4))
            revisions = [(await entry_of(coordinator, key)).revision for key in keys]
            compares: list[Compare] = [IsAbsent(b"absent"), *map(HasRevision, keys, revisions)]
            done = await coordinator.transact(compares, [], [Put(b"done", b"")])
            assert (done.outcome, done.seen[0]) == (Outcome.DONE, None)
            seen = [entry for entry in done.seen[1:] if entry is not None]
            assert [(entry.key, entry.revision) for entry in seen] == [*zip(keys, revisions, strict=True)]
            whole = COORDINATOR_SEEN_BYTES_MAX // (MIB // 2 + 2)
            assert [len(entry.value) for entry in seen] == [MIB // 2] * whole + [0] * (len(keys) - whole)

    run(scenario)


def test_reads_outside_the_bounds_are_refused(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            for call in (
                lambda: coordinator.get(b""),
                lambda: coordinator.get(LONG_KEY),
                lambda: coordinator.range(b"a", b"b", limit=0),
                lambda: coordinator.range(b"a", b"b", limit=COORDINATOR_PAGE_MAX + 1),
                lambda: coordinator.range(b"b", b"a", limit=1),
                lambda: coordinator.range(b"", b"a", limit=1),
                lambda: coordinator.range(b"a", LONG_KEY, limit=1),
                lambda: coordinator.range(b"a", b"b", limit=1, after=LONG_KEY),
                lambda: coordinator.lease(1),
                lambda: coordinator.lease(86_401),
            ):
                with pytest.raises(InvalidArgument):
                    await call()
            with pytest.raises(InvalidArgument):
                coordinator.watch(b"b", b"b", Revision(1))

    run(scenario)


def test_each_call_is_a_checkpoint_before_it_does_anything(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            lease = await coordinator.lease(10)
            await put(coordinator, b"a", lease=lease)
            with trio.CancelScope() as scope:
                scope.cancel()
                for call in (
                    partial(coordinator.get, b"a"),
                    partial(coordinator.range, b"a", b"b", limit=1),
                    partial(coordinator.transact, [], [Put(b"a", b"2")]),
                    partial(coordinator.transact, [], [Put(b"a", b"2")], is_repeatable=True),
                    partial(coordinator.compact, Revision(1)),
                    partial(coordinator.lease, 10),
                    partial(coordinator.keep_alive, lease),
                    partial(coordinator.revoke, lease),
                ):
                    with pytest.raises(trio.Cancelled):
                        await call()
            assert (await entry_of(coordinator, b"a")).revision == (await coordinator.get(b"a")).revision == 1
            assert await coordinator.keep_alive(lease)

    run(scenario)


def test_after_its_end_a_coordinator_cannot_be_reached_and_watches_end(opened: Opened, kind: CoordinatorKind) -> None:
    async def scenario() -> None:
        seen: list[object] = []

        async def follow(coordinator: Coordinator, task_status: trio.TaskStatus[None]) -> None:
            async with coordinator.watch(b"a", b"b", Revision(1)) as watch:
                task_status.started()
                with pytest.raises(EngineUnreachable):
                    while True:
                        seen.append(await anext(watch))

        async with trio.open_nursery() as nursery:
            async with opened() as coordinator:
                await nursery.start(follow, coordinator)
                await put(coordinator, b"a")
                if kind.is_etcd:
                    await trio.sleep(kind.quiet_s)
            for call in (
                partial(coordinator.get, b"a"),
                partial(coordinator.range, b"a", b"b", limit=1),
                partial(coordinator.transact, [], [Put(b"a", b"2")]),
                partial(coordinator.transact, [], [Put(b"a", b"2")], is_repeatable=True),
                partial(coordinator.compact, Revision(2)),
                partial(coordinator.lease, 10),
                partial(coordinator.keep_alive, LeaseId(1)),
                partial(coordinator.revoke, LeaseId(1)),
            ):
                with pytest.raises(EngineUnreachable):
                    await call()
        assert [type(event) for event in seen] == [Changes], "what was durable is seen before the end"

    run(scenario)
