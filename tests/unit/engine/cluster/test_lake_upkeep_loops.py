"""The loops of a lake's upkeep, in simulated time: gc, the walker, members that fall silent, leases that are lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from engine.coordinator.records import WALKER_KEY, MemberState
from engine.walker import walker_pass
from lakefs.cluster import placing, table_format
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import unpack
from lakefs.errors import EngineUnreachable
from lakefs.ids import Partition, RingEpoch
from lakefs.wire import messages as m
from tests.lake_rig import SmallLake, member_id, small_lake, with_lake
from tests.shards import Shard, drop
from tests.store_rig import ask, run


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have 16 rows."""
    for module in (placing, table_format, walker_pass):
        monkeypatch.setattr(module, "PARTITION_BITS", 4)


@asynccontextmanager
async def running(lake: SmallLake) -> AsyncIterator[None]:
    """Run the upkeep's loops, and learn new tables as members' links do."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lake.upkeep.run)
        nursery.start_soon(_learn, lake)
        yield
        nursery.cancel_scope.cancel()


async def _learn(lake: SmallLake) -> None:
    while True:
        await trio.sleep(1)
        try:
            packed = await lake.state.epoch_tables()
        except EngineUnreachable:
            continue
        tables = {table.ring_epoch: table for table in lake.members.tables}
        known: list[Table] = [tables.get(epoch) or unpack(packed[epoch]) for epoch in sorted(packed, reverse=True)]
        if [table.ring_epoch for table in known] != [*tables]:
            lake.members.tables[:] = known


def on_a_running_lake(body: Callable[[SmallLake], Awaitable[None]], count: int = 4) -> None:
    async def main() -> None:
        async with small_lake(count) as lake, running(lake):
            await body(lake)

    run(main)


async def states(lake: SmallLake) -> list[MemberState]:
    return [record.state for record in await lake.state.members()]


def test_gc_runs_every_ten_minutes() -> None:
    async def body(lake: SmallLake) -> None:
        await lake.put("gone", b"gone")
        await lake.delete("gone")
        await trio.sleep(599)
        assert await lake.state.generation() == 1
        await trio.sleep(1800)
        assert await lake.state.generation() >= 4
        assert await lake.chunks() == set()

    on_a_running_lake(body)


def test_dirty_partitions_are_walked_at_once_and_all_are_once_a_week() -> None:
    async def body(lake: SmallLake) -> None:
        await lake.put("name", b"content")
        (chunk,) = await lake.chunks()
        await trio.sleep(600)
        assert lake.upkeep.walks.is_healed
        ended_ns = (await lake.state.walk()).ended_ns
        assert ended_ns > 0
        await _lose_one(lake, chunk)
        await lake.state.note_dirty([lake.members.tables[0].partition_of(chunk)], RingEpoch(1))
        await trio.sleep(15)
        assert len(await lake.shards()) == 2, "walked and made anew"
        assert (await lake.state.walk()).ended_ns == ended_ns
        await _lose_one(lake, chunk)

    on_a_running_lake(body)


async def _lose_one(lake: SmallLake, chunk: bytes) -> None:
    member, lost, number = min(await lake.shards())
    assert lost == chunk
    client = lake.members.client(member)
    assert await drop(client, Shard(lost, number, b""), touched=m.GENERATION_MAX, epoch=1 << 40) == [0]


def test_a_member_that_is_silent_for_ten_minutes_is_out_and_its_places_go_to_others() -> None:
    async def body(lake: SmallLake) -> None:
        for number in range(20):
            await lake.put(f"name {number}", b"content %d" % number)
        await trio.sleep(60)
        await lake.members.stop(member_id(1))
        await trio.sleep(590)
        assert (await states(lake))[1] is MemberState.UP
        await trio.sleep(120)
        assert (await states(lake))[1] is MemberState.OUT
        assert len(await lake.shards()) == 40, "all are made anew at others"
        assert [table.ring_epoch for table in lake.members.tables] == [2], "the older table is retired"
        assert lake.gate.oldest_epoch == 2
        report = json.loads((await ask(lake.client, m.RunFsck(), m.ReportReply)).report_json)
        assert [finding["code"] for finding in report["findings"]] == ["member-unchecked"]
        assert report["unchecked"] == [], "it has no places, so nothing depends on it"
        await lake.members.start(member_id(1), await lake.state.generation())
        await trio.sleep(120)
        assert (await states(lake))[1] is MemberState.UP

    on_a_running_lake(body)


def test_another_process_that_walks_is_waited_for_and_its_end_noticed() -> None:
    async def main() -> None:
        async with small_lake(4) as lake:
            other = await lake.coordinator.lease(30)
            assert await lake.state.begin_to_walk(b"another process!", other)
            await lake.members.stop(member_id(1))
            async with running(lake):
                await trio.sleep(25)
                assert lake.upkeep.walks.totals.partitions == 0
                await trio.sleep(400)
                assert lake.upkeep.walks.totals.partitions > 0, "its lease has ended"
                assert (await states(lake))[1] is MemberState.UP
                await trio.sleep(300)
                assert (await states(lake))[1] is MemberState.OUT

    run(main)


def test_silence_that_this_process_has_not_seen_does_not_count() -> None:
    async def body(lake: SmallLake) -> None:
        await trio.sleep(30)
        await lake.members.stop(member_id(1))
        await trio.sleep(500)
        await lake.coordinator.revoke(lake.coordinator.entries[WALKER_KEY].lease)
        other = await lake.coordinator.lease(60)
        assert await lake.state.begin_to_walk(b"another process!", other)
        await trio.sleep(400)
        assert (await states(lake))[1] is MemberState.UP
        await trio.sleep(400)
        assert (await states(lake))[1] is MemberState.OUT

    on_a_running_lake(body)


def test_a_lost_lease_ends_the_walk_and_it_begins_again() -> None:
    async def body(lake: SmallLake) -> None:
        await trio.sleep(30)
        entry = lake.coordinator.entries[WALKER_KEY]
        await lake.coordinator.revoke(entry.lease)
        await trio.sleep(60)
        again = lake.coordinator.entries[WALKER_KEY]
        assert again.lease != entry.lease
        assert again.value == entry.value

    on_a_running_lake(body)


def test_a_coordinator_that_goes_for_a_while_is_survived() -> None:
    async def body(lake: SmallLake) -> None:
        await lake.put("name", b"content")
        await trio.sleep(30)
        lake.coordinator.closed = True
        await trio.sleep(1500)
        lake.coordinator.closed = False
        await trio.sleep(1500)
        assert await lake.state.generation() >= 2, "gc goes on"
        assert WALKER_KEY in lake.coordinator.entries, "and so does the walker"
        assert set(await states(lake)) == {MemberState.UP}, "nobody was silent"

    on_a_running_lake(body)


def test_names_refuse_what_is_retired_when_they_start() -> None:
    async def body(lake: SmallLake) -> None:
        await lake.next_epoch(0, 1, 2, 3)
        await lake.retire()
        assert lake.gate.oldest_epoch == 1
        await lake.stop_names()
        await lake.start_names()
        assert lake.gate.oldest_epoch == 2

    with_lake(body)


def test_healed_is_said_behind_a_walk_until_a_partition_is_noted() -> None:
    async def body(lake: SmallLake) -> None:
        async def healed() -> tuple[bool, int]:
            walker = (await lake.upkeep.status())["lake"]["walker"]
            return walker["healed"], walker["dirty_partitions"]

        assert await healed() == (False, 0), "no walk has been through all partitions"
        while await lake.upkeep.walks.step():
            pass
        assert await healed() == (True, 0)
        await lake.state.note_dirty([Partition(7)], RingEpoch(1))
        assert await healed() == (False, 1)

    with_lake(body)


def test_healed_is_not_said_while_a_removed_member_has_its_places() -> None:
    async def body(lake: SmallLake) -> None:
        while await lake.upkeep.walks.step():
            pass
        assert (await lake.upkeep.status())["lake"]["walker"]["healed"]
        await lake.upkeep.membership.remove(member_id(1), accept_loss=True)
        assert not (await lake.upkeep.status())["lake"]["walker"]["healed"]

    with_lake(body)
