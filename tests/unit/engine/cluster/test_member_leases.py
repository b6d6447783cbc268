"""A member whose lease was not renewed takes no shards, offers or marks, and is read on; writes go around it."""

from __future__ import annotations

import random

import pytest
import trio

from engine.store.store import Store
from lakefs.errors import ClusterDegraded, CoordinatorLost
from lakefs.ids import Sequence, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from tests.shards import ALL_PARTITIONS, WALK, Shard, chunk_at, collect, drop, listed, offer, read, set_epoch, store
from tests.store_rig import ask, client_of, run, simulated_store
from tests.unit.engine.cluster.stripe_rig import Rig, id_of, in_lake, payload_of

LAKE = b"a lake of tests."
SHARD, OTHER = [Shard(chunk_at(index), 1, random.Random(index).randbytes(5 * KIB)) for index in (1, 2)]


def take(opened: Store, *, takes: bool) -> None:
    """Let a member's lease be renewed, or not."""
    assert opened.member is not None
    opened.member.shards.may_take = lambda: takes


def test_a_member_without_its_lease_takes_nothing_and_is_read_on() -> None:
    async def scenario() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client = client_of(opened)
            await set_epoch(client, 1, b"table", 1)
            assert await store(client, SHARD, epoch=1) == [True]
            await ask(client, m.GcBegin(3, WALK), m.Done)
            take(opened, takes=False)
            for asked in (
                store(client, OTHER, epoch=1),
                store(client, SHARD, epoch=1),
                offer(client, SHARD, epoch=1),
                collect(client, 4),
                ask(client, m.GcMark(WALK, 0, []), m.Done),
                ask(client, m.GcSweep(WALK, 0, ALL_PARTITIONS), m.ShardsSwept),
            ):
                with pytest.raises(CoordinatorLost, match="lease"):
                    await asked
            assert not (await set_epoch(client, 2, b"newer")).takes
            assert "lease" in (await opened.status())["reason"]
            assert await read(client, SHARD) == [SHARD.payload]
            assert [shard.name for shard in await listed(client)] == [SHARD.name]
            spaces = m.SetSpaces(2, 1, [m.SpaceStat("kv", 1, 0, 0, 0, 0, 0)])
            await ask(client, spaces, m.Spaces)
            put = m.KeyedPut(1, [b"key"], [1], [5])
            assert (await ask(client, put, m.KeyedOutcomes, b"value")).outcomes == [m.KEYED_STORED]
            take(opened, takes=True)
            assert (await set_epoch(client)).takes
            assert not (await opened.status())["reason"]
            assert await offer(client, SHARD, OTHER, epoch=2) == [len(SHARD.payload), 0]
            assert await drop(client, SHARD, touched=9, epoch=2) == [0]

    run(scenario)


@pytest.mark.parametrize("is_new", [True, False])
def test_an_answer_that_is_ready_behind_the_lease_is_a_refusal(is_new: bool) -> None:
    """The disk may take long: what was decided in time does not count when it is answered too late."""

    async def scenario() -> None:
        async with simulated_store(cluster_id=LAKE) as opened:
            client = client_of(opened)
            await store(client, OTHER if is_new else SHARD)
            assert opened.member is not None
            decisions = iter([True] * 4)
            opened.member.shards.may_take = lambda: next(decisions, False)
            durable = opened.metadata.wait_durable

            async def late(sequence: Sequence) -> None:
                list(decisions)
                await durable(sequence)

            opened.metadata.wait_durable = late  # type: ignore[method-assign]
            with pytest.raises(CoordinatorLost):
                await (store(client, SHARD) if is_new else offer(client, SHARD))
            opened.metadata.wait_durable = durable  # type: ignore[method-assign]

    run(scenario)


@pytest.mark.parametrize("size", [4 * KIB, MIB])
def test_writes_go_to_others_at_once_while_a_member_takes_nothing(size: int) -> None:
    async def body(rig: Rig) -> None:
        payload = payload_of(size)
        home = rig.home(payload, 0)
        take(rig.stores[id_of(home)], takes=False)
        began = trio.current_time()
        assert await rig.store(payload) == [True]
        assert trio.current_time() < began + 1
        found = {shard.number for client in rig.members.clients.values() for shard in await listed(client)}
        assert not await listed(rig.members.clients[id_of(home)])
        assert found == ({0, 4, 5} if size == 4 * KIB else set(range(6)))
        assert await rig.dirty() == {rig.table.partition_of(data_chunk_id(payload))}
        assert (await rig.present([data_chunk_id(payload)])) == [True]
        await rig.reads_back(payload)

    in_lake(body, "4+2", 8)


def test_a_lake_with_too_few_that_take_shards_says_so_and_waits_for_nobody() -> None:
    async def body(rig: Rig) -> None:
        rig.members.returning = dict.fromkeys(map(id_of, range(3)), 5.0)
        for number in (0, 1):
            take(rig.stores[id_of(number)], takes=False)
        began = trio.current_time()
        with pytest.raises(ClusterDegraded, match="without a lease at the lake's coordinator"):
            await rig.store(payload_of(4 * KIB))
        assert trio.current_time() < began + 1
        assert len(rig.members.returning) == 3

    in_lake(body, "1+1", 2)
