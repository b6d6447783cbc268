"""The coordinator of the names after a restart: after a stop, a kill, a loss of power, a lost index."""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing

from engine.coordinator.coordinator import (
    END,
    Changes,
    Coordinator,
    Delete,
    Entry,
    HasRevision,
    HasValue,
    IsAbsent,
    Operation,
    Put,
    ReadAnew,
)
from engine.coordinator.names_coordinator import open_names_coordinator
from engine.format.coordinator import TABLE
from engine.format.features import Feature
from engine.format.layouts import Table
from engine.format.sizes import DEFAULT_SIZES
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.superblock.store_role import refuse_other_role
from engine.superblock.superblock import NO_CLUSTER, Superblock, open_store
from lakefs.errors import DiskFailed, EngineBusy, EngineUnreachable, StoreFull, StoreReadOnly, StoreUnusable
from lakefs.ids import LeaseId, Revision
from lakefs.limits import MIB
from lakefs.ports import Disk
from tests.contract.coordinators import entry_of, events_to_the_end, keys_of, names_store, next_changes, put
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.support.metadata_rig import SMALL, opened, run, wait_applied

T = TypeVar("T")


async def _everything(coordinator: Coordinator) -> tuple[tuple[Entry, ...], Revision]:
    page = await coordinator.range(b"\0", END, limit=1000)
    assert not page.more
    return page.entries, page.revision


async def _fill(coordinator: Coordinator) -> None:
    lease = await coordinator.lease(30)
    for number in range(10):
        await put(coordinator, b"k%d" % number, b"%d" % number)
    await coordinator.transact([], [Put(b"k3", b"leased", lease), Delete(b"k4"), Put(b"long", bytes(100_000))])


async def _index_lost(disk: Disk) -> None:
    shutil.rmtree(disk.local_path("index"))


async def _checkpointed_and_index_lost(disk: Disk) -> None:
    async with names_store(disk) as (coordinator, metadata):
        await wait_applied(metadata)
        await metadata.checkpoint()
        await put(coordinator, b"behind", b"the checkpoint")
    await _index_lost(disk)


async def _nothing(disk: Disk) -> None:
    return None


HARMS: dict[str, Callable[[Disk], Awaitable[None]]] = {
    "stopped": _nothing,
    "index lost": _index_lost,
    "checkpoint and journal only": _checkpointed_and_index_lost,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("local", [False, True], ids=["simulated", "local"])
@pytest.mark.parametrize("clean", [False, True], ids=["killed", "stopped"])
def test_a_restart_finds_keys_revision_and_leases(
    tmp_path: Path, harm: Callable[[Disk], Awaitable[None]], local: bool, clean: bool
) -> None:
    async def scenario() -> None:
        disk: Disk = LocalDisk(tmp_path) if local else SimDisk(1)
        async with names_store(disk, clean=clean) as (coordinator, _):
            await _fill(coordinator)
            before = await _everything(coordinator)
        await harm(disk)
        async with names_store(disk) as (coordinator, metadata):
            entries, revision = await _everything(coordinator)
            assert tuple(entry for entry in entries if entry.key != b"behind") == before[0]
            assert revision == before[1] + (len(entries) - len(before[0]))
            assert await put(coordinator, b"new") == revision + 1
            lease = (await entry_of(coordinator, b"k3")).lease
            assert await coordinator.lease(10) > lease
            await coordinator.revoke(lease)
            assert (await coordinator.get(b"k3")).entry is None
            await metadata.verify_index()

    run(scenario)


def test_a_watch_goes_on_behind_the_last_revision_of_before_and_no_earlier_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = SimDisk(2)
        async with names_store(disk) as (coordinator, _):
            last = [await put(coordinator, b"a", b"%d" % number) for number in range(3)][-1]
        async with names_store(disk) as (coordinator, _):
            async with coordinator.watch(b"a", b"b", last) as watch:
                assert await events_to_the_end(watch) == [ReadAnew()]
            async with coordinator.watch(b"a", b"b", Revision(last + 1)) as watch:
                await put(coordinator, b"a", b"new")
                assert (await next_changes(watch)).revision == last + 1

    run(scenario)


def test_after_a_restart_all_leases_run_for_their_whole_time_again_and_then_end() -> None:
    async def scenario() -> None:
        disk = SimDisk(3)
        async with names_store(disk) as (coordinator, _):
            lease = await coordinator.lease(4)
            await put(coordinator, b"a", lease=lease)
            await trio.sleep(3)
        await trio.sleep(100)
        async with names_store(disk) as (coordinator, _):
            await trio.sleep(3)
            assert await keys_of(coordinator) == [b"a"]
            assert await coordinator.keep_alive(lease)
            await trio.sleep(3)
            assert await keys_of(coordinator) == [b"a"]
            await trio.sleep(2)
            assert await keys_of(coordinator) == []
        async with names_store(disk) as (coordinator, _):
            assert await keys_of(coordinator) == []
            assert not await coordinator.keep_alive(lease)

    run(scenario)


def test_a_pause_of_the_process_ends_no_lease() -> None:
    class Standing(SimClock):
        """A clock that goes on while no task of the process runs."""

        paused_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.paused_s

    async def scenario() -> None:
        clock = Standing()
        async with (
            opened(SimDisk(4), has_names=True) as metadata,
            open_names_coordinator(metadata, clock, Feature.CLUSTER_NAMES) as coordinator,
        ):
            lease = await coordinator.lease(5)
            await put(coordinator, b"a", lease=lease)
            clock.paused_s = 1000.0
            await trio.sleep(4)
            assert await keys_of(coordinator) == [b"a"]
            await trio.sleep(2)
            assert await keys_of(coordinator) == []

    run(scenario)


class _Story:
    """Transactions on a few keys under random crashes, and the states that a restart may find."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.states: dict[Revision, dict[bytes, bytes]] = {Revision(0): {}}
        """Every state that was decided, by its revision."""
        self.acknowledged = Revision(0)

    async def write(self, coordinator: Coordinator, name: bytes, times: int) -> None:
        """Put two keys at once, comparing with what was seen; or remove them."""
        for _ in range(times):
            read = await coordinator.get(name)
            self.acknowledged = max(self.acknowledged, read.revision)
            found = read.entry
            compare = IsAbsent(name) if found is None else HasRevision(name, found.revision)
            value = self.rng.randbytes(4)
            operations: list[Operation] = (
                [Delete(name), Put(b"last", value)]
                if self.rng.randrange(4) == 0 and found is not None
                else [Put(name, value), Put(b"last", value)]
            )
            done = await coordinator.transact([compare], operations)
            assert done.succeeded, "only this task writes the key"
            self.acknowledged = max(self.acknowledged, done.revision)

    async def follow(self, coordinator: Coordinator, revision: Revision) -> None:
        """Note the state of each revision that a watch sees: only what is durable."""
        state = dict(self.states[revision])
        async with coordinator.watch(b"\0", END, Revision(revision + 1)) as watch:
            async for event in watch:
                assert isinstance(event, Changes)
                for change in event.changes:
                    state.pop(change.key, None)
                    if change.entry is not None:
                        state[change.key] = change.entry.value
                self.states[event.revision] = dict(state)

    async def check(self, coordinator: Coordinator) -> Revision:
        """Check that what a restart found holds all that was acknowledged or seen; returns its revision."""
        entries, revision = await _everything(coordinator)
        found = {entry.key: entry.value for entry in entries}
        seen = max(self.states)
        assert revision >= max(self.acknowledged, seen), "nothing that was answered or seen is lost"
        if revision in self.states:
            assert found == self.states[revision]
        self.states = {revision: found}
        return revision


@pytest.mark.parametrize("seed", range(12))
def test_a_loss_of_power_loses_nothing_that_was_answered_or_seen_by_a_watch(seed: int) -> None:
    story = _Story(seed)

    async def until_crash(disk: SimDisk) -> None:
        sizes = SMALL if story.rng.randrange(2) else DEFAULT_SIZES
        async with names_store(disk, sizes=sizes) as (coordinator, _):
            revision = await story.check(coordinator)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(story.follow, coordinator, revision)
                async with trio.open_nursery() as writing:
                    for name in (b"a", b"b", b"c"):
                        writing.start_soon(story.write, coordinator, name, 6)
                await trio.sleep(0.1)
                nursery.cancel_scope.cancel()

    disk = SimDisk(seed)
    for _ in range(6):
        disk.crash_at = story.rng.randrange(1, 60)
        try:
            run(partial(until_crash, disk), seed)
        except* (SimCrashed, StoreReadOnly, EngineUnreachable):
            pass
        disk = disk.crash() if story.rng.randrange(5) else disk.kill()

    async def last_look() -> None:
        async with names_store(disk) as (coordinator, _):
            await story.check(coordinator)

    run(last_look)
    assert story.acknowledged > 0


class _HeldOffload:
    """Runs calls inline, but those of the journal only while the gate is open."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.gate.set()

    async def run(self, call: Callable[..., T], *args: object) -> T:
        await trio.lowlevel.checkpoint()
        if "_append_blocking" in getattr(call, "__name__", ""):
            await self.gate.wait()
        return call(*args)


ANSWERS: dict[str, Callable[[Coordinator, LeaseId], Awaitable[object]]] = {
    "the key": lambda coordinator, _: coordinator.get(b"a"),
    "another key": lambda coordinator, _: coordinator.get(b"other"),
    "an empty range": lambda coordinator, _: coordinator.range(b"x", b"y", limit=1),
    "a conflict": lambda coordinator, _: coordinator.transact([HasValue(b"a", b"old")], []),
    "nothing changed": lambda coordinator, _: coordinator.transact([IsAbsent(b"other")], [Delete(b"other")]),
    "a lease that ended": lambda coordinator, lease: coordinator.keep_alive(lease),
    "a lease revoked again": lambda coordinator, lease: coordinator.revoke(lease),
    "a put with a lease that ended": lambda coordinator, lease: coordinator.transact([], [Put(b"b", b"", lease)]),
}


@pytest.mark.parametrize("ask", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_depends_on_a_change_waits_until_that_is_durable(
    ask: Callable[[Coordinator, LeaseId], Awaitable[object]],
) -> None:
    async def scenario() -> None:
        offload = _HeldOffload()
        answered: list[object] = []

        async def answer(coordinator: Coordinator, lease: LeaseId) -> None:
            answered.append(await ask(coordinator, lease))

        async with names_store(SimDisk(10), offload=offload) as (coordinator, metadata), trio.open_nursery() as nursery:
            lease = await coordinator.lease(60)
            await put(coordinator, b"a", b"old")
            await wait_applied(metadata)
            offload.gate = trio.Event()
            nursery.start_soon(coordinator.transact, [], [Put(b"a", b"new")])
            nursery.start_soon(coordinator.revoke, lease)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(answer, coordinator, lease)
            await trio.testing.wait_all_tasks_blocked()
            answered_early = len(answered)
            offload.gate.set()  # before anything is asserted, so that the store can be closed
            await trio.testing.wait_all_tasks_blocked()
            assert (answered_early, len(answered)) == (0, 1)

    run(scenario)


def test_when_the_disk_fails_calls_and_watches_end_and_no_watch_has_seen_what_is_lost() -> None:
    async def scenario() -> None:
        disk = SimDisk(5)
        async with names_store(disk, clean=False) as (coordinator, _):
            await put(coordinator, b"a", b"kept")
            async with coordinator.watch(b"a", b"b", Revision(1)) as watch:
                assert (await next_changes(watch)).revision == 1
                disk.fail_next("sync_data", DiskFailed("injected"), path="journal")
                with pytest.raises(EngineUnreachable):
                    await put(coordinator, b"a", b"lost")
                with pytest.raises(EngineUnreachable):
                    await anext(watch)
            for call in (coordinator.get(b"a"), coordinator.lease(5), coordinator.keep_alive(LeaseId(1))):
                with pytest.raises(EngineUnreachable):
                    await call

    run(scenario)


def test_keys_take_a_bounded_room_and_removals_work_when_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.coordinator.names_coordinator.COORDINATOR_BYTES_MAX", 3 * MIB)

    async def scenario() -> None:
        disk = SimDisk(6)
        async with names_store(disk) as (coordinator, _):
            for number in range(2):
                await put(coordinator, b"%d" % number, bytes(MIB))
        async with names_store(disk) as (coordinator, _):
            with pytest.raises(StoreFull, match="over 3145728"):
                await put(coordinator, b"2", bytes(MIB))
            await put(coordinator, b"2", bytes(MIB - 1000))
            await put(coordinator, b"2", bytes(10))
            await coordinator.transact([], [Delete(b"0")])
            await put(coordinator, b"2", bytes(MIB))
            assert (await coordinator.get(b"0")).revision == 6

    run(scenario)


def test_there_are_so_many_leases_and_one_that_ends_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.coordinator.names_coordinator.COORDINATOR_LEASES_MAX", 2)

    async def scenario() -> None:
        async with names_store(SimDisk(11)) as (coordinator, _):
            first, _second = await coordinator.lease(60), await coordinator.lease(60)
            with pytest.raises(EngineBusy, match="2 leases"):
                await coordinator.lease(60)
            await coordinator.revoke(first)
            assert await coordinator.lease(60)

    run(scenario)


# --- one engine's stores ---------------------------------------------------------------------------------


def test_the_store_of_one_engine_has_no_coordinator() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(7)) as metadata:
            with pytest.raises(StoreUnusable, match="names of a cluster"):
                async with open_names_coordinator(metadata, SimClock(), 0):
                    pass
            with metadata.view() as view:
                assert list(view.scan(TABLE, b"\0", b"\xff")) == []

    run(scenario)


def test_a_store_of_names_is_opened_as_one_only_and_that_of_an_engine_or_a_member_is_not() -> None:
    lake = b"a lake of names."

    def made(seed: int, cluster_id: bytes, *, has_names: bool) -> Superblock:
        opened_store = open_store(SimDisk(seed), SystemClock(), create=True, cluster_id=cluster_id, has_names=has_names)
        opened_store.lock.close()
        return opened_store.superblock

    names = made(8, lake, has_names=True)
    member = made(9, lake, has_names=False)
    plain = made(10, NO_CLUSTER, has_names=False)
    assert names.incompat_features == Feature.CLUSTER | Feature.CLUSTER_NAMES == 3 << 5
    refuse_other_role(names, lake, has_names=True)
    for superblock, cluster_id, has_names, message in (
        (names, NO_CLUSTER, False, "names without content"),
        (names, lake, False, "holds the names of the lake .* not opened as a member"),
        (names, b"another lake too", True, "holds the names of another lake"),
        (member, lake, True, "is a member of the lake .* not opened as the names"),
        (plain, lake, True, "store of one engine"),
    ):
        with pytest.raises(StoreUnusable, match=message):
            refuse_other_role(superblock, cluster_id, has_names=has_names)


def test_the_table_is_the_one_that_was_reserved() -> None:
    assert (TABLE, TABLE.value) == (Table.COORDINATOR, 6)
