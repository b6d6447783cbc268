"""Marks of a walk: numbered batches to those that may free, few at once, sent again when one may have been lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from engine.lake_gc import lake_gc_marks
from engine.lake_gc.lake_gc_homes import CycleHomes
from engine.lake_gc.lake_gc_marks import Marks, open_marks
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.errors import EngineUnreachable, InvalidArgument
from lakefs.ids import Buffer, ChunkId, GcGeneration, MemberId, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import LocalMembers, member, member_id
from tests.store_rig import run

TABLE = first_table(Protection(1, 1), [member(index) for index in range(3)])
HOMES = CycleHomes([TABLE])
CHUNKS = [data_chunk_id(b"%d" % number) for number in range(1000)]
BATCH = 100
Served = Callable[[MemberId, m.Request], Awaitable[None]]


class Recording(LocalMembers):
    """Members that note what is sent to them."""

    def __init__(self, served: Served) -> None:
        super().__init__([TABLE], None)  # type: ignore[arg-type]
        self.served = served
        self.marked: dict[MemberId, dict[int, list[bytes]]] = {}
        self.under_way: Counter[MemberId] = Counter()
        self.most: Counter[MemberId] = Counter()

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        self.under_way[member] += 1
        self.most[member] = max(self.most[member], self.under_way[member])
        try:
            await trio.lowlevel.checkpoint()
            await self.served(member, request)
            if isinstance(request, m.GcMark):
                assert request.batch not in self.marked.setdefault(member, {}), "a batch that arrived is not sent again"
                self.marked[member][request.batch] = request.chunks
        finally:
            self.under_way[member] -= 1
        return Reply(m.Done())


async def at_once(member: MemberId, request: m.Request) -> None:
    """Answer at once."""


def marked_by(served: Served, then: Callable[[Recording, Marks], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark all chunks, in batches of a hundred."""
    monkeypatch.setattr(lake_gc_marks, "BATCH_MAX", BATCH)
    monkeypatch.setattr(lake_gc_marks, "_BATCH_MIN", BATCH)

    async def main() -> None:
        members = Recording(served)
        async with open_marks(members, GcGeneration(2), HOMES) as marks:
            for chunk in CHUNKS:
                marks.add(chunk)
                await marks.flush()
                assert all(len(each.waiting) <= BATCH for each in marks.of_members.values())
            await marks.finish()
            then(members, marks)

    run(main)


def chunks_of(member: MemberId) -> list[ChunkId]:
    return [chunk for chunk in CHUNKS if member in TABLE.homes(chunk)]


def test_each_home_gets_its_marks_once_in_numbered_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def then(members: Recording, marks: Marks) -> None:
        for each in TABLE.members:
            batches = members.marked[each.id]
            assert sorted(batches) == list(range(marks.of_members[each.id].batches))
            assert [chunk for number in sorted(batches) for chunk in batches[number]] == chunks_of(each.id)
            assert {len(chunks) for number, chunks in batches.items() if number < len(batches) - 1} == {BATCH}
            assert marks.of_members[each.id].chunks == len(chunks_of(each.id))
        assert len(marks.receivers) == 3

    marked_by(at_once, then, monkeypatch)


def test_a_slow_member_has_two_batches_under_way_and_the_walk_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(member: MemberId, request: m.Request) -> None:
        await trio.sleep(30 if member == member_id(1) else 0)

    def then(members: Recording, marks: Marks) -> None:
        assert members.most[member_id(1)] == 2
        assert trio.current_time() >= 30 * len(members.marked[member_id(1)]) / 2
        assert [chunk for n in range(len(members.marked[member_id(1)])) for chunk in members.marked[member_id(1)][n]]

    marked_by(slowly, then, monkeypatch)


def test_a_member_that_answers_no_more_is_left_out_and_the_others_get_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(member: MemberId, request: m.Request) -> None:
        if member == member_id(1) and isinstance(request, m.GcMark) and request.batch >= 2:
            raise EngineUnreachable("it is silent")

    def then(members: Recording, marks: Marks) -> None:
        assert {each.member for each in marks.receivers} == {member_id(0), member_id(2)}
        assert marks.of_members[member_id(1)].left_out_because == "marks did not reach it: it is silent"
        assert sorted(members.marked[member_id(1)]) == [0, 1]
        for index in (0, 2):
            assert {chunk for chunks in members.marked[member_id(index)].values() for chunk in chunks} == {
                *chunks_of(member_id(index))
            }

    marked_by(silent, then, monkeypatch)


def test_a_member_that_does_not_begin_is_sent_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(member: MemberId, request: m.Request) -> None:
        if member == member_id(0) and isinstance(request, m.GcBegin):
            raise InvalidArgument("a cycle of gc generation 9 has begun, 2 is over")

    def then(members: Recording, marks: Marks) -> None:
        assert member_id(0) not in members.marked
        reason = marks.of_members[member_id(0)].left_out_because
        assert reason == "it has not begun the cycle: a cycle of gc generation 9 has begun, 2 is over"

    marked_by(refuse, then, monkeypatch)
