"""A lake moves between coordinators: all that lasts, and a crash at any point leaves one in charge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from engine.coordinator.coordinator import Compare, Coordinator, Entry, Operation, Page, Transacted
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import Side, charge_of, move, take_charge
from engine.coordinator.records import CHARGE_KEY, WALKER_KEY, Charge, ChargeRecord, LakeRecord, dirty_key, encode
from lakefs.errors import EngineBusy, EngineUnreachable, PreconditionFailed, StoreUnusable
from lakefs.ids import GcGeneration, Partition, RingEpoch
from tests.contract.coordinators import KINDS, Opened, entry_of, keys_of, opened_by, put
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator

LAKE, OTHER = b"L" * 16, b"O" * 16
EPOCH = RingEpoch(1)
TABLE_BYTES = 300_000


class Failing(MemoryCoordinator):
    """A coordinator whose `at`-th transaction is not answered, nor any call behind it; it is done, or not."""

    def __init__(self, of: MemoryCoordinator, at: int, *, is_done: bool) -> None:
        super().__init__()
        self._of, self._left, self._is_done = of, at, is_done

    @property
    def has_failed(self) -> bool:
        return self._left < 0

    async def _reach(self) -> None:
        await super()._reach()
        if self.has_failed:
            raise EngineUnreachable("it was killed")
        self.entries, self.revision, self.history = self._of.entries, self._of.revision, self._of.history

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        self._left -= 1
        if not self.has_failed:
            return await self._of.transact(compares, then_ops, else_ops)
        if self._is_done:
            await self._of.transact(compares, then_ops, else_ops)
        raise EngineUnreachable("it was killed")


def sides(table: Coordinator, etcd: Coordinator) -> tuple[Side, Side]:
    return Side(table, "the table"), Side(etcd, "the etcd")


async def fill(coordinator: Coordinator, lake: bytes = LAKE) -> None:
    """Let a coordinator have a lake's keys of each kind, with values that need several transactions."""
    state = LakeState(coordinator)
    await take_charge(coordinator, lake)
    await state.make_lake(LakeRecord(lake, 4, 2, "prod"))
    await state.next_epoch(RingEpoch(0), b"t" * TABLE_BYTES)
    await state.next_epoch(EPOCH, b"u" * 900_000)
    await state.advance_generation(GcGeneration(0))
    await state.note_dirty(map(Partition, range(250)), EPOCH)
    await put(coordinator, WALKER_KEY, b"process", await coordinator.lease(60))
    await put(coordinator, b"names/0000/log/1/0", b"a group")


async def lasting(coordinator: Coordinator) -> dict[bytes, bytes]:
    found = [await entry_of(coordinator, key) for key in await keys_of(coordinator)]
    return {entry.key: entry.value for entry in found if lasts(entry)}


def lasts(entry: Entry) -> bool:
    return not entry.lease and entry.key != CHARGE_KEY and not entry.key.startswith(b"names/")


async def charge(coordinator: Coordinator) -> ChargeRecord:
    found = await charge_of(coordinator)
    assert found is not None
    return found


@asynccontextmanager
async def two(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """A table of the names on a local disk, and a real etcd."""
    kinds = {kind.name: kind for kind in KINDS}
    table: Opened = opened_by(request, kinds["names-local"], folder)
    etcd: Opened = opened_by(request, kinds["etcd"], folder)
    async with table() as one, etcd() as other:
        yield one, other


def test_a_lake_moves_to_an_etcd_and_back_with_all_that_lasts(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two(request, tmp_path) as (table, etcd):
            await fill(table)
            before = await lasting(table)
            there, back = sides(table, etcd), sides(table, etcd)[::-1]
            moved = await move(*there, LAKE)
            assert await lasting(etcd) == before
            assert WALKER_KEY not in await keys_of(etcd)
            assert (moved.state, moved.turn) == (Charge.SERVES, 1)
            left = await charge(table)
            assert (left.state, left.place, left.incarnation) == (Charge.LEFT, "the etcd", moved.incarnation)
            assert await move(*there, LAKE) == moved, "another try finds it done"
            state = LakeState(etcd)
            assert await state.advance_generation(GcGeneration(1)) == 2, "revisions have gaps, and steps go on"
            notes = await state.dirty()
            assert len(await state.clear_dirty(notes)) == 250
            await put(etcd, b"names/0000/log/2/0", b"another group")
            before = await lasting(etcd)
            again = await move(*back, LAKE)
            assert await lasting(table) == before
            assert dirty_key(Partition(3)) not in await keys_of(table)
            assert b"names/0000/log/1/0" not in await keys_of(table)
            assert again.incarnation != moved.incarnation
            assert (await charge(etcd)).state is Charge.LEFT
            assert (await move(*there, LAKE)).turn == 3
            assert await lasting(etcd) == before

    trio.run(scenario)


async def in_charge(*coordinators: Coordinator) -> Coordinator:
    """Return the one that says so with the higher turn."""
    turns = [
        (found.turn, number) for number, each in enumerate(coordinators) if (found := await charge(each)).is_in_charge
    ]
    return coordinators[max(turns)[1]]


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("killed", ["source", "destination"])
def test_a_move_that_is_killed_at_any_step_leaves_one_in_charge(killed: str, is_done: bool, is_back: bool) -> None:
    """Then it is tried again; or the operator wants it the other way round."""

    async def is_killed_at(step: int) -> bool:
        async with memory_coordinator() as table, memory_coordinator() as etcd:
            await fill(table)
            before = await lasting(table)
            await put(etcd, CHARGE_KEY, encode(ChargeRecord(LAKE, Charge.LEFT, 0, b"i" * 16)))
            await put(etcd, dirty_key(Partition(777)), b"of an earlier time")
            failing = Failing(table if killed == "source" else etcd, step, is_done=is_done)
            with suppress(EngineUnreachable):
                await move(*sides(*((failing, etcd) if killed == "source" else (table, failing))), LAKE)
            serving = await in_charge(table, etcd)
            assert await lasting(serving) == before
            await put(serving, b"walk", b"changed since")
            pair = (etcd, table) if is_back else (table, etcd)
            await move(*(sides(table, etcd)[::-1] if is_back else sides(table, etcd)), LAKE)
            assert await lasting(pair[1]) == before | {b"walk": b"changed since"}
            assert [(await charge(each)).state for each in pair] == [Charge.LEFT, Charge.SERVES]
            return failing.has_failed

    async def scenario() -> None:
        steps = 0
        while await is_killed_at(steps):
            steps += 1
        assert steps == (2 if killed == "source" else 6)

    trio.run(scenario)


class Changing(Failing):
    """A coordinator that somebody else changes whenever it is read."""

    def __init__(self, of: MemoryCoordinator, times: int) -> None:
        super().__init__(of, 1000, is_done=True)
        self._times = times

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        page = await super().range(begin, end, limit=limit, after=after)
        if not page.more and self._times:
            self._times -= 1
            await put(self._of, b"walk", b"%d" % self._times)
        return page


@pytest.mark.parametrize("times", [1, 100])
def test_what_is_changed_while_it_is_copied_is_copied_again_or_given_up(times: int) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as table, memory_coordinator() as etcd:
            await fill(table)
            pair = sides(Changing(table, times), etcd)
            if times == 1:
                await move(*pair, LAKE)
                assert await lasting(etcd) == await lasting(table)
                return
            with pytest.raises(EngineBusy, match="stop the lake on its other machines"):
                await move(*pair, LAKE)
            assert await in_charge(table, etcd) is table

    trio.run(scenario)


def test_a_place_of_another_lake_or_of_unknown_keys_is_refused_and_unchanged() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as table, memory_coordinator() as etcd, memory_coordinator() as stray:
            await fill(table)
            await fill(etcd, OTHER)
            await put(stray, b"lake", b"anything")
            before = etcd.revision
            with pytest.raises(PreconditionFailed, match=f"the etcd holds another lake, {OTHER.hex()}"):
                await move(*sides(table, etcd), LAKE)
            assert etcd.revision == before
            with pytest.raises(PreconditionFailed, match="holds keys of no known lake"):
                await move(*sides(table, stray), LAKE)
            assert await keys_of(stray) == [b"lake"]
            assert await in_charge(table) is table
            async with memory_coordinator() as empty:
                with pytest.raises(StoreUnusable, match="the table holds nothing of this lake: it came back empty"):
                    await move(*sides(empty, stray), LAKE)

    trio.run(scenario)


def test_a_source_that_has_left_is_not_moved_to_another_place() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as table, memory_coordinator() as etcd, memory_coordinator() as other:
            await fill(table)
            await move(*sides(table, etcd), LAKE)
            with pytest.raises(StoreUnusable, match="not the table any more, but the etcd"):
                await move(Side(table, "the table"), Side(other, "another"), LAKE)
            assert await keys_of(other) == []

    trio.run(scenario)
