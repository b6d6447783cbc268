"""The coordinator's lasting keys are repeated into the table of the names, in order, and not too often."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from engine.coordinator.coordinator import Compare, Coordinator, Delete, Found, Operation, Put, Transacted
from engine.coordinator.lasting import lasting
from engine.coordinator.records import (
    CHARGE_KEY,
    EPOCH_KEY,
    ETCD_KEY,
    REPEATED_KEY,
    SHARDS_KEY,
    WALKER_KEY,
    Charge,
    ChargeRecord,
    RepeatedRecord,
    RepeatedReplica,
    ReplicaRecord,
    ShardsRecord,
    decode,
    encode,
    epoch_key,
)
from engine.coordinator.repeating import REPEAT_EVERY_S, SIGN_EVERY_S, Repeating
from engine.format.group_parts import FIRST_SHARD, LogKeys
from lakefs.errors import EngineUnreachable
from lakefs.ids import NamesShard, ReplicaId, RingEpoch, Sequence as GroupSequence
from tests.contract.coordinators import put
from tests.memory_coordinator import HISTORY, MemoryCoordinator, memory_coordinator
from tests.sim.world.clock import SimClock
from tests.unit.support.metadata_rig import run

LEFT = ChargeRecord(b"L" * 16, Charge.LEFT, 1, b"i" * 16, "the etcd")
SERVES = ChargeRecord(b"L" * 16, Charge.SERVES, 1, b"i" * 16)
KEYS = LogKeys(FIRST_SHARD)


class Table(MemoryCoordinator):
    """The table of the names: it counts what is put, and may be slow, or away after it was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Sequence[Operation]] = []
        self.late_s = 0.0
        self.reads_late_s = 0.0
        self.fails_behind = 0

    async def get(self, key: bytes) -> Found:
        await trio.sleep(self.reads_late_s)
        return await super().get(key)

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        await trio.sleep(self.late_s)
        done = await super().transact(compares, then_ops, else_ops)
        self.batches.append(then_ops)
        if self.fails_behind:
            self.fails_behind -= 1
            raise EngineUnreachable("the answer was lost")
        return done


@asynccontextmanager
async def repeating(charge: ChargeRecord = LEFT) -> AsyncIterator[tuple[MemoryCoordinator, Table]]:
    """Repeat what one coordinator has into a table, during the block."""
    table = Table()
    await put(table, CHARGE_KEY, encode(charge))
    table.batches.clear()
    async with memory_coordinator() as etcd, trio.open_nursery() as nursery:
        await put(etcd, CHARGE_KEY, encode(SERVES))
        await put(etcd, b"lake", b"the lake")
        nursery.start_soon(Repeating(etcd, table, SimClock()).run)
        yield etcd, table
        nursery.cancel_scope.cancel()


async def settled(etcd: Coordinator, table: Coordinator) -> None:
    """Wait until both have the same; fail if that takes long."""
    with trio.fail_after(20):
        while await lasting(etcd) != await lasting(table):  # noqa: ASYNC110 - on a clock that jumps
            await trio.sleep(0.1)


def test_what_lasts_is_repeated_and_nothing_else() -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            await settled(etcd, table)
            await put(etcd, WALKER_KEY, b"a process", await etcd.lease(60))
            await put(etcd, ETCD_KEY, b"where it is")
            await put(etcd, b"names/0000/log/1/0", b"a group")
            await put(etcd, b"walk", b"1")
            await put(etcd, b"dirty/0001", b"1")
            await settled(etcd, table)
            await etcd.transact([], [Delete(b"dirty/0001"), Put(b"walk", b"2")])
            await settled(etcd, table)
            assert sorted(table.entries) == sorted([CHARGE_KEY, REPEATED_KEY, b"lake", b"walk"])
            assert table.entries[CHARGE_KEY].value == encode(LEFT)

    run(scenario)


def test_changes_of_a_second_are_put_together() -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            await settled(etcd, table)
            table.batches.clear()
            for number in range(40):
                await put(etcd, b"walk", b"%d" % number)
                await trio.sleep(REPEAT_EVERY_S / 10)
            await settled(etcd, table)
            assert 3 <= len(table.batches) <= 6

    run(scenario)


def test_a_table_comes_before_the_number_of_its_epoch() -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            await settled(etcd, table)
            table.batches.clear()
            big = b"t" * 1_000_000
            await etcd.transact([], [Put(EPOCH_KEY, b"1"), Put(epoch_key(RingEpoch(1)), big)])
            await settled(etcd, table)
            order = [operation.key for batch in table.batches for operation in batch]
            assert order.index(epoch_key(RingEpoch(1))) < order.index(EPOCH_KEY)

    run(scenario)


@pytest.mark.parametrize("value", [b"1", None])
@pytest.mark.parametrize("late", ["reads_late_s", "late_s"])
def test_what_is_changed_back_while_it_is_put_is_put_back(value: bytes | None, late: str) -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            if value is not None:
                await put(etcd, b"walk", value)
            await settled(etcd, table)
            await trio.sleep(2 * REPEAT_EVERY_S)
            setattr(table, late, 3.0)
            await put(etcd, b"walk", b"2")
            await trio.sleep(1.0)
            await etcd.transact([], [Delete(b"walk") if value is None else Put(b"walk", value)])
            await trio.sleep(2.5)
            assert table.entries[b"walk"].value == b"2", "it was put in that time"
            await settled(etcd, table)

    run(scenario)


def test_a_put_whose_answer_was_lost_and_a_history_that_was_forgotten_lose_nothing() -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            await settled(etcd, table)
            table.fails_behind = 1
            await put(etcd, b"walk", b"1")
            await trio.sleep(0.5)
            await etcd.transact([], [Delete(b"walk")])
            for number in range(2 * HISTORY):
                await put(etcd, b"openings/%04x" % number, b"1")
            await settled(etcd, table)
            assert b"walk" not in table.entries

    run(scenario)


def test_a_table_that_is_in_charge_is_not_changed() -> None:
    async def scenario() -> None:
        async with repeating(SERVES) as (_etcd, table):
            await trio.sleep(10)
            assert sorted(table.entries) == [CHARGE_KEY]

    run(scenario)


def test_the_time_and_the_replicas_are_noted_each_minute() -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            replica, gone = ReplicaId(b"r" * 16), ReplicaId(b"g" * 16)
            await put(etcd, KEYS.replica(replica), encode(ReplicaRecord("machine", GroupSequence(7), 5)))
            await put(etcd, KEYS.replica(gone), encode(ReplicaRecord("gone", GroupSequence(1), 5, is_removed=True)))
            await settled(etcd, table)
            first = noted(table)
            table.batches.clear()
            await trio.sleep(3 * SIGN_EVERY_S + 1)
            assert len(table.batches) == 3
            assert noted(table).said_ns >= first.said_ns + 2 * SIGN_EVERY_S * 1e9
            assert noted(table).replicas == (RepeatedReplica(replica, "machine", GroupSequence(7), 5),)

    run(scenario)


def test_replicas_of_further_shards_are_noted_with_theirs() -> None:
    async def scenario() -> None:
        async with repeating() as (etcd, table):
            first, second = ReplicaId(b"r" * 16), ReplicaId(b"s" * 16)
            record = ReplicaRecord("machine", GroupSequence(7), 5)
            await put(etcd, SHARDS_KEY, encode(ShardsRecord(2)))
            await put(etcd, KEYS.replica(first), encode(record))
            await put(etcd, LogKeys(NamesShard(1)).replica(second), encode(record))
            await settled(etcd, table)
            await trio.sleep(SIGN_EVERY_S + 1)
            about = "machine", GroupSequence(7), 5
            assert noted(table).replicas == (
                RepeatedReplica(first, *about),
                RepeatedReplica(second, *about, NamesShard(1)),
            )
            assert table.entries[SHARDS_KEY].value == encode(ShardsRecord(2)), "their number is a record as others"

    run(scenario)


def noted(table: MemoryCoordinator) -> RepeatedRecord:
    return decode(RepeatedRecord, table.entries[REPEATED_KEY].value)
