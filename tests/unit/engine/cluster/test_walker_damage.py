"""Shards that are damaged, lie, or are too few: healed from others where that is proven, else reported and left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from engine.walker.walker_report import Left
from lakefs.errors import InvalidArgument
from lakefs.ids import MemberId
from lakefs.limits import GRANULE_BYTES, MIB
from lakefs.wire import messages as m
from tests.shards import Shard, listed, read, store_request
from tests.store_rig import ask
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import SIZES, Lake, member_id


def test_a_quarantined_shard_is_healed() -> None:
    async def scenario(made: Lake) -> None:
        for chunk in await made.write(*SIZES):
            shard = made.shard(chunk, 0)
            await made.spoil(shard)
            await ask(made.clients[made.home(shard)], m.RunScrub(60.0, 0, restart=True), m.ReportReply)
        report = await made.walk()
        assert (report.rebuilt, report.is_healed) == (len(SIZES), True)
        await made.check()

    on_a_lake(scenario)


def test_a_shard_that_is_found_damaged_while_it_is_read_is_healed_too() -> None:
    async def scenario(made: Lake) -> None:
        chunks = await made.write(*SIZES)
        for chunk in chunks:
            await made.take(made.shard(chunk, 4))
            await made.spoil(made.shard(chunk, 0))
        report = await made.walk()
        assert (report.rebuilt, report.is_healed) == (2 * len(SIZES), True)
        await made.check()

    on_a_lake(scenario)


@pytest.mark.parametrize("lying", [0, 1, 5])
def test_a_member_that_lies_poisons_nothing_and_is_corrected(lying: int) -> None:
    """Other bytes with checksums that fit them: only the chunk's hash shows it, when the shard is used."""

    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(500_000)
        await made.lie(made.shard(chunk, lying))
        await made.take(made.shard(chunk, 2))
        report = await made.walk()
        if lying == 5:
            assert (report.rebuilt, report.replaced) == (1, 0), "it was not read"
            report = await made.walk(deep=True)
        assert report.replaced == 1
        assert report.is_healed
        await made.check()

    on_a_lake(scenario)


def test_a_deep_walk_finds_a_lie_where_nothing_is_missing() -> None:
    async def scenario(made: Lake) -> None:
        chunks = await made.write(*SIZES)
        for index, chunk in enumerate(chunks):
            await made.lie(made.shard(chunk, (0, 4, 5)[index % 3]))
        assert (await made.walk()).replaced == 0, "no lie is read"
        report = await made.walk(deep=True)
        assert (report.replaced, report.rebuilt, report.checked) == (len(SIZES), len(SIZES), len(SIZES))
        assert report.is_healed
        await made.check()

    on_a_lake(scenario)


def test_a_wrong_shard_is_refused_by_its_checksums_when_they_are_the_true_ones() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        request = store_request([shard])
        with pytest.raises(InvalidArgument):
            await made.clients[member_id(0)].call(request, [bytes(len(shard.payload))])

    on_a_lake(scenario)


@pytest.mark.parametrize("home_lies", [True, False])
def test_of_two_copies_that_differ_the_one_that_the_hash_proves_is_kept(home_lies: bool) -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        other = made.home(made.shard(chunk, 4))
        await made.put(other, shard)
        await made.lie(shard, made.home(shard) if home_lies else other)
        report = await made.walk()
        assert (report.replaced, report.dropped) == (int(home_lies), 1)
        assert report.is_healed
        await made.check()

    on_a_lake(scenario)


@pytest.mark.parametrize("home_lies", [True, False])
def test_of_a_copy_elsewhere_and_another_that_home_stored_meanwhile_the_right_one_stays(home_lies: bool) -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        other = made.home(made.shard(chunk, 4))
        await made.put(other, shard)
        if not home_lies:
            await made.lie(shard, other)
        await made.take(shard)
        stored: list[bool] = []

        async def store_first(_: MemberId, request: m.Request) -> None:
            if isinstance(request, m.StoreShards) and not stored:
                stored.append(True)
                await made.put(made.home(shard), shard)
                if home_lies:
                    await made.lie(shard)

        made.before = [store_first]
        report = await made.walk()
        assert stored
        assert (report.dropped, report.replaced) == (1, int(home_lies))
        assert report.is_healed
        await made.check()

    on_a_lake(scenario)


def test_too_few_shards_are_looked_at_once_more_and_reported_and_stay_at_their_homes() -> None:
    async def scenario(made: Lake) -> None:
        lost, other = await made.write(300_000, 5000)
        for number in (0, 1, 4):
            await made.take(made.shard(lost, number))
        before = await made.lists()
        await made.put(made.home(made.shard(lost, 0)), made.shard(lost, 5))
        report = await made.walk()
        assert report.left == {Left.TOO_FEW.value: 1}
        assert not report.is_healed
        assert report.as_json()["healed"] is False
        assert len(report.named) == 1
        assert await made.lists() == before
        assert await read(made.clients[made.home(made.shard(other, 0))], made.shard(other, 0))

    on_a_lake(scenario)


def test_a_chunk_that_is_being_stored_is_no_damage() -> None:
    async def scenario(made: Lake) -> None:
        payload = made.rng.randbytes(300_000)
        shards = made.new_chunk(payload)
        for shard in shards[:2]:
            await made.put(made.home(shard), shard)
        lock = trio.Lock()

        async def go_on(_: MemberId, request: m.Request) -> None:
            """Store the others when one chunk is listed for the second time."""
            if isinstance(request, m.ListShards) and len(request.begin) == 32:
                async with lock:
                    for shard in shards[2:]:
                        await made.put(made.home(shard), shard)

        made.before = [go_on]
        assert (await made.walk()).is_healed
        made.before = []
        await made.check()

    on_a_lake(scenario)


def test_shards_that_make_no_chunk_of_that_id_are_left_and_reported() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        for number in (0, 1, 4):
            await made.lie(made.shard(chunk, number))
        await made.take(made.shard(chunk, 5))
        before = await made.lists()
        report = await made.walk()
        assert report.left == {Left.DAMAGED.value: 1}
        assert (report.rebuilt, report.replaced) == (0, 0)
        assert await made.lists() == before

    on_a_lake(scenario)


def test_shards_that_no_chunk_has_are_reported_and_nothing_is_guessed() -> None:
    async def scenario(made: Lake) -> None:
        (other,) = await made.write(5000)
        await made.put(member_id(0), Shard(other, 9, b"no chunk has a shard 9"))
        before = await made.lists()
        report = await made.walk()
        assert report.left == {Left.NO_CHUNK.value: 1}
        assert await made.lists() == before

    on_a_lake(scenario)


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("lying", [4 * MIB, 300_001, 262_144])
def test_a_shard_of_a_chunk_of_another_length_is_corrected_by_the_hash(number: int, lying: int) -> None:
    """The bytes are right: only other members and the chunk's hash show that the length is not."""

    async def scenario(made: Lake) -> None:
        chunk, lacking = await made.write(300_000, 300_000)
        for each in (chunk, lacking):
            shard = made.shard(each, number)
            await made.take(shard)
            await made.put(made.home(shard), replace(shard, chunk_bytes=lying))
        await made.take(made.shard(lacking, 1))
        report = await made.walk()
        assert (report.replaced, report.rebuilt, report.is_healed) == (2, 3, True)
        await made.check()
        assert (await made.walk()).checked == 0

    on_a_lake(scenario)


def test_two_members_that_say_the_same_wrong_length_are_outvoted_by_the_hash() -> None:
    async def scenario(made: Lake) -> None:
        short, long = await made.write(5000, 300_000)
        for chunk, numbers in ((short, (0, 4)), (long, (0, 1))):
            for number in numbers:
                shard = made.shard(chunk, number)
                await made.take(shard)
                await made.put(made.home(shard), Shard(chunk, number, shard.payload + b"0", len(shard.payload) + 1))
        report = await made.walk()
        assert (report.replaced, report.is_healed) == (4, True)
        await made.check()

    on_a_lake(scenario)


def test_a_shard_of_another_length_is_replaced() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 4)
        await made.take(shard)
        await made.put(made.home(shard), shard.with_payload(b"short"))
        report = await made.walk()
        assert (report.replaced, report.is_healed) == (1, True)
        await made.check()

    on_a_lake(scenario)


def test_two_of_six_lost_and_a_third_that_lies_lose_only_what_cannot_be_proven() -> None:
    async def scenario(made: Lake) -> None:
        short, long = await made.write(GRANULE_BYTES - 1, 300_000)
        for chunk in (short, long):
            for number in (4, 5):
                await made.take(made.shard(chunk, number))
        report = await made.walk()
        assert report.is_healed
        for chunk in (short, long):
            for number in (4, 5):
                await made.take(made.shard(chunk, number))
            await made.lie(made.shard(chunk, 0))
        report = await made.walk()
        assert report.left == {Left.DAMAGED.value: 2}
        assert report.rebuilt == 0, "nothing is made from what is not proven"
        for one in made.clients.values():
            assert all(shard.number not in (4, 5) for shard in await listed(one))

    on_a_lake(scenario)


@pytest.mark.parametrize("at_home", [True, False])
def test_a_source_that_goes_away_while_it_is_read_is_waited_for(at_home: bool) -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        await made.take(made.shard(chunk, 2))
        gone = made.home(made.shard(chunk, 0))

        async def leave(to: MemberId, request: m.Request) -> None:
            if to == gone and isinstance(request, m.ReadChunks):
                made.away.add(gone)

        if at_home:
            made.before = [leave]
        else:
            made.away = {gone}
        report = await made.walk()
        assert report.rebuilt == 1, "there are others"
        assert report.unanswered == {gone.hex()}
        assert not report.is_healed
        made.before, made.away = [], set()
        assert (await made.walk()).is_healed
        await made.check()

    on_a_lake(scenario)
