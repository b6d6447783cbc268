"""A process asks a coordinator only while that has charge of its lake, and does not wait long for one that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock

from engine.coordinator.coordinator import Compare, Entry, Found, IsAbsent, Operation, Page, Put, Transacted
from engine.coordinator.fenced_coordinator import READ_S, FencedCoordinator, open_fenced_coordinator
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import Side, move, take_charge
from engine.coordinator.reads_only_coordinator import ReadsOnlyCoordinator
from engine.coordinator.records import LakeRecord
from lakefs.errors import EngineUnreachable, StoreUnusable
from lakefs.ids import LeaseId, Revision
from lakefs.limits import NAMES_PAUSE_S_MAX
from tests.contract.coordinators import entry_of, put
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator

LAKE = b"L" * 16
CALL_S = 10.0


class Etcd(MemoryCoordinator):
    """A coordinator that may be silent: then each call ends as unreachable after CALL_S."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = trio.Event()
        self.answers.set()
        self.asked = 0

    async def _reach(self) -> None:
        self.asked += 1
        with trio.move_on_after(CALL_S):
            await self.answers.wait()
        if not self.answers.is_set():
            raise EngineUnreachable("etcd at 10.0.0.4:2379 says: nothing")
        await super()._reach()


@dataclass
class Lake:
    table: MemoryCoordinator
    etcd: Etcd
    fenced: FencedCoordinator

    async def move_there(self) -> None:
        await move(Side(self.table, "the table"), Side(self.etcd, "the etcd"), LAKE)

    async def move_back(self, table: MemoryCoordinator | None = None) -> None:
        await move(Side(self.etcd, "the etcd"), Side(table or self.table, "the table"), LAKE)


@asynccontextmanager
async def lake_on_etcd() -> AsyncIterator[Lake]:
    etcd = Etcd()
    async with memory_coordinator() as table:
        await take_charge(table, LAKE)
        await LakeState(table).make_lake(LakeRecord(LAKE, 4, 2))
        moved = await move(Side(table, "the table"), Side(etcd, "the etcd"), LAKE)
        async with open_fenced_coordinator(etcd, LAKE, "the etcd", moved.incarnation) as fenced:
            await fenced.check()
            yield Lake(table, etcd, fenced)


def test_nothing_is_changed_once_the_lake_is_elsewhere() -> None:
    async def scenario() -> None:
        async with lake_on_etcd() as lake:
            assert (await lake.fenced.transact([IsAbsent(b"a")], [Put(b"a", b"1")])).succeeded
            conflict = await lake.fenced.transact([IsAbsent(b"a")], [Put(b"a", b"2")])
            assert [entry and entry.value for entry in conflict.seen] == [b"1"]
            assert not conflict.succeeded
            await lake.move_back()
            for _ in range(2):
                with pytest.raises(EngineUnreachable, match="not the etcd any more, but the table"):
                    await lake.fenced.transact([], [Put(b"a", b"3")])
            with pytest.raises(EngineUnreachable, match="any more"):
                await lake.fenced.get(b"a")
            assert "any more" in lake.fenced.failure
            assert (await entry_of(lake.etcd, b"a")).value == b"1"
            with pytest.raises(StoreUnusable, match="any more"):
                await lake.fenced.check()
            await lake.move_there()
            with pytest.raises(StoreUnusable, match="moved there another time"):
                await lake.fenced.check()

    trio.run(scenario)


class Unreached(MemoryCoordinator):
    """A coordinator that takes one transaction for another one, and then is killed."""

    def __init__(self, of: MemoryCoordinator) -> None:
        super().__init__()
        self.entries = of.entries
        self._of = of

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        if self._of.revision > self.revision:
            raise EngineUnreachable("killed")
        return await self._of.transact(compares, then_ops, else_ops)


def test_it_is_closed_while_a_move_is_under_way_and_opens_when_that_is_given_up() -> None:
    async def scenario() -> None:
        async with lake_on_etcd() as lake:
            killed = Unreached(lake.table)
            killed.revision = lake.table.revision
            with pytest.raises(EngineUnreachable):
                await lake.move_back(killed)
            with pytest.raises(EngineUnreachable, match="is being moved away from the etcd"):
                await lake.fenced.transact([], [Put(b"a", b"1")])
            await lake.move_there()
            assert (await lake.fenced.transact([], [Put(b"a", b"1")])).succeeded
            assert lake.fenced.failure == ""

    trio.run(scenario)


def test_an_etcd_that_came_back_empty_or_older_is_refused() -> None:
    async def scenario() -> None:
        async with lake_on_etcd() as lake:
            etcd, fenced = lake.etcd, lake.fenced
            entries, revision = dict(etcd.entries), etcd.revision
            await put(fenced, b"a", b"1")
            etcd.entries, etcd.revision = entries, revision
            with pytest.raises(EngineUnreachable, match="went back from revision"):
                await fenced.get(b"a")
            etcd.entries, etcd.revision = {}, Revision(revision + 100)
            with pytest.raises(EngineUnreachable, match="came back empty"):
                await fenced.transact([], [Put(b"a", b"2")])
            assert etcd.entries == {}
            with pytest.raises(StoreUnusable, match="came back empty"):
                await fenced.check()

    trio.run(scenario)


def test_reads_of_one_that_is_away_are_short_then_refused_at_once_and_go_on_by_themselves() -> None:
    async def unreachable(lake: Lake) -> float:
        began = trio.current_time()
        with pytest.raises(EngineUnreachable):
            await lake.fenced.get(b"lake")
        return trio.current_time() - began

    async def scenario() -> None:
        async with lake_on_etcd() as lake:
            lake.etcd.answers = trio.Event()
            assert await unreachable(lake) == READ_S, "the greeting of a member waits no longer"
            asked = lake.etcd.asked
            assert [await unreachable(lake) for _ in range(100)] == [0.0] * 100
            assert lake.etcd.asked <= asked + 1
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                await lake.fenced.transact([], [Put(b"a", b"1")])
            assert trio.current_time() - began >= CALL_S, "a change has the patience of etcd's client"
            lake.etcd.answers.set()
            await trio.sleep(NAMES_PAUSE_S_MAX + 0.2)
            assert (await lake.fenced.get(b"lake")).entry is not None
            assert lake.fenced.failure == ""

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_names_of_a_lake_with_etcd_answer_reads_of_the_coordinator_alone() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as etcd:
            await put(etcd, b"lake", b"L")
            served = ReadsOnlyCoordinator(etcd)
            found, page = await served.get(b"lake"), await served.range(b"a", b"z", limit=10)
            assert isinstance(found, Found)
            assert isinstance(page, Page)
            assert page.entries == (found.entry,)
            assert isinstance(found.entry, Entry)
            for call in (
                lambda: served.transact([], [Put(b"a", b"")]),
                lambda: served.lease(10),
                lambda: served.keep_alive(LeaseId(1)),
                lambda: served.revoke(LeaseId(1)),
            ):
                with pytest.raises(EngineUnreachable, match="restart lake serve on this machine"):
                    await call()
            with pytest.raises(EngineUnreachable, match="restart lake serve"):
                served.watch(b"a", b"z", Revision(1))

    trio.run(scenario)
