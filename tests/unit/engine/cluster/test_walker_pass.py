"""The walker's order, its position, its lease; and members that are silent, return, are drained, removed and added."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest
import trio

from engine.coordinator.lake_state import Dirty
from engine.coordinator.records import MemberRecord, MemberState, WalkRecord
from engine.walker import walker_pass
from engine.walker.membership import Membership, changed_partitions
from engine.walker.walker_pace import Pace
from engine.walker.walker_pass import PassSettings, WalkerPass, partitions_of
from lakefs.cluster import placing, table_format
from lakefs.cluster.placing import first_table
from lakefs.cluster.table_format import pack, unpack
from lakefs.errors import PreconditionFailed
from lakefs.ids import MemberId, Partition, Revision, RingEpoch
from lakefs.wire import messages as m
from tests.shards import listed
from tests.sim.world.clock import SimClock
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import BITS, PARTITIONS, PROTECTION, SIZES, Lake, member, member_id
from tests.unit.support.metadata_rig import run

WEEK_S = 1000.0
SETTINGS = PassSettings(full_pass_s=WEEK_S, retry_s=60.0)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have four rows."""
    for module in (placing, table_format, walker_pass):
        monkeypatch.setattr(module, "PARTITION_BITS", BITS)


class Running:
    """A lake with its records, one process that walks, and steps of it."""

    def __init__(self, made: Lake, process: bytes = b"process 1") -> None:
        self.made = made
        self.clock = SimClock()
        self.walker = made.walker()
        self.walks = WalkerPass(self.walker, made, made.state, self.clock, process, SETTINGS)
        self.membership = Membership(made, made.state, self.walker, self.clock)

    async def make(self, count: int = 6) -> None:
        for number in range(count):
            await self.register(number)
        table = first_table(PROTECTION, [member(number) for number in range(count)])
        await self.made.state.next_epoch(RingEpoch(0), pack(table))
        await self.learn()

    async def register(self, number: int) -> None:
        domains = ("sda", f"host {number}")
        await self.made.state.register(MemberRecord(member_id(number), ("here",), 1 << 40, domains))

    async def learn(self) -> None:
        """Learn the tables, as the process that reaches members does by itself."""
        tables = await self.made.state.epoch_tables()
        self.made.whole_tables = [unpack(tables[epoch]) for epoch in sorted(tables, reverse=True)]

    async def turn(self, wait_s: float = 61.0) -> None:
        """Let the process do all that is to be done now."""
        await self.membership.look()
        await self.membership.advance()
        await self.learn()
        await self.walk()
        await self.membership.retire()
        await self.learn()
        await trio.sleep(wait_s)

    async def walk(self) -> int:
        """Walk until nothing is left; return the number of steps."""
        await self.made.state.begin_to_walk(b"process 1", await self.made.coordinator.lease(3600))
        steps = 0
        while await self.walks.step():
            steps += 1
        return steps

    async def states(self) -> dict[MemberId, MemberState]:
        return {record.member: record.state for record in await self.made.state.members()}


def running(scenario: Callable[[Running], Awaitable[None]], count: int = 6) -> None:
    async def main(made: Lake) -> None:
        one = Running(made)
        await one.make(count)
        await scenario(one)

    on_a_lake(main, count)


async def slow(_: MemberId, request: m.Request) -> None:
    """Let members list so slowly that one partition is walked at a time."""
    if isinstance(request, m.ListShards):
        await trio.sleep(1)


# --- order -------------------------------------------------------------------------------------------------


def test_short_partitions_are_walked_first_then_moving_ones_then_all() -> None:
    async def scenario(one: Running) -> None:
        order: list[bytes] = []

        async def note(_: MemberId, request: m.Request) -> None:
            if isinstance(request, m.ListShards) and (not order or order[-1] != request.begin):
                order.append(request.begin)

        await one.made.state.note_dirty([Partition(0), Partition(2)], RingEpoch(1), is_moving=True)
        await one.made.state.note_dirty([Partition(3)], RingEpoch(1))
        one.made.before = [note, slow]
        assert not one.walks.status()["healed"]
        assert await one.walk() == 3 + len(PARTITIONS)
        assert [begin[0] >> 6 for begin in order] == [3, 0, 2, 0, 1, 2, 3]
        assert one.walks.is_healed
        assert await one.made.state.dirty() == []
        assert await one.walk() == 0, "the next walk through all is not due yet"
        await trio.sleep(WEEK_S)
        assert await one.walk() == len(PARTITIONS)

    running(scenario)


def test_a_partition_that_is_noted_during_its_walk_is_walked_again() -> None:
    async def scenario(one: Running) -> None:
        noted: list[bool] = []

        async def note(_: MemberId, request: m.Request) -> None:
            if isinstance(request, m.ListShards) and not noted:
                noted.append(True)
                await one.made.state.note_dirty([Partition(3)], RingEpoch(1))

        await one.made.state.note_dirty([Partition(3)], RingEpoch(1))
        one.made.before = [note]
        await one.walks.step()
        assert len(await one.made.state.dirty()) == 1
        await trio.sleep(61)
        await one.walk()
        assert await one.made.state.dirty() == []

    running(scenario)


def test_a_partition_that_cannot_be_made_whole_stays_dirty_and_is_walked_again_later() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        (chunk,) = await made.write(300_000)
        for number in (0, 1, 4):
            await made.take(made.shard(chunk, number))
        await one.walk()
        (dirty,) = await made.state.dirty()
        assert dirty.partition == made.tables[0].partition_of(chunk)
        assert not one.walks.status()["healed"]
        assert one.walks.status()["last_pass"]["stripes_left"] == 1
        assert await one.walk() == 0
        for number in (0, 1, 4):
            shard = made.shard(chunk, number)
            await made.put(made.home(shard), shard)
        await trio.sleep(61)
        assert await one.walk() == 1
        assert one.walks.is_healed
        assert msgspec.json.decode(msgspec.json.encode(one.walks.status()))["healed"] is True

    running(scenario)


def test_a_note_of_a_newer_table_is_not_cleared_by_a_walk_of_an_older_one() -> None:
    async def scenario(one: Running) -> None:
        await one.made.state.note_dirty([Partition(1)], RingEpoch(2))
        await one.walk()
        assert len(await one.made.state.dirty()) == 1

    running(scenario)


def test_a_note_of_a_table_with_fewer_rows_is_about_all_that_a_row_became() -> None:
    newest = first_table(PROTECTION, [member(number) for number in range(6)])

    def about(partition: int, epoch: int, bits: int) -> list[int]:
        older = replace(newest, partition_bits=1, ring_epoch=RingEpoch(1))
        tables = [replace(newest, partition_bits=bits, ring_epoch=RingEpoch(2)), older]
        return [*partitions_of(Dirty(Partition(partition), RingEpoch(epoch), Revision(1)), tables)]

    assert about(1, 2, 3) == [1]
    assert about(1, 1, 3) == [4, 5, 6, 7]
    assert about(1, 9, 3) == [1, 2, 3], "by each number of rows that a table may have had"


# --- position and lease -----------------------------------------------------------------------------------------


def test_the_walk_through_all_goes_on_where_the_last_process_stopped() -> None:
    async def scenario(one: Running) -> None:
        await one.made.write(*SIZES)
        one.made.before = [slow]
        await one.made.state.begin_to_walk(b"process 1", await one.made.coordinator.lease(3600))
        for _ in range(3):
            await one.walks.step()
            await trio.sleep(11)
        assert one.walks.status()["position"] == 0.75
        assert one.walks.status()["eta_s"] > 0
        another = Running(one.made)
        await another.walks.resume()
        assert await another.walk() == 1
        walk = await one.made.state.walk()
        assert (walk.next_partition, walk.chunks, walk.left) == (-1, len(SIZES), 0)

    running(scenario)


def test_one_process_walks_at_a_time_and_another_takes_over() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        other = Running(made, b"process 2")
        await made.write(*SIZES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.coordinator.end_leases)
            first = await nursery.start(walk_in_scope, one)
            await trio.sleep(3)
            nursery.start_soon(other.walks.run, made.coordinator)
            await trio.sleep(100)
            assert one.walks.totals.partitions == len(PARTITIONS)
            assert other.walks.totals.partitions == 0
            first.cancel()
            await made.state.note_dirty([Partition(1)], RingEpoch(1))
            await trio.sleep(100)
            assert other.walks.totals.partitions == 1
            nursery.cancel_scope.cancel()

    running(scenario)


async def walk_in_scope(one: Running, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await one.walks.run(one.made.coordinator)


def test_a_process_that_does_not_walk_records_no_position() -> None:
    async def scenario(one: Running) -> None:
        state = one.made.state
        assert await state.begin_to_walk(b"process 2", await one.made.coordinator.lease(60))
        assert not await state.begin_to_walk(b"process 1", await one.made.coordinator.lease(60))
        assert not await state.save_walk(WalkRecord(3, 2), b"process 1")
        assert await state.walk() == WalkRecord()
        assert await state.save_walk(WalkRecord(3, 2), b"process 2")
        assert await state.walk() == WalkRecord(3, 2)

    running(scenario)


def test_the_pace_is_kept_by_bytes_and_by_a_share_of_the_time() -> None:
    async def main() -> None:
        for pace, expected_s in (
            (Pace(SimClock(), rate_bytes_per_s=1000), 5.0),
            (Pace(SimClock(), share=0.25), 8.0),
            (Pace(SimClock(), rate_bytes_per_s=10_000, share=0.25), 8.0),
            (Pace(SimClock()), 2.0),
        ):
            began = trio.current_time()
            async with pace.paced() as spent:
                await trio.sleep(2)
                spent(5000)
            assert trio.current_time() - began == pytest.approx(expected_s)

    run(main)


# --- members -------------------------------------------------------------------------------------------------


def test_a_member_that_is_silent_for_ten_minutes_is_out_and_its_shards_are_made_anew() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        gone = member_id(2)
        await made.stop(gone)
        for _ in range(9):
            await one.turn(60)
        assert (await one.states())[gone] is MemberState.UP
        assert one.walks.totals.rebuilt == 0
        assert not one.walks.status()["healed"]
        for _ in range(4):
            await one.turn(60)
        assert (await one.states())[gone] is MemberState.OUT
        assert [table.ring_epoch for table in made.tables] == [2]
        assert one.walks.totals.rebuilt > 0
        assert one.walks.is_healed
        await made.check()

    running(scenario, count=7)


def test_a_member_that_returns_is_up_again_and_what_it_has_is_used() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        gone = member_id(2)
        await made.stop(gone)
        for _ in range(13):
            await one.turn(60)
        await made.write(*SIZES)
        await made.start(gone)
        for _ in range(6):
            await one.turn(61)
        assert set((await one.states()).values()) == {MemberState.UP}
        assert len(made.tables) == 1
        assert len(await listed(made.clients[gone])) > 0
        assert one.walks.is_healed
        await made.check()

    running(scenario, count=7)


def test_never_are_more_members_out_than_parity() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        for number in (0, 1, 2):
            await made.stop(member_id(number))
        for _ in range(15):
            await one.turn(60)
        assert set((await one.states()).values()) == {MemberState.UP}, "more are silent: it is the network"
        await made.start(member_id(0))
        for _ in range(15):
            await one.turn(60)
        assert sorted((await one.states()).values()) == [MemberState.OUT] * 2 + [MemberState.UP] * 6
        await made.stop(member_id(0))
        for _ in range(15):
            await one.turn(60)
        assert sorted((await one.states()).values()) == [MemberState.OUT] * 2 + [MemberState.UP] * 6

    running(scenario, count=8)


def test_a_drained_member_is_removed_when_it_holds_nothing_and_not_before() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        leaving = member_id(1)
        with pytest.raises(PreconditionFailed):
            await one.membership.remove(leaving)
        await one.membership.drain(leaving)
        with pytest.raises(PreconditionFailed):
            await one.membership.remove(leaving)
        for _ in range(4):
            await one.turn()
        assert await listed(made.clients[leaving]) == {}
        assert one.walks.is_healed
        assert one.walks.totals.rebuilt == 0
        (chunk,) = list(made.content)[:1]
        await made.put(leaving, made.shard(chunk, 0))
        with pytest.raises(PreconditionFailed, match="holds shards"):
            await one.membership.remove(leaving)
        await made.state.note_dirty(PARTITIONS, made.tables[0].ring_epoch)
        await one.turn()
        await one.membership.remove(leaving)
        await one.membership.remove(leaving)
        await made.stop(leaving)
        for _ in range(3):
            await one.turn()
        assert leaving not in [each.id for each in made.tables[0].members]
        assert one.walks.is_healed
        await made.check()

    running(scenario, count=7)


def test_a_member_that_is_lost_is_replaced_by_a_new_one() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        await made.stop(member_id(4))
        await one.membership.remove(member_id(4), accept_loss=True)
        await made.start(member_id(6))
        await one.register(6)
        for _ in range(4):
            await one.turn()
        assert one.walks.is_healed
        assert one.walks.totals.rebuilt > 0
        await made.check()

    running(scenario)


def test_a_member_that_is_added_takes_its_part_and_the_older_table_is_retired_behind_the_walks() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        await made.start(member_id(6))
        await one.register(6)
        assert await one.membership.advance() == 2
        await one.learn()
        changed = changed_partitions(made.tables)
        assert {note.partition for note in await made.state.dirty()} == changed
        assert all(note.is_moving for note in await made.state.dirty())
        assert await one.membership.retire() == []
        assert await one.membership.advance() is None, "nothing has changed since"
        made.away = {member_id(5)}
        await one.walk()
        assert await one.membership.retire() == []
        made.away = set()
        await trio.sleep(61)
        await one.walk()
        assert await one.membership.retire() == [1]
        await one.learn()
        for _ in range(3):
            await one.turn()
        assert one.walks.is_healed
        await made.check()

    running(scenario)


def test_what_a_member_took_for_another_that_was_away_is_moved_when_that_one_returns() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await one.turn()
        gone = member_id(3)
        await made.stop(gone)
        await one.turn()
        for shard in [s for size in SIZES for s in made.new_chunk(made.rng.randbytes(size))]:
            await made.put(made.home(shard) if made.home(shard) != gone else member_id(0), shard)
        await made.start(gone)
        await one.turn()
        assert one.walks.totals.moved == one.walks.totals.dropped > 0
        assert one.walks.is_healed
        await made.check()

    running(scenario)
