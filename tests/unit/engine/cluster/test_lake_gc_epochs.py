"""Gc over a lake while ring epochs change: who may free is decided by the tables of the moment when the cycle began."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from engine.lake_gc import lake_gc, lake_gc_marks
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_gc.lake_gc_homes import CycleHomes
from engine.lake_gc.lake_gc_marks import Marks
from engine.members.ports import Members
from lakefs.cluster.placing import first_table, next_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import Table
from lakefs.ids import GcGeneration, MemberId, RingEpoch, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake, member, member_id, small_lake
from tests.store_rig import run

PAYLOADS = [b"content %d" % number for number in range(40)]
GARBAGE = [b"garbage %d" % number for number in range(40)]


def test_members_free_where_they_are_homes_in_each_table() -> None:
    first = first_table(Protection(4, 2), [member(index) for index in range(7)])
    later = next_table(first, [member(index) for index in range(9)])
    homes = CycleHomes([later, first])
    for partition in (0, 1, 1000, 4095):
        chunk = bytes((1, partition >> 4, (partition & 15) << 4)).ljust(33, b"x")
        expected = set(first.homes(chunk)) & set(later.homes(chunk))  # type: ignore[arg-type]
        assert set(homes.of_partition[partition]) == expected
        for each in homes.members:
            bit = homes.partitions_of(each)[partition >> 3] >> (partition & 7) & 1
            assert bool(bit) == (each in expected)
    assert homes.partitions_of(member_id(8)) == bytes(512) or member_id(8) in homes.members


def test_a_later_table_may_have_split_partitions() -> None:
    table = first_table(Protection(1, 1), [member(index) for index in range(3)])
    split = replace(
        table, ring_epoch=RingEpoch(2), partition_bits=14, rows=tuple(row for row in table.rows for _ in range(4))
    )
    homes, plain = CycleHomes([split, table]), CycleHomes([table])
    assert len(homes.partitions_of(member_id(0))) == 2048
    assert homes.of_partition == [row for row in plain.of_partition for _ in range(4)]


async def new_epoch_amid_joining(lake: SmallLake) -> None:
    """Epoch 2 is made, content is bound at its new homes by a session that may just do so, and epoch 1 is retired."""
    present = await lake.state.generation()
    await lake.next_epoch(0, 1, 2, 3)
    for number, payload in enumerate(PAYLOADS):
        await lake.put(f"key {number}", payload, generation=present - 2)
    await lake.move_strays()
    await lake.retire()


def collect_amid_a_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a cycle whose names join it late, and check that all that is bound stays readable."""
    join = JoinedGeneration.join
    changed = False

    async def main() -> None:
        nonlocal changed
        async with small_lake() as lake:
            for _ in range(3):
                await lake.collect()

            async def late(joined: JoinedGeneration, generation: GcGeneration) -> None:
                nonlocal changed
                if not changed:
                    changed = True
                    await new_epoch_amid_joining(lake)
                await join(joined, generation)

            monkeypatch.setattr(JoinedGeneration, "join", late)
            await lake.collect()
            assert changed
            for _ in range(4):
                held = Counter(chunk for _, chunk, _ in await lake.shards())
                assert held == {data_chunk_id(payload): 2 for payload in PAYLOADS}, "bound content was freed"
                await lake.collect()
            assert member_id(3) in {each for each, _, _ in await lake.shards()}

    run(main)


def test_a_home_of_a_later_epoch_frees_nothing_though_the_earlier_one_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collect_amid_a_new_epoch(monkeypatch)


def test_a_home_that_looks_at_the_tables_of_now_frees_what_names_refer_to(monkeypatch: pytest.MonkeyPatch) -> None:
    present: list[Table] = []
    next_epoch, open_marks = SmallLake.next_epoch, lake_gc_marks.open_marks

    async def noted(lake: SmallLake, *indexes: int, at_once: bool = True) -> Table:
        present.insert(0, await next_epoch(lake, *indexes, at_once=at_once))
        return present[0]

    class OfNow(CycleHomes):
        """Members sweep where the newest table has them."""

        def partitions_of(self, member: MemberId) -> bytes:
            return CycleHomes(present[:1]).partitions_of(member) if present else super().partitions_of(member)

    def at_all(members: Members, generation: GcGeneration, homes: CycleHomes) -> AbstractAsyncContextManager[Marks]:
        """The new member begins, too; marks are sent by the tables of the beginning."""
        homes.members = tuple(sorted({*homes.members, *[each.id for table in present for each in table.members]}))
        return open_marks(members, generation, homes)

    monkeypatch.setattr(SmallLake, "next_epoch", noted)
    monkeypatch.setattr(lake_gc, "open_marks", at_all)
    monkeypatch.setattr(lake_gc, "CycleHomes", OfNow)
    with pytest.raises(AssertionError, match="bound content was freed"):
        collect_amid_a_new_epoch(monkeypatch)


def test_content_moves_to_new_homes_and_garbage_is_freed_at_old_and_new_ones() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            for number, (payload, garbage) in enumerate(zip(PAYLOADS, GARBAGE, strict=True)):
                await lake.put(f"key {number}", payload)
                await lake.put(f"gone {number}", garbage)
            await lake.delete(*[f"gone {number}" for number in range(len(GARBAGE))])
            await lake.next_epoch(0, 1, 2, 3)
            for _ in range(3):
                await lake.collect()
            assert all([await lake.is_readable(payload) for payload in PAYLOADS])
            await lake.move_strays()
            await lake.retire()
            assert len(lake.members.tables) == 1
            for _ in range(3):
                await lake.collect()
            assert await lake.chunks() == {data_chunk_id(payload) for payload in PAYLOADS}
            table = lake.members.tables[0]
            for each, chunk, number in await lake.shards():
                assert table.homes(chunk)[number] == each

    run(main)


def test_an_epoch_that_is_made_while_a_cycle_begins_is_in_its_tables_or_behind_it() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            coordinator, transact = lake.coordinator, lake.coordinator.transact
            count = 0

            async def interrupted(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == 1:
                    await lake.next_epoch(0, 1, 2, 3)
                return await transact(*args, **kwargs)  # type: ignore[arg-type]

            coordinator.transact = interrupted  # type: ignore[method-assign,assignment]
            generation, tables = await lake.state.begin_gc()
            assert (generation, sorted(tables)) == (2, [1, 2])
            assert await lake.state.generation() == 2
            count = 0

            async def retired(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == 1:
                    await lake.retire()
                return await transact(*args, **kwargs)  # type: ignore[arg-type]

            coordinator.transact = retired  # type: ignore[method-assign,assignment]
            generation, tables = await lake.state.begin_gc()
            assert (generation, sorted(tables)) == (3, [2])

    run(main)


def test_marks_go_to_the_members_that_may_free_and_to_nobody_else() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            await lake.next_epoch(0, 1, 2, 3)
            for number, payload in enumerate(PAYLOADS):
                await lake.put(f"key {number}", payload)
            marked: dict[bytes, set[MemberId]] = {}

            async def hook(member: MemberId, request: m.Request) -> Reply | None:
                for chunk in request.chunks if isinstance(request, m.GcMark) else ():
                    marked.setdefault(chunk, set()).add(member)
                return None

            lake.members.hook = hook
            await lake.collect()
            assert len(lake.members.tables) == 2
            for payload in PAYLOADS:
                chunk = data_chunk_id(payload)
                homes = [set(table.homes(chunk)) for table in lake.members.tables]
                assert marked.get(chunk, set()) == homes[0] & homes[1]

    run(main)
