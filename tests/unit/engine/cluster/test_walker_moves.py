"""Shards that lie elsewhere: moved home once, dropped there only when home has them, whoever writes meanwhile."""

from __future__ import annotations

import pytest

from engine.walker.walker_report import Left
from lakefs.cluster import placing
from lakefs.cluster.members import Standing
from lakefs.cluster.table import NO_MEMBER, moves
from lakefs.errors import StaleEpoch, StoreFull
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from tests.shards import Shard, drop, listed, offer, set_epoch, store
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import (
    BITS,
    EPOCH_OF_WRITERS,
    PARTITIONS,
    SIZES,
    Lake,
    member,
    member_id,
    packed,
    shards_of,
    table_of,
)


def test_a_drained_member_holds_nothing_after_the_walk() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES, *SIZES)
        drained = member_id(3)
        held = len(await listed(made.clients[drained]))
        await made.change(*[member(n, Standing.DRAINING if n == 3 else Standing.IN) for n in range(7)])
        await made.start(member_id(6))
        report = await made.walk()
        assert report.is_healed
        assert report.rebuilt == 0, "what is there is copied"
        assert report.moved == report.dropped >= held
        assert await listed(made.clients[drained]) == {}
        await made.check()

    on_a_lake(scenario)


def test_with_a_seventh_member_no_shard_moves_whose_home_stays() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES, *SIZES, *SIZES)
        before = await made.lists()
        await made.start(member_id(6))
        await made.change(*[member(n) for n in range(7)])
        report = await made.walk()
        newest, last = made.tables
        changed = {(move.partition, move.shard) for move in moves(last, newest)}
        expected = [
            shard
            for chunk, payload in made.content.items()
            for shard in shards_of(chunk, payload)
            if (newest.partition_of(chunk), shard.number) in changed
        ]
        assert 0 < report.moved == report.dropped == len(expected) < len(before) / 3
        assert report.bytes_read == report.bytes_written
        assert report.is_healed
        await made.check()

    on_a_lake(scenario)


def test_a_lake_has_the_same_table_whichever_test_has_made_tables_small_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table_of(6)
    with monkeypatch.context() as patched:
        patched.setattr(placing, "PARTITION_BITS", BITS)
        assert len(table_of(7).rows) == len(table_of(6).rows) == 1 << BITS
    assert table_of(6) == before
    assert len(table_of(7).rows) == len(before.rows) > 1 << BITS


def test_a_member_that_returns_with_old_content_is_no_home_any_more() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES)
        gone = member_id(1)
        await made.stop(gone)
        await made.start(member_id(6))
        others = [member(n) for n in (0, 2, 3, 4, 5, 6)]
        await made.change(*others, member(1, Standing.OUT), retire=True)
        report = await made.walk()
        assert report.rebuilt > 0
        assert report.is_healed
        await made.start(gone)
        assert await listed(made.clients[gone]) != {}
        unseen = await made.walk()
        assert unseen.dropped == 0, "no table names it"
        report = await made.walk(gone)
        assert (report.rebuilt, report.moved, report.is_healed) == (0, 0, True)
        assert report.dropped > 0
        await made.check()

    on_a_lake(scenario)


def test_a_copy_elsewhere_is_kept_while_home_is_away_or_full() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        home, other = made.home(shard), made.home(made.shard(chunk, 4))
        await made.take(shard)
        await made.put(other, shard)

        async def refuse(to: MemberId, request: m.Request) -> None:
            if to == home and isinstance(request, m.StoreShards):
                raise StoreFull("full")

        made.before = [refuse]
        report = await made.walk()
        assert report.left == {Left.FULL.value: 1}
        assert (report.dropped, report.is_healed) == (0, False)
        made.before = []
        made.away = {home}
        report = await made.walk()
        assert (report.dropped, report.is_healed) == (0, False)
        made.away = set()
        assert (await made.walk()).is_healed
        await made.check()

    on_a_lake(scenario)


def test_a_copy_elsewhere_that_a_writer_touches_is_dropped_only_when_home_is_touched_as_late() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        home, other = made.home(shard), made.home(made.shard(chunk, 4))
        await made.take(shard)
        await made.put(other, shard)
        touched: list[int] = []

        async def touch(to: MemberId, request: m.Request) -> None:
            """Offer the stray in a newer generation just before it is dropped, twice."""
            if isinstance(request, m.DropShards) and len(touched) < 2:
                generation = await made.advance_generation()
                await offer(made.clients[other], shard, generation=generation, epoch=EPOCH_OF_WRITERS)
                touched.append(generation)

        await made.advance_generation()
        made.before = [touch]
        report = await made.walk()
        assert report.is_healed
        assert report.dropped == 1
        now = await listed(made.clients[home])
        assert now[Shard(chunk, 1, b"")] >= touched[-1]
        await made.check()

    on_a_lake(scenario)


def test_a_copy_elsewhere_that_is_touched_again_and_again_stays_and_is_reported() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        other = made.home(made.shard(chunk, 4))
        await made.take(shard)
        await made.put(other, shard)

        async def touch(_: MemberId, request: m.Request) -> None:
            if isinstance(request, m.DropShards):
                generation = await made.advance_generation()
                await offer(made.clients[other], shard, generation=generation, epoch=EPOCH_OF_WRITERS)

        await made.advance_generation()
        made.before = [touch]
        report = await made.walk()
        assert report.left == {Left.STRAY_KEPT.value: 1}
        made.before = []
        assert (await made.walk()).is_healed
        await made.check()

    on_a_lake(scenario)


def test_a_copy_elsewhere_is_kept_if_home_lost_its_own_before_it_was_asked() -> None:
    async def scenario(made: Lake) -> None:
        (chunk,) = await made.write(300_000)
        shard = made.shard(chunk, 1)
        home, other = made.home(shard), made.home(made.shard(chunk, 4))
        await made.put(other, shard)

        async def lose(to: MemberId, request: m.Request) -> None:
            if to == home and isinstance(request, m.OfferShards):
                await drop(made.clients[home], shard, touched=m.GENERATION_MAX, epoch=EPOCH_OF_WRITERS)

        made.before = [lose]
        report = await made.walk()
        assert (report.dropped, report.is_healed) == (0, False)
        made.before = []
        report = await made.walk()
        assert (report.moved, report.dropped, report.is_healed) == (1, 1, True)
        await made.check()

    on_a_lake(scenario)


def test_a_walk_by_an_older_table_ends_when_a_member_knows_a_newer_one() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES)
        walker = made.walker()
        for partition in PARTITIONS:
            await walker.walk([partition])
        await set_epoch(made.clients[member_id(5)], 9, b"a newer table")
        with pytest.raises(StaleEpoch):
            await made.walk()
        (chunk,) = await made.write(5000)
        shard = made.shard(chunk, 0)
        await made.put(member_id(5) if made.home(shard) != member_id(5) else member_id(4), shard)
        with pytest.raises(StaleEpoch):
            for partition in PARTITIONS:
                await walker.walk([partition])

    on_a_lake(scenario)


def test_two_walks_of_two_tables_never_drop_both_copies() -> None:
    """The older one has copied a shard from X to Y; the newer one, whose home is X, asks X and drops at Y."""

    async def scenario(made: Lake) -> None:
        await made.write(300_000, 300_000, 5000)
        await made.start(member_id(6))
        six, seven = [member(n) for n in range(6)], [member(n) for n in range(7)]
        await made.change(*seven)
        older = made.whole_tables
        began: list[bool] = []

        async def newer_walk(_: MemberId, request: m.Request) -> None:
            """Just before the older walk drops, make a newer table that moves all back, and walk by it."""
            if isinstance(request, m.DropShards) and not began:
                began.append(True)
                await made.change(*six, member(6, Standing.DRAINING))
                walker = made.walker()
                for partition in PARTITIONS:
                    await walker.walk([partition])
                await made.check()

        made.before = [newer_walk]
        with pytest.raises(StaleEpoch):
            await made.walk()
        assert older is not made.whole_tables
        await made.check()

    on_a_lake(scenario)


def test_every_member_of_the_row_says_the_epoch_before_it_is_listed() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES)
        await made.start(member_id(6))
        await made.change(*[member(n) for n in range(7)])
        await made.walk()
        newest = made.whole_tables[0]
        for client in made.clients.values():
            known = await set_epoch(client)
            assert (known.epoch, known.table) == (newest.ring_epoch, packed(newest))
        with pytest.raises(StaleEpoch):
            (chunk,) = list(made.content)[:1]
            await store(made.clients[member_id(0)], made.shard(chunk, 0), epoch=newest.ring_epoch - 1)

    on_a_lake(scenario)


def test_substitutes_give_back_what_they_took() -> None:
    async def scenario(made: Lake) -> None:
        taken = 0
        for size in SIZES * 2:
            shards = made.new_chunk(made.rng.randbytes(size))
            row = made.tables[0].row_of(shards[0].chunk)
            substitutes = [made.tables[0].members[index].id for index in row[6:] if index != NO_MEMBER]
            for shard in shards:
                goes = substitutes and shard.number in (0, 5)
                taken += bool(goes)
                await made.put(substitutes[shard.number % len(substitutes)] if goes else made.home(shard), shard)
        report = await made.walk()
        assert (report.moved, report.dropped, report.rebuilt) == (taken, taken, 0)
        assert taken > 0
        assert report.is_healed
        await made.check()

    on_a_lake(scenario, count=8)
