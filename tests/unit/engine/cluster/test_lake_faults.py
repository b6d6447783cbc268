"""Faults of a lake that no other file has: a read-only member, one loss more while it heals, clients that lie."""

from __future__ import annotations

import pytest

from engine.head.head import NOT_OFFERED, REFUSAL
from engine.process.embedded import EmbeddedEngine
from engine.walker import walker
from lakefs.errors import ClusterDegraded, LakeError, StoreReadOnly
from lakefs.ids import MemberId, data_chunk_id
from lakefs.limits import MIB
from lakefs.wire import messages as m
from tests.head_rig import Lake as HeadLake, exists, with_lake
from tests.shards import Shard, store
from tests.store_rig import change
from tests.unit.engine.cluster.stripe_rig import Fault, Rig, id_of, in_lake, payload_of
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import Lake, shards_of

LONG, SHORT = payload_of(MIB, 2), payload_of(4_000, 1)


def test_a_member_whose_device_is_read_only_takes_no_shards_and_is_read() -> None:
    async def body(rig: Rig) -> None:
        assert await rig.store(LONG) == [True]
        for number in (0, 1):
            rig.stores[id_of(number)].metadata.stop_writing("the file system is read-only")
        with pytest.raises(StoreReadOnly):
            await store(rig.members.clients[id_of(0)], Shard(data_chunk_id(SHORT), 0, SHORT), epoch=1)
        more = payload_of(MIB, 3)
        assert await rig.store(more, SHORT) == [True, True]
        for payload in (LONG, more, SHORT):
            await rig.reads_back(payload)
        held = {number for numbers in (await rig.shards(more)).values() for number in numbers}
        assert not {0, 1} & held
        assert rig.table.partition_of(data_chunk_id(more)) in await rig.dirty()
        rig.lose(2, 3)
        await rig.reads_back(LONG)

    in_lake(body)


def test_m_members_are_gone_and_one_more_goes_while_the_lake_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that were healed by then are read, nothing is given up, and all is whole when the last one is back."""
    monkeypatch.setattr(walker, "BATCH_STRIPES", 2)

    async def scenario(made: Lake) -> None:
        chunks = await made.write(*[300_000 + number for number in range(12)])
        lost = [*made.clients][:2]
        for shard in [shard for chunk in chunks for shard in shards_of(chunk, made.content[chunk])]:
            if made.home(shard) in lost:
                await made.take(shard)  # their devices were replaced by empty ones
        third = next(member for member in made.clients if member not in lost)
        reads = 0

        async def go(to: MemberId, request: m.Request) -> None:
            nonlocal reads
            reads += isinstance(request, m.ReadChunks)
            if reads == 8:
                made.away.add(third)

        made.before = [go]
        report = await made.walk()
        assert not report.is_healed
        assert report.rebuilt > 0
        made.before, made.away = [], set()
        assert (await made.walk()).is_healed
        await made.check()

    on_a_lake(scenario)


def test_shards_that_are_left_stay_while_more_than_m_members_are_gone() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        chunk = data_chunk_id(LONG)
        held = await rig.shards(LONG)
        rig.lose(0, 1, 2)
        with pytest.raises(ClusterDegraded):
            await rig.read(chunk, MIB)
        rig.lose(2, fault=Fault.NONE)
        await rig.reads_back(LONG)
        rig.heal()
        assert await rig.shards(LONG) == held

    in_lake(body)


def test_a_head_believes_no_client_about_shards_and_names() -> None:
    """Requests of members and names are refused by name, whatever is in them."""
    lies: list[m.Request] = [
        m.StoreShards(1, 1, [data_chunk_id(SHORT)], [0], [len(SHORT)], [b""], chunk_lengths=[len(SHORT)]),
        m.BindBlobs(m.Answered(1, 1), [change("k", data_chunk_id(SHORT))], [len(SHORT)], [1]),
        m.DropShards(1, [data_chunk_id(SHORT)], [0], [1]),
        m.ListShards(),
    ]

    async def body(lake: HeadLake, client: EmbeddedEngine) -> None:
        for lie in lies:
            assert isinstance(lie, NOT_OFFERED)
            with pytest.raises(LakeError, match=REFUSAL):
                await client.call(lie)
        assert not await exists(client, "k")
        assert lake.stripes.offered == []

    with_lake(body)
