"""Stripes while ring epochs change, and while callers give up."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from engine.members.ports import Wanted
from lakefs.cluster.members import Member
from lakefs.cluster.placing import next_table
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.errors import LakeError, StaleEpoch
from lakefs.ids import RingEpoch, data_chunk_id
from lakefs.limits import GIB, KIB, MIB
from lakefs.wire import messages as m
from tests.unit.engine.cluster.stripe_rig import GENERATION, Fault, Rig, id_of, in_lake, new, payload_of, table_of

CHUNKS = [payload_of(size, size) for size in (4 * KIB, 64 * KIB, 100_000, MIB)]


def grown(count: int = 7) -> tuple[Table, Table]:
    """Return tables of six members, and of the more that they become."""
    six = table_of("4+2", 6)
    return six, next_table(six, [*six.members, *[Member(id_of(n), GIB, f"host{n}") for n in range(6, count)]])


def test_a_newer_table_is_followed_and_chunks_are_found_where_the_older_one_had_them() -> None:
    async def body(rig: Rig) -> None:
        six, seven = grown()
        rig.members.tables, rig.members.newer = [six], [seven, six]
        await rig.store(*CHUNKS)
        await rig.members.clients[id_of(2)].call(m.SetEpoch(2, pack(seven)))
        later = payload_of(MIB, 40)
        await rig.store(later)
        assert rig.table is seven
        assert all(rig.home(later, shard) in holders for shard, holders in (await rig.shards(later)).items())
        assert await rig.dirty() == set()
        for lost in range(7):
            rig.heal()
            rig.lose(lost, (lost + 2) % 7)
            for payload in (*CHUNKS, later):
                await rig.reads_back(payload)

    in_lake(body, count=7)


def test_an_offer_under_an_older_table_is_made_again() -> None:
    async def body(rig: Rig) -> None:
        six, twelve = grown(12)
        rig.members.tables, rig.members.newer = [six], [twelve, six]
        await rig.store(*CHUNKS)
        await rig.members.clients[id_of(1)].call(m.SetEpoch(2, pack(twelve)))
        chunks = [data_chunk_id(payload) for payload in CHUNKS]
        holders = [
            {six.homes(chunk)[shard] for shard in rig.code.shards(len(payload))}
            for chunk, payload in zip(chunks, CHUNKS, strict=True)
        ]
        in_row = [
            held <= {*twelve.homes(chunk), *twelve.substitutes(chunk)}
            for held, chunk in zip(holders, chunks, strict=True)
        ]
        assert False in in_row, "else this shows nothing"
        for chunk, holds in zip(chunks, in_row, strict=True):
            assert await rig.present([chunk]) == [holds]
        await rig.store(*CHUNKS)
        assert await rig.present(chunks) == [True] * len(chunks)

    in_lake(body, count=12)


def test_tables_that_change_again_and_again_are_given_up() -> None:
    async def body(rig: Rig) -> None:
        await rig.members.clients[id_of(1)].call(m.SetEpoch(2, pack(grown()[1])))
        for call in (partial(rig.store, *CHUNKS), partial(rig.stripes.offer, GENERATION, [new(CHUNKS[3]).chunk])):
            with pytest.raises(StaleEpoch):
                await call()

    in_lake(body)


def test_shards_are_touched_in_the_generation_of_the_store_or_the_offer() -> None:
    async def body(rig: Rig) -> None:
        chunk = data_chunk_id(CHUNKS[3])
        await rig.store(CHUNKS[3])
        assert await _touched(rig) == {1}
        await rig.stripes.offer(type(GENERATION)(2), [chunk])
        assert await _touched(rig) == {2}
        await rig.stripes.store(type(GENERATION)(3), [new(CHUNKS[3])])
        assert await _touched(rig) == {3}

    in_lake(body)


async def _touched(rig: Rig) -> set[int]:
    found: set[int] = set()
    for client in rig.members.clients.values():
        reply = await client.call(m.ListShards())
        assert isinstance(reply.message, m.ShardsListed)
        found.update(reply.message.touched)
    return found


@pytest.mark.parametrize("lost", [(), (1, 2)])
def test_a_call_that_is_cancelled_anywhere_leaves_nothing_behind(lost: tuple[int, ...]) -> None:
    async def body(rig: Rig) -> None:
        rig.lose(*lost)
        await rig.store(*CHUNKS)
        wanted = [Wanted(data_chunk_id(payload), 0) for payload in CHUNKS]
        chunks = [want.chunk for want in wanted]
        for steps in range(0, 90, 3):
            rig.forget()
            fresh = [payload_of(size, 1000 + steps) for size in (4 * KIB, 300_000)]
            for call in (
                partial(rig.store, *fresh),
                partial(rig.stripes.read, wanted),
                partial(rig.stripes.offer, GENERATION, [*chunks, *map(data_chunk_id, fresh)]),
            ):
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_cancel_after, steps, scope)
                        await call()
                        nursery.cancel_scope.cancel()
            rig.check_given_back()
            await rig.store(*fresh)
            for payload in fresh:
                assert await rig.read(data_chunk_id(payload), len(payload)) == payload

    in_lake(body)


async def _cancel_after(steps: int, scope: trio.CancelScope) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


def test_a_read_ends_its_requests_that_are_not_needed_any_more() -> None:
    async def body(rig: Rig) -> None:
        payload = CHUNKS[3]
        await rig.store(payload)
        rig.lose(rig.home(payload, 0), fault=Fault.SILENT)
        assert await rig.read(data_chunk_id(payload), MIB) == payload
        assert trio.lowlevel.current_statistics().tasks_living < 100
        rig.heal()
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living
        [got] = await rig.stripes.read([Wanted(data_chunk_id(payload), MIB)])
        assert not isinstance(got, LakeError)
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before
        assert rig.table.ring_epoch == RingEpoch(1)

    in_lake(body)
