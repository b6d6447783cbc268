"""Gc over a lake with members that fail, and cycles that end early: nothing is lost, and later cycles free the rest."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lakefs.errors import EngineUnreachable
from lakefs.ids import GcGeneration, MemberId, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake, member_id, only_kept, serve, with_garbage, with_lake
from tests.store_rig import session_of

ONE, TWO = b"one" * 50, b"two" * 30_000


@pytest.mark.parametrize("at", [m.GcMark, m.GcSweep])
def test_a_member_that_restarts_amid_a_cycle_frees_nothing_in_it(at: type[m.Request]) -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        restarted = False

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            nonlocal restarted
            if isinstance(request, at) and member == member_id(1) and not restarted:
                restarted = True
                await lake.restart(1)
            return None

        lake.members.hook = hook
        report = await lake.collect()
        assert restarted
        reasons = {each.member: each.kept_because for each in report.members}
        assert "no marks of this walk" in reasons.pop(member_id(1).hex())
        assert set(reasons.values()) == {""}
        assert {shard for shard in garbage if shard[0] == member_id(1)} <= await lake.shards()
        assert report.freed_shards == len([shard for shard in garbage if shard[0] != member_id(1)]) > 0
        await only_kept(lake)

    with_lake(main)


def test_a_batch_of_marks_that_is_lost_is_sent_again() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        lost: list[m.Request] = []

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark) and len(lost) < 2:
                lost.append(request)
                if len(lost) == 2:
                    await lake.members.client(member).call(request)  # its answer is lost
                raise EngineUnreachable("the connection was lost")
            return None

        lake.members.hook = hook
        assert (await lake.collect()).freed_shards == len(garbage)
        await only_kept(lake)

    with_lake(main)


def test_a_member_that_marks_do_not_reach_is_not_asked_to_sweep() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            assert not (isinstance(request, m.GcSweep) and member == member_id(2))
            if isinstance(request, m.GcMark) and member == member_id(2):
                raise EngineUnreachable("it does not answer")
            return None

        lake.members.hook = hook
        report = await lake.collect()
        (reason,) = {each.kept_because for each in report.members} - {""}
        assert reason == "marks did not reach it: it does not answer"
        assert report.freed_shards == len([shard for shard in garbage if shard[0] != member_id(2)])
        lake.members.hook = serve
        await only_kept(lake)

    with_lake(main)


def test_a_member_that_is_given_fewer_batches_than_were_sent_frees_nothing() -> None:
    async def main(lake: SmallLake) -> None:
        await with_garbage(lake)
        everything = await lake.shards()

        async def swallow(member: MemberId, request: m.Request) -> Reply | None:
            return Reply(m.Done()) if isinstance(request, m.GcMark) else None

        lake.members.hook = swallow
        report = await lake.collect()
        assert {each.kept_because for each in report.members} == {"0 of 1 batches of marks were received"}
        assert await lake.shards() == everything
        lake.members.hook = serve
        await only_kept(lake)

    with_lake(main)


def test_a_member_that_is_away_is_left_out_and_collects_when_it_is_back() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        await lake.members.stop(member_id(0))
        report = await lake.collect()
        reasons = {each.member: each.kept_because for each in report.members}
        assert reasons[member_id(0).hex()] == "it has not begun the cycle: the member is away"
        assert report.freed_shards == len([shard for shard in garbage if shard[0] != member_id(0)])
        await lake.members.start(member_id(0), await lake.state.generation())
        assert {shard for shard in garbage if shard[0] == member_id(0)} <= await lake.shards()
        await only_kept(lake)

    with_lake(main)


def test_without_members_a_cycle_reads_no_manifest_and_says_why_nothing_was_freed() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.put("key", ONE, TWO)
        for index in range(3):
            await lake.members.stop(member_id(index))
        report = await lake.collect()
        assert {each.kept_because for each in report.members} == {"it has not begun the cycle: the member is away"}
        assert lake.stripes.reads == []

    with_lake(main)


# --- cycles that end early -----------------------------------------------------------------------------


def test_a_cycle_that_dies_amid_its_walk_leaves_nothing_and_the_next_begins_anew() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        walks: list[bytes] = []
        scope = trio.CancelScope()

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark):
                walks.append(request.walk)
                scope.cancel()
            return None

        lake.members.hook = hook
        with scope:
            await lake.collect()
        assert garbage <= await lake.shards()
        assert (await lake.collect()).freed_shards == len(garbage)
        assert len(set(walks)) == 2
        await only_kept(lake)

    with_lake(main)


def test_names_that_crash_amid_a_cycle_walk_anew() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        walks: list[bytes] = []
        scope = trio.CancelScope()

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark):
                walks.append(request.walk)
                scope.cancel()
            return None

        lake.members.hook = hook
        with scope:
            await lake.collect()
        await lake.stop_names(crash=True)
        assert garbage <= await lake.shards()
        await lake.start_names()
        assert lake.joined.number == await lake.state.generation()
        assert (await lake.collect()).freed_shards == len(garbage)
        assert len(set(walks)) == 2
        await only_kept(lake)

    with_lake(main)


def test_sessions_hold_nothing_in_a_lake_and_generations_do() -> None:
    async def main(lake: SmallLake) -> None:
        await session_of(lake.client)
        await lake.store_chunks([(data_chunk_id(ONE), ONE)], GcGeneration(1))
        await lake.collect()
        assert await lake.is_readable(ONE)
        await lake.collect()
        assert not await lake.is_readable(ONE)

    with_lake(main)
