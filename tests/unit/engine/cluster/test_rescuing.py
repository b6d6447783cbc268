"""A table of the names takes charge of a lake whose etcd is lost: by numbers above all that were used, at any crash."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.fenced_coordinator import open_fenced_coordinator
from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import Side, charge_of, move, take_charge
from engine.coordinator.records import CHARGE_KEY, REPEATED_KEY, Charge, ChargeRecord, LakeRecord, WalkRecord, encode
from engine.coordinator.repeating import Repeating
from engine.coordinator.rescuing import EPOCHS_SKIPPED, GENERATIONS_SKIPPED, rescue
from engine.group_log.assembly import ReplicaIsBehind
from engine.lake.left_etcd import close_left
from engine.lake.names_replica import refuse_other_time
from engine.lake.rescue import NUMBERS_SKIPPED, skip_numbers
from lakefs.cluster.table_format import pack, unpack
from lakefs.errors import EngineUnreachable, PreconditionFailed, StoreUnusable
from lakefs.ids import GcGeneration, Partition, RingEpoch, new_id16
from tests.contract.coordinators import names_store, put
from tests.contract.test_moving import Failing
from tests.memory_coordinator import memory_coordinator
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.unit.engine.cluster.stripe_rig import table_of
from tests.unit.support.metadata_rig import run

LAKE, OTHER = b"L" * 16, b"O" * 16
FIRST = table_of("2+1", 3)
PLACE = "the table"


async def moved(table: Coordinator, etcd: Coordinator) -> ChargeRecord:
    """Let a lake with a table, notes and a generation be at an etcd; returns the etcd's record."""
    state = LakeState(table)
    await take_charge(table, LAKE)
    await state.make_lake(LakeRecord(LAKE, 2, 1, "prod"))
    await state.next_epoch(RingEpoch(0), pack(FIRST))
    await state.advance_generation(GcGeneration(0))
    return await move(Side(table, PLACE), Side(etcd, "the etcd"), LAKE)


async def repeat(etcd: Coordinator, table: Coordinator) -> None:
    """Repeat the etcd's records into the table, once."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Repeating(etcd, table, SimClock()).run)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()


async def without_repeats(etcd: Coordinator) -> None:
    """Let the etcd have what was not repeated: another table, a generation, and a note that was cleared."""
    state = LakeState(etcd)
    second = replace(FIRST, ring_epoch=RingEpoch(2), rows=FIRST.rows[::-1])
    assert await state.next_epoch(RingEpoch(1), pack(second)) == 2
    assert await state.advance_generation(GcGeneration(1)) == 2


def test_a_rescued_table_goes_on_above_all_that_was_used() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as table, memory_coordinator() as etcd:
            before = await moved(table, etcd)
            await LakeState(etcd).note_dirty([Partition(3)], RingEpoch(1))
            await put(etcd, b"walk", encode(WalkRecord(ended_ns=77)))
            await repeat(etcd, table)
            await without_repeats(etcd)

            served = await rescue(table, LAKE, PLACE)
            assert served.turn > before.turn
            assert (served.state, await charge_of(table)) == (Charge.SERVES, served)
            assert served.incarnation != before.incarnation
            state = LakeState(table)
            assert await state.generation() == 1 + GENERATIONS_SKIPPED
            tables = await state.epoch_tables()
            newest = await state.epoch()
            assert list(tables) == [1, newest]
            assert newest == 1 + EPOCHS_SKIPPED
            assert unpack(tables[newest]) == replace(FIRST, ring_epoch=newest)
            assert len(await state.dirty()) == len(FIRST.rows)
            assert (await state.walk()).ended_ns == 0, "all of it is to be walked"
            assert REPEATED_KEY not in table.entries
            assert await rescue(table, LAKE, PLACE) == served, "another try finds it done"

            with pytest.raises(EngineUnreachable):
                await rescued_again_by(etcd, before)
            moved_on = await move(Side(table, PLACE), Side(etcd, "the etcd"), LAKE)
            assert moved_on.turn == served.turn + 1
            assert await LakeState(etcd).generation() == 1 + GENERATIONS_SKIPPED

    run(scenario)


async def rescued_again_by(etcd: Coordinator, known: ChargeRecord) -> None:
    """Change something as a process that knows the etcd from before, when it was closed."""
    async with open_fenced_coordinator(etcd, LAKE, "the etcd", known.incarnation) as fenced:
        await fenced.check()
        await put(fenced, b"walk", b"before it is closed")
        assert await close_left(etcd, LAKE, known.turn + 2)
        assert await close_left(etcd, LAKE, known.turn + 2), "it is closed"
        await put(fenced, b"walk", b"behind that")


@pytest.mark.parametrize("is_done", [False, True])
def test_a_rescue_that_is_killed_at_any_step_is_gone_on_with(is_done: bool) -> None:
    async def is_killed_at(step: int) -> bool:
        async with memory_coordinator() as table, memory_coordinator() as etcd:
            before = await moved(table, etcd)
            await repeat(etcd, table)
            failing = Failing(table, step, is_done=is_done)
            with suppress(EngineUnreachable):
                await rescue(failing, LAKE, PLACE)
            charge = await charge_of(table)
            assert charge is not None
            if charge.state is Charge.LEFT:
                assert charge.incarnation == before.incarnation, "nothing was changed"
                assert not await LakeState(table).dirty()
            served = await rescue(table, LAKE, PLACE)
            assert served.turn > before.turn
            state = LakeState(table)
            assert await state.generation() > GENERATIONS_SKIPPED
            assert len(await state.dirty()) == len(FIRST.rows)
            assert len(await state.epoch_tables()) == 2
            return failing.has_failed

    async def scenario() -> None:
        step = 0
        while await is_killed_at(step):
            step += 7 if 2 < step < len(FIRST.rows) // 120 - 2 else 1
        assert step > len(FIRST.rows) // 120

    run(scenario)


def test_a_table_without_the_lake_s_records_is_refused() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as table, memory_coordinator() as etcd:
            await moved(table, etcd)
            revision = table.revision
            with pytest.raises(StoreUnusable, match="has no copy of the lake's records"):
                await rescue(table, LAKE, PLACE)
            await repeat(etcd, table)
            with pytest.raises(PreconditionFailed, match="holds another lake"):
                await rescue(table, OTHER, PLACE)
            assert table.revision == revision + 1
            async with memory_coordinator() as empty:
                with pytest.raises(StoreUnusable, match="holds nothing of this lake"):
                    await rescue(empty, LAKE, PLACE)

    run(scenario)


def test_an_etcd_of_another_lake_or_of_a_later_turn_is_not_closed() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as empty, memory_coordinator() as etcd:
            assert not await close_left(empty, LAKE, 3)
            assert not empty.entries
            for lake, turn, is_closed in ((OTHER, 1, False), (LAKE, 3, True), (LAKE, 4, True)):
                record = ChargeRecord(lake, Charge.SERVES, turn, b"i" * 16)
                await put(etcd, CHARGE_KEY, encode(record))
                assert await close_left(etcd, LAKE, 3) is is_closed
                assert await charge_of(etcd) == record

    run(scenario)


def test_a_replica_of_another_time_of_the_lake_begins_anew() -> None:
    """Before a rescue groups of the same numbers may have been others."""

    async def scenario() -> None:
        async with names_store(SimDisk(1)) as (table, metadata), memory_coordinator() as etcd:
            with pytest.raises(ReplicaIsBehind):
                refuse_other_time(metadata, new_id16())
            served = await moved(table, etcd)
            refuse_other_time(metadata, served.incarnation)
            refuse_other_time(metadata, b"")
            await repeat(etcd, table)
            await rescue(table, LAKE, PLACE)
            with pytest.raises(ReplicaIsBehind, match="not of the time since the lake was moved"):
                refuse_other_time(metadata, served.incarnation)

    run(scenario)


def test_numbers_of_nodes_go_on_above_those_of_the_groups_that_are_lost() -> None:
    async def scenario() -> None:
        disk = SimDisk(1)
        async with names_store(disk) as (_, metadata):
            lost, _ = await metadata.commit(lambda txn: txn.new_node_ids(30_000))
            await skip_numbers(metadata)
        async with names_store(disk) as (_, metadata):
            first, _ = await metadata.commit(lambda txn: txn.new_node_id())
            assert first >= lost + NUMBERS_SKIPPED

    run(scenario)
