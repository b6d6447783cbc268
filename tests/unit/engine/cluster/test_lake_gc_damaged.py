"""Damaged shards where no home is: gc drops those of chunks that nothing refers to, and no others."""

from __future__ import annotations

from lakefs.errors import EngineUnreachable
from lakefs.ids import MemberId, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake, member_id, serve, with_lake
from tests.shards import Shard, offer, store
from tests.store_rig import ask
from tests.unit.engine.chunks.test_shards import spoil

KEPT, GONE = b"kept" * 20, b"gone" * 20


async def damaged_elsewhere(lake: SmallLake) -> dict[bytes, MemberId]:
    """Put two objects, and damage a copy of a shard of each where no home is; return where."""
    found: dict[bytes, MemberId] = {}
    for index in range(3):
        await lake.register(index)
    for payload in (KEPT, GONE):
        await lake.put(payload[:4].decode(), payload)
        found[payload] = await damage(lake, payload)
    return found


async def damage(lake: SmallLake, payload: bytes) -> MemberId:
    """Damage a copy of a shard that has no home where it lies."""
    chunk = data_chunk_id(payload)
    homes = lake.members.tables[0].homes(chunk)
    (member,) = {member_id(index) for index in range(3)} - set(homes)
    shard = Shard(chunk, 0, payload)
    await store(lake.members.client(member), shard, epoch=lake.members.tables[0].ring_epoch)
    opened = lake.members.processes[member].store
    assert opened is not None
    spoil(opened, shard, 0)
    await ask(lake.members.client(member), m.RunScrub(60.0, 0, restart=True), m.ReportReply)
    assert len(opened.quarantine) > 0
    return member


def quarantined(lake: SmallLake) -> set[bytes]:
    """Return the chunks of the damaged shards of all members."""
    stores = [process.store for process in lake.members.processes.values()]
    return {each.chunk for one in stores if one is not None for each in one.quarantine.noted(10)}


def test_a_damaged_shard_elsewhere_goes_when_nothing_refers_to_its_chunk_any_more() -> None:
    async def main(lake: SmallLake) -> None:
        await damaged_elsewhere(lake)
        both = {data_chunk_id(KEPT), data_chunk_id(GONE)}
        for _ in range(4):
            assert (await lake.collect()).freed_damaged == 0
        assert quarantined(lake) == both, "names refer to both"
        await lake.delete("gone")
        freed = [(await lake.collect()).freed_damaged for _ in range(4)]
        assert sum(freed) == 1
        assert quarantined(lake) == {data_chunk_id(KEPT)}
        assert await lake.is_readable(KEPT)

    with_lake(main)


def test_what_was_touched_lately_stays_and_so_does_what_nobody_marked_in_a_failed_walk() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.collect()
        await lake.collect()
        places = await damaged_elsewhere(lake)
        generation = await lake.state.generation()
        assert generation >= 2
        await lake.delete("gone")

        async def nobody_begins(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcBegin):
                raise EngineUnreachable("away")
            assert not isinstance(request, m.DropShards)
            return None

        lake.members.hook = nobody_begins
        for _ in range(3):
            assert (await lake.collect()).freed_damaged == 0
        lake.members.hook = serve
        await lake.restart(int(places[GONE][0]))  # behind a restart all counts as touched now
        assert [(await lake.collect()).freed_damaged for _ in range(3)] == [0, 1, 0]

    with_lake(main)


def test_what_is_stored_anew_before_it_is_dropped_stays() -> None:
    async def main(lake: SmallLake) -> None:
        places = await damaged_elsewhere(lake)
        await lake.delete("gone")
        dropped: list[m.DropShards] = []

        async def store_first(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.DropShards):
                assert member == places[GONE]
                assert request.only_damaged
                dropped.append(request)
                shard = Shard(data_chunk_id(GONE), 0, GONE)
                await store(lake.members.client(member), shard, epoch=request.epoch)
            return None

        lake.members.hook = store_first
        for _ in range(4):
            assert (await lake.collect()).freed_damaged == 0
        assert len(dropped) == 1
        there = Shard(data_chunk_id(GONE), 0, GONE)
        epoch = lake.members.tables[0].ring_epoch
        assert await offer(lake.members.client(places[GONE]), there, epoch=epoch) == [len(GONE)]

    with_lake(main)


def test_a_member_that_does_not_answer_or_does_not_know_the_question_keeps_its_own() -> None:
    async def main(lake: SmallLake) -> None:
        await damaged_elsewhere(lake)
        await lake.delete("gone")
        asked: list[MemberId] = []

        async def of_an_earlier_release(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.ListShards):
                asked.append(member)
                if member == member_id(0):
                    raise EngineUnreachable("away")
                reply = await lake.members.client(member).call(m.ListShards(limit=request.limit))
                assert isinstance(reply.message, m.ShardsListed)
                page = reply.message
                return Reply(m.ShardsListed(page.chunks, page.shards, page.lengths, page.crcs, page.touched))
            assert not isinstance(request, m.DropShards)
            return None

        lake.members.hook = of_an_earlier_release
        for _ in range(4):
            assert (await lake.collect()).freed_damaged == 0
        assert len(asked) == 12
        assert len(quarantined(lake)) == 2

    with_lake(main)
