"""Lengths of chunks as members say them: learnt in the answers of a read, and not believed of one that lies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations

import pytest

from engine.members.ports import Got, Wanted
from lakefs.errors import ChunkNotFound, ClusterDegraded
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB
from lakefs.wire import messages as m
from tests.shards import Shard, store_request
from tests.store_rig import ask
from tests.unit.engine.cluster.stripe_rig import GENERATION, Fault, Rig, bytes_of, in_lake, payload_of

SHORT, GRANULE, FULL, LONG = (payload_of(size, size % 97) for size in (4 * KIB, 64 * KIB, 192 * KIB, 700_001))
ALL = (SHORT, GRANULE, FULL, LONG)
LIARS = [*combinations(range(6), 1), *combinations(range(6), 2)]
MISSTATED = (1, 0, 1 << 22, 200_000, -300_000)


async def requests(rig: Rig, work: Callable[..., Awaitable[object]], *arguments: object) -> tuple[int, int]:
    """Do it with a head that knows nothing; return how many requests members got, and the bytes that they read."""
    rig.forget()
    calls, read = rig.members.calls.total(), rig.members.bytes_read
    await work(*arguments)
    return rig.members.calls.total() - calls, rig.members.bytes_read - read


async def learn(rig: Rig, chunks: Sequence[ChunkId]) -> None:
    await rig.stripes.lengths(chunks)


@pytest.mark.parametrize("payload", ALL, ids=len)
def test_a_whole_chunk_takes_the_same_requests_whether_its_length_is_known_or_not(payload: bytes) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(payload)
        chunk, size = data_chunk_id(payload), len(payload)
        count = rig.code.data_shards(size)
        assert await requests(rig, rig.read, chunk, size) == (count, size)
        assert await requests(rig, rig.read, chunk, 0) == (count, size)

    in_lake(body)


def test_a_length_is_learnt_and_chunks_are_offered_without_reading_a_byte() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        chunks = [data_chunk_id(payload) for payload in ALL]
        absent = data_chunk_id(b"absent")
        for chunk, payload in zip(chunks, ALL, strict=True):
            assert await requests(rig, learn, rig, [chunk]) == (2, 0)
            assert await requests(rig, rig.present, [chunk]) == (6, 0)
            assert await rig.stripes.offer(GENERATION, [chunk]) == [len(payload)]
        rig.forget()
        *found, error = await rig.stripes.lengths([*chunks, absent])
        assert found == [len(payload) for payload in ALL]
        assert isinstance(error, ChunkNotFound)
        many = [payload_of(1000, seed) for seed in range(100)]
        await rig.store(*many)
        count, read = await requests(rig, learn, rig, [data_chunk_id(payload) for payload in many])
        assert (count <= 6, read) == (True, 0), "all that a member is asked is one request"

    in_lake(body)


def test_a_range_takes_two_requests_more_at_most_and_reads_no_more() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        chunk = data_chunk_id(LONG)
        assert await requests(rig, rig.read, chunk, 0, 100, 10) == (2, 64 * KIB)
        assert await requests(rig, rig.read, chunk, 0, 300_000, 10) == (3, 64 * KIB)
        assert await requests(rig, rig.read, chunk, 0, 300_000, 100_000) == (4, 3 * 64 * KIB)

    in_lake(body)


@pytest.mark.parametrize("misstated", MISSTATED)
def test_a_member_that_lies_about_lengths_hides_no_chunk_and_yields_no_wrong_byte(misstated: int) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        rig.members.misstated = misstated
        for liars in LIARS:
            rig.heal()
            rig.lose(*liars, fault=Fault.MISSTATING)
            for payload in (SHORT, FULL, LONG):
                chunk = data_chunk_id(payload)
                offset = len(payload) * 3 // 7  # elsewhere in another shard, by the length that is misstated
                for known in (0, len(payload)):
                    rig.forget()
                    assert await rig.read(chunk, known) == payload
                    rig.forget()
                    assert await rig.read(chunk, known, offset, 10) == payload[offset : offset + 10]
                rig.forget()
                [length] = await rig.stripes.lengths([chunk])
                assert length == len(payload) or len(liars) == 2
                assert await rig.stripes.offer(GENERATION, [chunk]) in ([0], [len(payload)])

    in_lake(body)


def test_a_chunk_of_which_a_member_misstates_the_length_is_absent_and_stored_anew() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        rig.lose(rig.home(LONG, 1), fault=Fault.MISSTATING)
        rig.forget()
        assert await rig.present([data_chunk_id(LONG)]) == [False]
        assert await rig.store(LONG) == [False]
        rig.heal()
        assert await rig.present([data_chunk_id(LONG)]) == [True]

    in_lake(body)


@pytest.mark.parametrize("misstated", [1, -1, 0])
def test_a_chunk_that_is_stored_anew_is_present_while_a_member_still_misstates_its_length(misstated: int) -> None:
    async def body(rig: Rig) -> None:
        chunk = data_chunk_id(LONG)
        rig.members.misstated = misstated
        await rig.store(LONG)
        rig.lose(rig.home(LONG, 1), fault=Fault.MISSTATING)
        assert await rig.present([chunk]) == [False]
        await rig.store(LONG)
        assert await rig.present([chunk]) == [True]
        assert rig.table.partition_of(chunk) in await rig.dirty()
        rig.heal()
        assert await rig.present([chunk]) == [True]
        await rig.reads_back(LONG)

    in_lake(body)


@pytest.mark.parametrize(("protection", "count"), [("1+0", 1), ("1+1", 2), ("4+2", 6)])
def test_a_shard_that_was_misstated_is_stored_at_its_home_again_once_it_is_gone_there(
    protection: str, count: int
) -> None:
    async def body(rig: Rig) -> None:
        chunk = data_chunk_id(LONG)
        await rig.store(LONG)
        rig.lose(*range(count), fault=Fault.MISSTATING)
        assert await rig.present([chunk]) == [False]
        rig.heal()
        for shard, home in enumerate(rig.table.homes(chunk)):
            drop = m.DropShards(rig.table.ring_epoch, [chunk], [shard], [GENERATION])
            await ask(rig.members.clients[home], drop, m.ShardsDropped)
        assert await rig.present([chunk]) == [False]
        await rig.store(LONG)
        assert await rig.present([chunk]) == [True]
        assert rig.table.partition_of(chunk) not in await rig.dirty()
        await rig.reads_back(LONG)

    in_lake(body, protection, count)


def test_a_home_that_has_a_shard_with_another_length_of_its_chunk_is_passed_over() -> None:
    async def body(rig: Rig) -> None:
        chunk = data_chunk_id(LONG)
        size = rig.code.shard_bytes(len(LONG))
        wrong = Shard(chunk, 1, LONG[size : 2 * size], len(LONG) + 1)
        home = rig.members.clients[rig.table.homes(chunk)[1]]
        await ask(home, store_request([wrong], epoch=1), m.ShardsStored, wrong.payload)
        assert await rig.store(LONG) == [True]
        assert rig.table.partition_of(chunk) in await rig.dirty()
        await rig.reads_back(LONG)

    in_lake(body)


@pytest.mark.parametrize(("protection", "count"), [("1+0", 1), ("1+1", 2), ("2+1", 3), ("4+2", 3), ("8+2", 10)])
def test_lengths_are_learnt_in_lakes_of_every_kind_also_when_a_member_is_away(protection: str, count: int) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        chunks = [data_chunk_id(payload) for payload in ALL]
        for lost in (None, *range(count)):
            rig.heal()
            if lost is not None:
                rig.lose(lost, fault=Fault.LOST)
            rig.forget()
            learnt = await rig.stripes.lengths(chunks)
            rig.forget()
            read = await rig.stripes.read([Wanted(chunk, 0, 1000, 10) for chunk in chunks])
            for length, got, payload in zip(learnt, read, ALL, strict=True):
                if protection == "1+0" and lost is not None:
                    assert isinstance(length, ClusterDegraded)
                    assert isinstance(got, ClusterDegraded)
                else:
                    assert isinstance(got, Got), got
                    assert bytes_of(got, 1000, 10) == payload[1000:1010]
                    assert length == got.chunk_bytes == len(payload)

    in_lake(body, protection, count)
