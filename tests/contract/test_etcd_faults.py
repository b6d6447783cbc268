"""The coordinator on etcd when etcd, the network or the operator fail: nothing is lost, repeated, or waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio

from engine.coordinator.coordinator import (
    Compare,
    Delete,
    Entry,
    HasRevision,
    HasValue,
    IsAbsent,
    Operation,
    Outcome,
    Put,
    ReadAnew,
    Transacted,
)
from engine.etcd import etcd_link
from engine.etcd.etcd_bounds import ETCD_LAKE_NAME_BYTES_MAX
from engine.etcd.etcd_coordinator import EtcdCoordinator, open_etcd_coordinator
from engine.etcd.etcd_link import EtcdAccess
from lakefs.ids import LeaseId, Revision
from lakefs.limits import COORDINATOR_KEY_BYTES_MAX, COORDINATOR_OPERATIONS_MAX, COORDINATOR_TRANSACTION_BYTES_MAX
from tests.contract.coordinators import URL_FILE, entry_of, next_changes, put
from tests.cutting_proxy import CuttingProxy, cutting_proxy
from tests.etcd_rig import etcdctl

_lakes: Final = itertools.count()


# --- one node, behind a proxy ------------------------------------------------------------------------------------


@dataclass
class Behind:
    """A coordinator behind a proxy, which turns to the server itself when the proxy is cut; and one beside it."""

    coordinator: EtcdCoordinator
    beside: EtcdCoordinator
    proxy: CuttingProxy
    url: str


@asynccontextmanager
async def behind(folder: Path, *, has_another: bool = True) -> AsyncIterator[Behind]:
    """Yield both coordinators of a new lake at the etcd that the tests share."""
    url = (folder / URL_FILE).read_text()
    lake = f"faults-{next(_lakes)}"
    async with cutting_proxy(url) as proxy:
        urls = (proxy.url, url) if has_another else (proxy.url,)
        async with (
            open_etcd_coordinator(EtcdAccess(urls, first=0), lake) as coordinator,
            open_etcd_coordinator(EtcdAccess((url,)), lake) as beside,
        ):
            yield Behind(coordinator, beside, proxy, url)


async def _until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that a server, or another thread, makes true."""
    while not holds():  # noqa: ASYNC110 - nothing of this process knows when
        await trio.sleep(0.01)


async def _answer_lost(
    rig: Behind, call: Callable[[], Awaitable[Transacted]], is_done: Callable[[], Awaitable[bool]]
) -> Transacted:
    """Call, lose the answer when it was done, and return that of the repeat."""
    answers: list[Transacted] = []

    async def ask() -> None:
        answers.append(await call())

    rig.proxy.loses_answers = True
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not await is_done():  # noqa: ASYNC110 - the server does it
                await trio.sleep(0.01)
            await rig.proxy.cut()
    rig.proxy.loses_answers = False
    return answers[0]


LOST: Final[dict[str, tuple[list[Compare], list[Operation], list[Operation], Outcome]]] = {
    "done": ([HasValue(b"a", b"1"), IsAbsent(b"x")], [Put(b"a", b"2"), Put(b"done", b"")], [], Outcome.DONE),
    "done by its other branch": (
        [HasValue(b"a", b"0"), IsAbsent(b"x")],
        [Put(b"x", b"")],
        [Put(b"a", b"2"), Put(b"done", b"")],
        Outcome.CONFLICT,
    ),
    "its comparisons do not hold any more": (
        [IsAbsent(b"x"), HasValue(b"a", b"1")],
        [Put(b"x", b""), Put(b"done", b"")],
        [Put(b"a", b"3")],
        Outcome.DONE,
    ),
    "without comparisons": ([], [Put(b"a", b"2"), Put(b"done", b"")], [], Outcome.DONE),
}


@pytest.mark.parametrize("case", LOST.values(), ids=LOST)
def test_a_transaction_whose_answer_was_lost_is_done_once_and_answered_as_the_first_time(
    faults_etcd: Path, case: tuple[list[Compare], list[Operation], list[Operation], Outcome]
) -> None:
    compares, then_ops, else_ops, outcome = case

    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            first = await put(rig.coordinator, b"a", b"1")
            was = {b"a": Entry(b"a", b"1", first)}

            async def is_done() -> bool:
                return (await rig.beside.get(b"done")).entry is not None

            done = await _answer_lost(rig, lambda: rig.coordinator.transact(compares, then_ops, else_ops), is_done)
            assert done == Transacted(
                outcome, (await entry_of(rig.beside, b"done")).revision, tuple(was.get(c.key) for c in compares)
            )
            assert done.revision == first + 1, "done once"
            assert await put(rig.coordinator, b"a", b"9") > first + 1, "its slot goes on"

    trio.run(scenario)


def test_a_lost_answer_is_found_though_others_have_changed_the_keys_since(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            first = await put(rig.coordinator, b"a", b"1")
            compares = [HasRevision(b"a", first)]

            async def is_done() -> bool:
                if (await rig.beside.get(b"a")).entry is not None:
                    return False
                await put(rig.beside, b"a", b"another's")
                return True

            done = await _answer_lost(rig, lambda: rig.coordinator.transact(compares, [Delete(b"a")]), is_done)
            assert done == Transacted(Outcome.DONE, Revision(first + 1), (Entry(b"a", b"1", first),))
            assert (await entry_of(rig.beside, b"a")).value == b"another's"

    trio.run(scenario)


def test_a_transaction_that_may_be_repeated_is_answered_as_the_last_time_and_leaves_no_marker(
    faults_etcd: Path,
) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd) as rig:

            async def is_done() -> bool:
                return (await rig.beside.get(b"done")).entry is not None

            await rig.coordinator.connect()
            again = partial(rig.coordinator.transact, [IsAbsent(b"done")], [Put(b"done", b"1")], is_repeatable=True)
            done = await _answer_lost(rig, again, is_done)
            written = await entry_of(rig.beside, b"done")
            assert done == Transacted(Outcome.CONFLICT, written.revision, (written,))
            assert rig.coordinator._sessions._session is None, "no slot was taken, and no marker put"

    trio.run(scenario)


LATE: Final[dict[str, tuple[list[Compare], list[Operation], list[Operation]]]] = {
    "done by the repeat": ([], [Put(b"a", b"late")], []),
    "refused by the repeat": ([IsAbsent(b"a")], [Put(b"a", b"late")], []),
    "refused by the repeat, which does the other branch": (
        [IsAbsent(b"a")],
        [Put(b"a", b"late")],
        [Put(b"b", b"late")],
    ),
}


@pytest.mark.parametrize("case", LATE.values(), ids=LATE)
def test_a_first_try_that_arrives_behind_its_repeat_does_nothing(
    faults_etcd: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[list[Compare], list[Operation], list[Operation]]
) -> None:
    monkeypatch.setattr(etcd_link, "ETCD_TRY_S", 1.0)

    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            await put(rig.coordinator, b"a", b"1")
            await put(rig.coordinator, b"b", b"1")
            rig.proxy.keeps_requests = True
            answers = []
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:

                    async def ask() -> None:
                        answers.append(await rig.coordinator.transact(*case))

                    nursery.start_soon(ask)
                    await _until(lambda: sum(len(request) for _, request in rig.proxy.kept) > 100)
                    rig.proxy.keeps_requests = False  # what follows is none of the request
                    rig.proxy.is_away = True
                    await rig.proxy.cut()
            assert answers[0].outcome is (Outcome.CONFLICT if case[0] else Outcome.DONE)
            await rig.beside.transact([], [Delete(b"a"), Put(b"b", b"another's")])
            assert rig.proxy.kept
            await rig.proxy.deliver()
            await trio.sleep(0.3)
            assert (await rig.beside.get(b"a")).entry is None, "the first try would have been done now"
            assert (await entry_of(rig.beside, b"b")).value == b"another's"

    trio.run(scenario)


def test_a_transaction_whose_lease_ended_behind_a_lost_answer_is_found_or_refused(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            await put(rig.coordinator, b"a", b"1")
            lease = await rig.beside.lease(60)

            async def is_done_and_ended() -> bool:
                if (await rig.beside.get(b"mine")).entry is None:
                    return False
                await rig.beside.revoke(lease)
                return True

            done = await _answer_lost(
                rig,
                lambda: rig.coordinator.transact([HasValue(b"a", b"1")], [Put(b"mine", b"", lease)]),
                is_done_and_ended,
            )
            assert done.outcome is Outcome.DONE, "it was done before its lease ended"
            assert [entry and entry.value for entry in done.seen] == [b"1"]
            again = await rig.coordinator.transact([HasValue(b"a", b"1")], [Put(b"mine", b"", lease)])
            assert again.outcome is Outcome.LEASE_GONE

    trio.run(scenario)


def test_a_session_that_ended_is_replaced_and_its_transactions_go_on(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd) as rig:

            async def change(key: bytes) -> None:
                for _ in range(2):
                    assert (await rig.coordinator.transact([IsAbsent(key)], [Put(key, b"")])).succeeded
                    assert (await rig.coordinator.transact([], [Delete(key)])).succeeded

            await put(rig.coordinator, b"a", b"1")
            for _ in range(3):
                for line in etcdctl([rig.url], "lease", "list").splitlines()[1:]:
                    await rig.beside.revoke(LeaseId(int(line, 16)))
                async with trio.open_nursery() as nursery:  # slots that were in use, and new ones
                    for number in range(4):
                        nursery.start_soon(change, b"%d" % number)

    trio.run(scenario)


def test_markers_end_with_the_process_that_put_them(faults_etcd: Path) -> None:
    async def scenario() -> None:
        url = (faults_etcd / URL_FILE).read_text()
        place = "get", "--prefix", "--keys-only", "/lake/markers/"
        async with open_etcd_coordinator(EtcdAccess((url,)), "markers") as coordinator:
            for number in range(5):
                await put(coordinator, b"a", b"%d" % number)
            assert etcdctl([url], *place).count("/lake/markers/sent/") == 1, "one after the other: one slot"
        assert etcdctl([url], *place).split() == ["/lake/markers/keys/a"]

    trio.run(scenario)


def test_a_session_has_few_markers_however_many_transactions_are_cancelled(
    faults_etcd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_link, "ETCD_CANCEL_S", 0.0)

    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            for number in range(150):
                with trio.move_on_after(0.0002 * (number % 10)):
                    await put(rig.coordinator, b"a", b"%d" % number)
            await put(rig.coordinator, b"b", b"at the end")
            assert (await entry_of(rig.beside, b"b")).value == b"at the end"
            session = rig.coordinator._sessions._session
            assert session is not None
            assert session.abandoned < 64

    trio.run(scenario)


def test_a_watch_goes_on_over_cut_connections_and_misses_and_repeats_nothing(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd, has_another=False) as rig:
            seen: list[bytes] = []
            async with rig.coordinator.watch(b"a", b"b", Revision(1)) as watch, trio.open_nursery() as nursery:

                async def follow() -> None:
                    async for event in watch:
                        assert not isinstance(event, ReadAnew)
                        seen.extend(change.entry.value for change in event.changes if change.entry is not None)

                nursery.start_soon(follow)
                for number in range(40):
                    await rig.beside.transact([], [Put(b"a%d" % key, b"%d %d" % (number, key)) for key in range(3)])
                    if number % 15 == 7:
                        await rig.proxy.cut()
                    await trio.sleep(0.01)
                with trio.fail_after(20):
                    await _until(lambda: len(seen) >= 120)
                nursery.cancel_scope.cancel()
            assert seen == [b"%d %d" % (number, key) for number in range(40) for key in range(3)]

    trio.run(scenario)


def test_a_watch_that_was_away_while_etcd_was_compacted_says_so(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd, has_another=False) as rig:
            first = await put(rig.beside, b"a", b"0")
            async with rig.coordinator.watch(b"a", b"b", first) as watch:
                assert (await next_changes(watch)).revision == first
                rig.proxy.is_away = True
                await rig.proxy.cut()
                for number in range(5):
                    last = await put(rig.beside, b"a", b"%d" % number)
                await rig.beside.compact(Revision(last + 1))
                rig.proxy.is_away = False
                with trio.fail_after(20):
                    assert await anext(watch) == ReadAnew()
                    with pytest.raises(StopAsyncIteration):
                        await anext(watch)

    trio.run(scenario)


def test_a_removal_at_the_very_revision_of_a_compaction_is_not_missed(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            await put(rig.beside, b"a", b"0")
            removed = (await rig.beside.transact([], [Delete(b"a")])).revision
            await rig.beside.compact(Revision(removed + 1))
            async with rig.beside.watch(b"a", b"b", removed) as watch:
                with trio.fail_after(20):
                    assert await anext(watch) == ReadAnew()
            later = await put(rig.beside, b"a", b"1")
            async with rig.beside.watch(b"a", b"b", Revision(removed + 1)) as watch:
                assert (await next_changes(watch)).revision == later

    trio.run(scenario)


def test_the_changes_of_a_long_revision_are_one_event(faults_etcd: Path) -> None:
    async def scenario() -> None:
        async with behind(faults_etcd) as rig:
            first = 0
            for number in range(4):
                puts = [Put(b"a%02d" % key, b"%d" % number * 10_000) for key in range(100)]
                done = await rig.beside.transact([], puts)
                first = first or done.revision
            async with rig.beside.watch(b"a", b"b", Revision(first)) as watch:
                with trio.fail_after(20):
                    counts = [len((await next_changes(watch)).changes) for _ in range(4)]
            assert counts == [100] * 4, "etcd sends 4 MiB in parts of 2 MiB"

    trio.run(scenario)


def test_a_transaction_at_all_bounds_fits_in_those_of_etcd(faults_etcd: Path) -> None:
    async def scenario() -> None:
        access = EtcdAccess(((faults_etcd / URL_FILE).read_text(),))
        async with open_etcd_coordinator(access, "n" * ETCD_LAKE_NAME_BYTES_MAX) as coordinator:
            keys = [b"%03d" % number * 85 + b"k" for number in range(COORDINATOR_OPERATIONS_MAX)]
            assert len(keys[0]) == COORDINATOR_KEY_BYTES_MAX
            value = bytes(COORDINATOR_TRANSACTION_BYTES_MAX // len(keys) - 3 * len(keys[0]))
            absent = [IsAbsent(key) for key in keys]
            for outcome in (Outcome.DONE, Outcome.CONFLICT):
                done = await coordinator.transact(absent, [Put(key, value) for key in keys], list(map(Delete, keys)))
                assert (done.outcome, len(done.seen)) == (outcome, len(keys))

    trio.run(scenario)
