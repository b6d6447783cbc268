"""Many partitions walked at once: few requests, and none is called clean that is not known to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio

from engine.coordinator.records import MemberRecord, WalkRecord
from engine.walker.walker_pass import PassSettings, WalkerPass
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.errors import EngineUnreachable
from lakefs.ids import ChunkKind, MemberId, Partition, RingEpoch
from lakefs.wire import messages as m
from tests.sim.world.clock import SimClock
from tests.unit.engine.cluster.walker_rig import SIZES, Lake, member_id
from tests.unit.support.metadata_rig import run

ALL = [Partition(number) for number in range(4096)]
COUNT = 9


class WholeLake(Lake):
    """A lake with all rows of its tables."""

    @property
    def tables(self) -> list[Table]:
        return self.whole_tables


class Walking:
    """A lake of nine members whose first table has all rows, and one process that walks only what is dirty."""

    def __init__(self, made: WholeLake) -> None:
        self.made = made
        self.clock = SimClock()
        walker = made.walker(page=1000)
        self.walks = WalkerPass(walker, made, made.state, self.clock, b"process 1", PassSettings(full_pass_s=1e9))
        self.requests: Counter[str] = Counter()

    async def prepare(self) -> None:
        made = self.made
        for number in range(COUNT):
            await made.start(member_id(number))
            await made.state.register(MemberRecord(member_id(number), ("here",), 1 << 40, ("sda", f"host {number}")))
        await made.state.next_epoch(RingEpoch(0), pack(made.tables[0]))
        await made.state.begin_to_walk(b"process 1", await made.coordinator.lease(3600))
        await made.state.save_walk(WalkRecord(-1, 0, 1, self.clock.wall_ns()), b"process 1")
        await self.walks.resume()

        async def count(_: MemberId, request: m.Request) -> None:
            self.requests[type(request).__name__] += 1

        made.after = [count]

    async def walk(self) -> None:
        while await self.walks.step():
            pass

    async def dirty(self) -> set[Partition]:
        return {note.partition for note in await self.made.state.dirty()}

    def rows_of(self, member: MemberId) -> set[Partition]:
        """Return the partitions of which a member is home or substitute."""
        table = self.made.tables[0]
        index = [one.id for one in table.members].index(member)
        return {Partition(number) for number, row in enumerate(table.rows) if index in row}


def walking(scenario: Callable[[Walking], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            one = Walking(WholeLake(nursery, COUNT, 1))
            await one.prepare()
            try:
                await scenario(one)
            finally:
                one.made.before.clear()
                for member in list(one.made.clients):
                    await one.made.stop(member)

    run(main)


def test_a_lake_with_few_chunks_is_walked_with_few_requests_and_transactions() -> None:
    async def scenario(one: Walking) -> None:
        made = one.made
        await made.write(*SIZES, *SIZES)
        await made.write(*SIZES, kind=ChunkKind.MANIFEST)
        for chunk in list(made.content)[::2]:
            await made.take(made.shard(chunk, 0))
        await made.state.note_dirty(ALL, RingEpoch(1))
        before = made.coordinator.revision
        await one.walk()
        assert await one.dirty() == set()
        assert one.walks.totals.partitions == len(ALL)
        assert one.walks.totals.chunks == len(made.content)
        assert one.walks.totals.rebuilt == len(list(made.content)[::2])
        assert one.requests["ListShards"] == COUNT * 7, "1, 4, 16, 64, 256, 1024 partitions, and the others"
        assert made.coordinator.revision - before == 1 + 1 + 1 + 1 + 3 + 9 + 24
        await made.check()

    walking(scenario)


def test_those_that_are_noted_again_during_the_walk_stay_dirty() -> None:
    async def scenario(one: Walking) -> None:
        again = {Partition(number) for number in (1500, 1501, 4000)}
        noted: list[int] = []

        async def note(_: MemberId, request: m.Request) -> None:
            """Note them when the first member has listed the many partitions that are walked last."""
            if isinstance(request, m.ListShards) and request.end == b"" and not noted:
                noted.append(int.from_bytes(request.begin, "big") >> 4)
                await one.made.state.note_dirty(again, RingEpoch(1))

        await one.made.state.note_dirty(ALL, RingEpoch(1))
        one.made.after.append(note)
        while not noted:
            assert await one.walks.step()
        assert noted[0] < min(again), "they were of that walk"
        assert await one.dirty() == again
        await one.walk()
        await trio.sleep(61)
        await one.walk()
        assert await one.dirty() == set()

    walking(scenario)


def test_only_partitions_all_of_whose_homes_have_answered_are_clean() -> None:
    async def scenario(one: Walking) -> None:
        gone = member_id(2)
        one.made.away.add(gone)
        await one.made.state.note_dirty(ALL, RingEpoch(1))
        await one.walk()
        assert set() < await one.dirty() < set(ALL)
        assert await one.dirty() == one.rows_of(gone)
        one.made.away.clear()
        await trio.sleep(5)
        await one.walk()
        assert await one.dirty() == set()

    walking(scenario)


@pytest.mark.parametrize("page", [1, 2, 3])
def test_a_member_that_fails_during_its_list_leaves_all_of_the_walk_dirty(page: int) -> None:
    async def scenario(one: Walking) -> None:
        made = one.made
        await made.write(*[5000] * 20)
        pages = 0

        async def fail(to: MemberId, request: m.Request) -> None:
            nonlocal pages
            if to == member_id(3) and isinstance(request, m.ListShards):
                pages += 1
                if pages == page:
                    raise EngineUnreachable("it fails")

        made.before = [fail]
        walked = await made.walker(page=4).walk(ALL)
        assert pages == page, "it is asked no more"
        assert not any(map(walked.is_settled, ALL))
        made.before = []
        walked = await made.walker(page=4).walk(ALL)
        assert all(map(walked.is_settled, ALL))

    walking(scenario)


def test_notes_of_a_newer_table_stay_when_others_are_cleared() -> None:
    async def scenario(one: Walking) -> None:
        newer = {Partition(number) for number in (0, 700, 701, 4095)}
        await one.made.state.note_dirty(ALL, RingEpoch(1))
        await one.made.state.note_dirty(newer, RingEpoch(2))
        await one.walk()
        assert await one.dirty() == newer

    walking(scenario)


def test_a_chunk_in_one_of_many_partitions_leaves_only_that_one_dirty() -> None:
    async def scenario(one: Walking) -> None:
        made = one.made
        chunks = await made.write(300_000, 300_000)
        for number in (0, 1, 4):
            await made.take(made.shard(chunks[0], number))
        await made.state.note_dirty(ALL, RingEpoch(1))
        await one.walk()
        assert await one.dirty() == {made.tables[0].partition_of(chunks[0])}
        (report,) = [report for report in [one.walks.totals] if report.left]
        assert sum(report.left.values()) == 1

    walking(scenario)
