"""Damaged shards that are not at their homes: absent for everything, dropped when they are worth nothing."""

from __future__ import annotations

import pytest

from engine.walker.walker_report import Left
from lakefs.cluster.members import Standing
from lakefs.ids import ChunkId, ChunkKind, MemberId, chunk_id_of
from lakefs.wire import messages as m
from tests.shards import Shard, offer, read
from tests.store_rig import ask
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import EPOCH_OF_WRITERS, SIZES, Lake, member, member_id, shards_of


async def damage(made: Lake, shard: Shard, at: MemberId) -> None:
    """Let a member know that a shard is damaged."""
    await made.spoil(shard, at)
    await ask(made.clients[at], m.RunScrub(60.0, 0, restart=True), m.ReportReply)
    assert damaged(made, at) == 1


def damaged(made: Lake, *members: MemberId) -> int:
    """Return how many shards members know to be damaged."""
    return sum(len(made.stores[one].quarantine) for one in members or made.stores)


def elsewhere(made: Lake, shard: Shard) -> MemberId:
    """Return a member that is not a shard's home."""
    return next(one for one in made.stores if one != made.home(shard))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [0, 4])
def test_a_damaged_copy_elsewhere_is_dropped_when_all_shards_are_at_home(size: int, number: int) -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(size)
        shard = made.shard(chunk, number)
        await made.put(elsewhere(made, shard), shard)
        await damage(made, shard, elsewhere(made, shard))
        report = await made.walk()
        assert (report.dropped, report.rebuilt, report.moved, report.bytes_read) == (1, 0, 0, 0)
        assert (report.damaged_elsewhere, report.is_healed, damaged(made)) == (0, True, 0)
        await made.check()

    on_a_lake(scenario)


def test_a_damaged_shard_that_lies_elsewhere_is_made_anew_at_home_and_dropped() -> None:
    """It is nobody's source, whether its member knows of the damage, or finds it when the shard is read."""

    async def scenario(made: Lake) -> None:
        known, found = await made.write(300_000, 300_000)
        await made.start(member_id(6))
        for chunk, is_known in ((known, True), (found, False)):
            shard = made.shard(chunk, 1)
            await made.take(shard)
            await made.put(member_id(6), shard)
            if is_known:
                await damage(made, shard, member_id(6))
            else:
                await made.spoil(shard, member_id(6))
        report = await made.walk(member_id(6))
        assert (report.rebuilt, report.moved, report.dropped) == (2, 0, 2)
        assert (report.is_healed, damaged(made)) == (True, 0)
        await made.check()

    on_a_lake(scenario)


def test_a_drained_member_gives_damaged_shards_up_too() -> None:
    async def scenario(made: Lake) -> None:
        chunks = await made.write(*SIZES, *SIZES)
        shards = [shard for chunk in chunks for shard in shards_of(chunk, made.content[chunk])]
        held = [shard for shard in shards if made.home(shard) == member_id(3)]
        for shard in held[:2]:
            await made.spoil(shard)
        await ask(made.clients[member_id(3)], m.RunScrub(60.0, 0, restart=True), m.ReportReply)
        assert damaged(made) == len(held[:2]) > 0
        await made.start(member_id(6))
        await made.change(*[member(n, Standing.DRAINING if n == 3 else Standing.IN) for n in range(7)])
        report = await made.walk()
        assert (report.is_healed, report.rebuilt, damaged(made)) == (True, len(held[:2]), 0)
        await made.check()

    on_a_lake(scenario)


def test_a_damaged_copy_elsewhere_stays_while_a_shard_is_missing_or_a_home_is_away() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        lacking = made.shard(chunk, 5)
        await made.start(member_id(6))
        await made.put(member_id(6), shard)
        await damage(made, shard, member_id(6))
        made.away = {made.home(lacking)}
        report = await made.walk(member_id(6))
        assert (report.dropped, report.is_healed, damaged(made)) == (0, False, 1)
        made.away = set()
        for number in (0, 4, 5):
            await made.take(made.shard(chunk, number))
        report = await made.walk(member_id(6))
        assert report.left == {Left.TOO_FEW.value: 1}
        assert (report.dropped, report.damaged_elsewhere, damaged(made)) == (0, 1, 1)
        assert report.is_home, "no table has to stay for what is damaged"
        await made.put(made.home(made.shard(chunk, 0)), made.shard(chunk, 0))
        report = await made.walk(member_id(6))
        assert (report.rebuilt, report.dropped, report.is_healed, damaged(made)) == (2, 1, True, 0)
        await made.check()

    on_a_lake(scenario)


@pytest.mark.parametrize("size", [5_000, 300_000])
def test_of_a_chunk_of_which_only_a_damaged_shard_is_left_it_stays_and_is_reported(size: int) -> None:
    async def scenario(made: Lake) -> None:
        shard = unknown(made, size)[0]
        await made.start(member_id(6))
        await made.put(member_id(6), shard)
        await damage(made, shard, member_id(6))
        report = await made.walk(member_id(6))
        assert report.left == {Left.TOO_FEW.value: 1}
        assert (report.damaged_elsewhere, len(report.named), report.is_home, damaged(made)) == (1, 1, True, 1)

    on_a_lake(scenario)


def test_a_damaged_shard_makes_no_chunk_with_too_few_others() -> None:
    async def scenario(made: Lake) -> None:
        shards = unknown(made, 300_000)
        await made.start(member_id(6))
        for shard in shards[:2]:
            await made.put(made.home(shard), shard)
        await made.put(member_id(6), shards[2])
        await damage(made, shards[2], member_id(6))
        report = await made.walk(member_id(6))
        assert report.left == {Left.TOO_FEW.value: 1}
        assert (report.bytes_read, report.rebuilt, report.damaged_elsewhere) == (0, 0, 1)

    on_a_lake(scenario)


def test_a_damaged_shard_that_its_chunk_has_not_is_reported_and_stays() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(5_000)
        for number in (2, 9):
            odd = Shard(chunk, number, b"no such shard")
            at = elsewhere(made, odd) if number == 2 else member_id(0)
            await made.put(at, odd)
            await made.spoil(odd, at)
            await ask(made.clients[at], m.RunScrub(60.0, 0, restart=True), m.ReportReply)
        report = await made.walk()
        assert report.left == {Left.NO_CHUNK.value: 1}
        assert (report.damaged_elsewhere, damaged(made)) == (2, 2)

    on_a_lake(scenario)


def test_a_damaged_copy_elsewhere_that_was_touched_later_is_dropped_when_home_is_touched_as_late() -> None:
    """An answer may have counted it before it was damaged; a copy at home then counts instead."""

    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        await made.advance_generation()
        generation = await made.advance_generation()
        await made.put(elsewhere(made, shard), shard, generation)
        touched: list[int] = []

        async def touch_home(to: MemberId, request: m.Request) -> None:
            if isinstance(request, m.DropShards):
                touched.extend(request.touched)
                assert to == elsewhere(made, shard)

        await damage(made, shard, elsewhere(made, shard))
        made.before = [touch_home]
        assert (await made.walk()).is_healed
        assert touched == [generation]
        made.before = []
        await made.check()

    on_a_lake(scenario)


def test_scrub_that_finds_a_copy_good_again_gives_it_back() -> None:
    async def scenario(made: Lake) -> None:
        shards = unknown(made, 5_000)
        await made.start(member_id(6))
        await made.put(member_id(6), shards[0])
        await damage(made, shards[0], member_id(6))
        await made.walk(member_id(6))
        await made.spoil(shards[0], member_id(6))  # the bit flips back
        await ask(made.clients[member_id(6)], m.RunScrub(60.0, 0, restart=True), m.ReportReply)
        report = await made.walk(member_id(6))
        assert (report.moved, report.rebuilt, report.is_healed, damaged(made)) == (1, 2, True, 0)
        assert await read(made.clients[made.home(shards[0])], shards[0]) == [shards[0].payload]

    on_a_lake(scenario)


def test_what_is_stored_where_a_damaged_shard_lay_is_no_damaged_one() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        other = elsewhere(made, shard)
        await made.put(other, shard)
        await damage(made, shard, other)
        assert await offer(made.clients[other], shard, epoch=EPOCH_OF_WRITERS) == [0]
        await made.put(other, shard)
        report = await made.walk()
        assert (report.dropped, report.is_healed) == (1, True)
        await made.check()

    on_a_lake(scenario)


def unknown(made: Lake, size: int) -> list[Shard]:
    """Return the shards of a chunk that nobody has."""
    payload = made.rng.randbytes(size)
    return shards_of(ChunkId(chunk_id_of(ChunkKind.DATA, payload)), payload)
