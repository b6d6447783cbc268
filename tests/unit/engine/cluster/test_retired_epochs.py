"""A ring epoch is retired when each home that it names has said a newer one, or is out, and what changed was walked."""

from __future__ import annotations

import pytest
import trio

from engine.coordinator.records import MemberState
from engine.walker.membership import Membership
from lakefs.errors import SessionLost
from lakefs.ids import RingEpoch
from lakefs.wire import messages as m
from tests.lake_rig import SmallLake, with_lake
from tests.unit.engine.cluster.test_walker_pass import Running, running, small_rings
from tests.unit.engine.cluster.walker_rig import SIZES, member_id

__all__ = ["small_rings"]


async def with_a_seventh(one: Running) -> None:
    """Add a seventh member, and make the table that gives it places."""
    await one.made.write(*SIZES, *SIZES)
    await one.made.start(member_id(6))
    await one.register(6)
    assert await one.membership.advance() == 2
    await one.learn()


async def epochs(one: Running) -> list[RingEpoch]:
    return list(await one.made.state.epoch_tables())


@pytest.mark.parametrize("end", ["it answers", "it is out", "it is removed"])
def test_a_home_that_has_not_said_the_newer_one_keeps_the_older_until_it_does_or_is_out(end: str) -> None:
    async def scenario(one: Running) -> None:
        made, quiet = one.made, member_id(2)
        await with_a_seventh(one)
        said: list[int] = []

        async def noted(member: object, request: m.Request) -> None:
            if member == quiet and isinstance(request, m.SetEpoch):
                said.append(request.epoch)

        made.away = {quiet}
        await made.state.clear_dirty(await made.state.dirty())
        for _ in range(3):
            assert await one.membership.retire() == []
            await trio.sleep(61)
        assert await epochs(one) == [1, 2]
        made.after.append(noted)
        if end == "it answers":
            made.away = set()
        else:
            to = MemberState.OUT if end == "it is out" else MemberState.REMOVED
            assert await made.state.set_state(quiet, MemberState.UP, to)
        assert await one.membership.retire() == [1]
        assert (2 in said) == (end == "it answers")

    running(scenario)


def test_an_epoch_stays_until_all_that_changed_was_walked_since_all_know_the_newer_one() -> None:
    async def scenario(one: Running) -> None:
        await with_a_seventh(one)
        noted = {note.partition for note in await one.made.state.dirty()}
        assert noted
        for partition in sorted(noted):
            assert await one.membership.retire() == []
            notes = [note for note in await one.made.state.dirty() if note.partition == partition]
            await one.made.state.clear_dirty(notes)
        assert await one.membership.retire() == [1]

    running(scenario)


def test_another_process_notes_what_changed_anew_so_an_end_between_table_and_notes_hides_nothing() -> None:
    async def scenario(one: Running) -> None:
        await with_a_seventh(one)
        noted = {note.partition for note in await one.made.state.dirty()}
        await one.made.state.clear_dirty(await one.made.state.dirty())  # as if its process ended before it noted them
        other = Running(one.made, b"process 2")
        assert await other.membership.retire() == []
        assert {note.partition for note in await one.made.state.dirty()} == noted

    running(scenario)


def test_names_refuse_the_answers_of_an_epoch_before_it_is_retired() -> None:
    async def scenario(one: Running) -> None:
        refused: list[RingEpoch] = []
        original = one.made.state.retire_epoch

        async def retire_epoch(epoch: RingEpoch, *, shards: int = 1) -> bool:
            assert refused == [2], "names refuse it by then"
            return await original(epoch, shards=shards)

        async def refuse(epoch: RingEpoch, shards: int) -> None:
            refused.append(epoch)

        one.made.state.retire_epoch = retire_epoch  # type: ignore[method-assign]
        await with_a_seventh(one)
        await one.walk()
        membership = Membership(one.made, one.made.state, one.walker, one.clock, retiring=refuse)
        if not await membership.retire():  # it notes what changed by itself first
            await one.walk()
            assert await membership.retire() == [1]
        assert refused

    running(scenario)


def test_what_was_answered_in_a_retired_epoch_is_not_bound() -> None:
    async def main(lake: SmallLake) -> None:
        blob = await lake.put("first", b"content")
        await lake.next_epoch(0, 1)
        await lake.bind("by the older", blob, 1, epoch=1)
        lake.gate.retire_below(RingEpoch(2))
        with pytest.raises(SessionLost, match="epoch 1, which is retired"):
            await lake.bind("too late", blob, 1, epoch=1)
        await lake.bind("by the newer", blob, 1, epoch=2)

    with_lake(main)
