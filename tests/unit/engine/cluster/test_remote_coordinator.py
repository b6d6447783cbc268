"""A coordinator that is asked over a network: connections that are cut, silence, names that restart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from engine.coordinator.coordinator import Changes, Coordinator, Entry, HasRevision, IsAbsent, Outcome, Put
from engine.coordinator.held_lease import hold_lease
from engine.coordinator.lake_state import NO_EPOCH, LakeState
from engine.coordinator.lake_view import LakeView, open_lake_view
from lakefs.cluster.placing import first_table
from lakefs.cluster.table_format import pack
from lakefs.errors import EngineUnreachable
from lakefs.ids import GcGeneration, LeaseId, Revision
from lakefs.limits import NAMES_CONNECT_S, NAMES_SILENCE_S
from tests.contract.coordinators import SCHEDULES, entry_of, next_changes, put
from tests.lake_rig import MIRRORED, member
from tests.sim.world.clock import SimClock
from tests.unit.engine.cluster.remote_rig import AFTER, BEFORE, FIRST_REVISION, RemoteNames, names_and_remote
from tests.unit.support.metadata_rig import run

Call = Callable[[Coordinator, LeaseId], Awaitable[object]]
REPEATED: dict[str, Call] = {
    "get": lambda coordinator, lease: coordinator.get(b"a"),
    "range": lambda coordinator, lease: coordinator.range(b"a", b"b", limit=3),
    "keep_alive": lambda coordinator, lease: coordinator.keep_alive(lease),
    "revoke": lambda coordinator, lease: coordinator.revoke(lease),
}


# --- connections that are cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [BEFORE, AFTER])
@pytest.mark.parametrize("call", REPEATED.values(), ids=REPEATED)
def test_a_call_that_may_be_repeated_is_answered_though_its_connection_was_cut(call: Call, fault: str) -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            lease = await remote.lease(60)
            await put(remote, b"a", lease=lease)
            expected = await call(names.inner, lease)
            names.faulty.next_fault = fault
            calls = names.faulty.calls
            assert await call(remote, lease) == expected
            assert names.faulty.next_fault == "", "the fault was met"
            assert names.faulty.calls == calls + 3, "it was asked twice, and the lake's record once"

    run(scenario)


@pytest.mark.parametrize("fault", [BEFORE, AFTER])
def test_a_transaction_whose_connection_was_cut_was_done_whole_or_not_at_all_and_is_not_sent_again(fault: str) -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            await put(remote, b"a", b"old")
            names.faulty.next_fault = fault
            with pytest.raises(EngineUnreachable, match="may or may not have been done"):
                await remote.transact([], [Put(b"a", b"new"), Put(b"b", b"new")])
            found = [(await remote.get(key)).entry for key in (b"a", b"b")]
            values = [None if entry is None else entry.value for entry in found]
            assert values == ([b"old", None] if fault == BEFORE else [b"new", b"new"])
            done = FIRST_REVISION if fault == BEFORE else FIRST_REVISION + 1
            assert (await remote.get(b"a")).revision == done, "it was done once at most"

    run(scenario)


@pytest.mark.parametrize("fault", [BEFORE, AFTER])
def test_a_transaction_that_may_be_repeated_is_sent_once_more_and_answered_as_the_last_time(fault: str) -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            await remote.connect()
            names.faulty.next_fault = fault
            done = await remote.transact([IsAbsent(b"a")], [Put(b"a", b"new")], is_repeatable=True)
            assert done.outcome is (Outcome.DONE if fault == BEFORE else Outcome.CONFLICT)
            assert await entry_of(remote, b"a") == Entry(b"a", b"new", Revision(FIRST_REVISION))
            assert [entry and entry.value for entry in done.seen] == [None if fault == BEFORE else b"new"]

    run(scenario)


@pytest.mark.parametrize("fault", [BEFORE, AFTER])
def test_a_lease_whose_answer_was_lost_is_not_asked_for_again_and_ends_by_itself(fault: str) -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            await remote.connect()
            names.faulty.next_fault = fault
            with pytest.raises(EngineUnreachable, match="may or may not have been done"):
                await remote.lease(5)
            assert len(names.inner._leases) == (1 if fault == AFTER else 0)
            await trio.sleep(6)
            assert len(names.inner._leases) == 0

    run(scenario)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_watch_whose_connections_are_cut_misses_no_event_and_repeats_none(seed: int) -> None:
    async def cut(names: RemoteNames) -> None:
        for turn in range(20):
            await trio.sleep(0.4)
            if turn % 3:
                names.faulty.next_fault = (BEFORE, AFTER)[turn % 2]
            else:
                names.network.cut_all()

    async def follow(remote: Coordinator, seen: list[Revision]) -> None:
        async with remote.watch(b"a", b"b", Revision(1)) as watch:
            while True:
                try:
                    seen.append((await next_changes(watch)).revision)
                except EngineUnreachable:  # cut twice during one request
                    await trio.sleep(0.1)

    async def scenario() -> None:
        seen: list[Revision] = []
        async with names_and_remote(seed) as (names, remote), trio.open_nursery() as nursery:
            nursery.start_soon(follow, remote, seen)
            nursery.start_soon(cut, names)
            for number in range(40):
                await put(names.inner, b"ax"[number % 2 : number % 2 + 1], b"%d" % number)
                await trio.sleep(0.25)
            nursery.cancel_scope.cancel()
        assert seen == list(range(FIRST_REVISION, FIRST_REVISION + 40, 2))

    run(scenario, seed)


@pytest.mark.parametrize("seed", SCHEDULES[:3])
def test_a_number_raised_over_connections_that_are_cut_counts_each_answer_once_and_each_doubt_once_at_most(
    seed: int,
) -> None:
    done, doubts = [0], [0]

    async def cut_on(names: RemoteNames) -> None:
        planted = 0
        while True:
            await trio.sleep(0.02)
            if done[0] + doubts[0] > 6 * planted:
                planted += 1
                names.faulty.next_fault = (BEFORE, AFTER)[planted % 2]

    async def raise_it(remote: Coordinator) -> None:
        while done[0] + doubts[0] < 50:
            try:
                entry = await entry_of(remote, b"n")
            except EngineUnreachable:  # the fault was met while it connected again
                await trio.sleep(0.1)
                continue
            try:
                compares = [HasRevision(b"n", entry.revision)]
                answer = await remote.transact(compares, [Put(b"n", b"%d" % (int(entry.value) + 1))])
                done[0] += answer.succeeded
            except EngineUnreachable:
                doubts[0] += 1

    async def scenario() -> None:
        async with names_and_remote(seed) as (names, remote):
            await put(remote, b"n", b"0")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut_on, names)
                async with trio.open_nursery() as raising:
                    for _ in range(4):
                        raising.start_soon(raise_it, remote)
                nursery.cancel_scope.cancel()
            names.faulty.next_fault = ""
            await trio.sleep(1)
            assert doubts[0] > 0
            assert done[0] <= int((await entry_of(remote, b"n")).value) <= done[0] + doubts[0]

    run(scenario, seed)


def test_calls_of_many_tasks_go_on_over_one_new_connection() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            await put(remote, b"a", b"1")
            names.network.cut_all()
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(entry_of, remote, b"a")
            assert len(names.network.streams) == 2, "two ends of one connection"

    run(scenario)


# --- silence ---------------------------------------------------------------------------------------------


def test_names_that_are_silent_are_given_up_in_bounded_time_and_calls_are_refused_at_once_until_they_return() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            await put(remote, b"a", b"1")
            names.network.freeze()
            began = trio.current_time()
            for call in (partial(remote.get, b"a"), partial(put, remote, b"a", b"2")):
                with trio.fail_after(10), pytest.raises(EngineUnreachable, match=r"does not answer|nothing answers"):
                    await call()
            assert trio.current_time() - began < 1.25 * NAMES_SILENCE_S + NAMES_CONNECT_S + 0.1
            began = trio.current_time()
            with pytest.raises(EngineUnreachable, match="nothing answers"):
                await remote.get(b"a")
            assert trio.current_time() == began, "names that are known to be away are not waited for"
            await trio.sleep(60)
            names.network.thaw()
            await trio.sleep(3)
            assert (await entry_of(remote, b"a")).value == b"1"

    run(scenario)


def test_a_watch_is_told_that_its_names_are_silent_and_another_goes_on_from_there() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            async with remote.watch(b"a", b"b", Revision(1)) as watch:
                await put(remote, b"a")
                assert (await next_changes(watch)).revision == FIRST_REVISION
                names.network.freeze()
                with trio.fail_after(1.25 * NAMES_SILENCE_S), pytest.raises(EngineUnreachable):
                    await anext(watch)
                await put(names.inner, b"a")
                names.network.thaw()
                await trio.sleep(5)
                assert (await next_changes(watch)).revision == FIRST_REVISION + 1

    run(scenario)


def test_a_held_lease_outlives_a_cut_and_has_ended_for_its_holder_before_it_ends_at_silent_names() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            async with hold_lease(remote, SimClock(), 12) as lease:
                await put(remote, b"a", lease=lease.id)
                for _ in range(10):
                    await trio.sleep(2.9)
                    names.network.cut_all()
                assert not lease.ended.is_set()
                names.network.freeze()
                await lease.ended.wait()
                assert (await names.inner.get(b"a")).entry is not None
                await trio.sleep(12)
                assert (await names.inner.get(b"a")).entry is None

    run(scenario)


# --- names that restart ----------------------------------------------------------------------------------


def test_names_that_restart_have_the_same_revisions_and_a_watch_goes_on() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            assert await put(remote, b"a", b"1") == FIRST_REVISION
            async with remote.watch(b"a", b"b", Revision(FIRST_REVISION + 1)) as watch:
                seen: list[Changes] = []

                async def wait() -> None:
                    while not seen:
                        try:
                            seen.append(await next_changes(watch))
                        except EngineUnreachable:  # names that were not stopped cleanly are away for a second
                            await trio.sleep(0.1)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    await trio.sleep(1)
                    await names.stop()
                    await names.start()
                    await trio.sleep(2)  # they are tried again after 2 s at most
                    assert await put(remote, b"b") == FIRST_REVISION + 1
                    assert await put(remote, b"a", b"2") == FIRST_REVISION + 2
            assert [event.revision for event in seen] == [FIRST_REVISION + 2]
            done = await remote.transact([HasRevision(b"a", Revision(FIRST_REVISION + 2))], [Put(b"c", b"")])
            assert done.succeeded

    run(scenario)


def test_names_that_shut_down_are_not_held_back_by_watches_and_refused_calls_are_sent_again() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote), trio.open_nursery() as nursery:
            seen: list[Changes] = []

            async def follow() -> None:
                async with remote.watch(b"a", b"b", Revision(FIRST_REVISION)) as watch:
                    while True:
                        try:
                            seen.append(await next_changes(watch))
                        except EngineUnreachable:
                            await trio.sleep(0.5)

            nursery.start_soon(follow)
            await trio.sleep(1)
            assert await names.shut_down() < 1
            with pytest.raises(EngineUnreachable):
                await remote.get(b"a")
            await names.start()
            await trio.sleep(3)
            await put(remote, b"a")
            await trio.sleep(1)
            assert [event.revision for event in seen] == [FIRST_REVISION]
            nursery.cancel_scope.cancel()

    run(scenario)


@pytest.mark.parametrize("seed", SCHEDULES[:3])
def test_calls_that_names_refuse_because_they_shut_down_are_of_a_coordinator_that_is_away(seed: int) -> None:
    async def ask_on(remote: Coordinator) -> None:
        with pytest.raises(EngineUnreachable):
            while True:
                await put(remote, b"a")

    async def scenario() -> None:
        async with names_and_remote(seed) as (names, remote):
            await remote.connect()
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(ask_on, remote)
                await trio.sleep(0.05)
                nursery.start_soon(names.shut_down)
            await names.start()

    run(scenario, seed)


def test_a_view_of_the_lake_goes_on_when_the_coordinator_was_away() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            state = LakeState(remote)
            assert await state.next_epoch(NO_EPOCH, pack(first_table(MIRRORED, [member(0), member(1)]))) == 1
            async with open_lake_view(remote) as view:
                await _advance(LakeState(remote), view, 1)
                names.network.cut_all()
                await _advance(LakeState(names.inner), view, 2)
                await names.stop()
                await trio.sleep(30)
                await names.start()
                await _advance(LakeState(names.inner), view, 3)
                names.network.freeze()
                await trio.sleep(30)
                await LakeState(names.inner).advance_generation(GcGeneration(3))
                names.network.thaw()
                await trio.sleep(10)
                assert view.generation == 4
                await names.shut_down()
                await names.start()
                await _advance(LakeState(names.inner), view, 5)

    run(scenario)


async def _advance(state: LakeState, view: LakeView, generation: int) -> None:
    """Advance the generation to this one; the view learns it soon."""
    assert await state.advance_generation(GcGeneration(generation - 1)) == generation
    await trio.sleep(8)
    assert view.generation == generation
