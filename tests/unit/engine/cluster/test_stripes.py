"""Chunks as stripes over members in this process: stored, found, read, in ranges, with and without their length."""

from __future__ import annotations

import pytest

from engine.members.ports import Wanted
from lakefs.errors import ChunkNotFound, InvalidArgument, LakeError
from lakefs.ids import EMPTY_CHUNK, data_chunk_id, manifest_chunk_id
from lakefs.limits import KIB, MIB
from tests.unit.engine.cluster.stripe_rig import GENERATION, Rig, bytes_of, in_lake, new, payload_of

SIZES = (1, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 128 * KIB, 300_000, 512 * KIB, 1_234_567, 4 * MIB)


@pytest.mark.parametrize(
    ("protection", "count"), [("4+2", 6), ("4+2", 9), ("1+0", 1), ("1+1", 2), ("2+1", 3), ("8+2", 10)]
)
def test_chunks_of_every_kind_of_length_are_stored_once_and_read_back(protection: str, count: int) -> None:
    async def body(rig: Rig) -> None:
        payloads = [payload_of(size, size) for size in SIZES]
        chunks = [data_chunk_id(payload) for payload in payloads]
        assert await rig.present(chunks) == [False] * len(chunks)
        assert await rig.store(*payloads) == [True] * len(payloads)
        assert await rig.store(*payloads) == [False] * len(payloads)
        assert await rig.stripes.offer(GENERATION, [*chunks, EMPTY_CHUNK]) == [*SIZES, 0]
        assert await rig.dirty() == set()
        rig.forget()
        assert await rig.present(chunks) == [True] * len(chunks)
        for known in (True, False):
            rig.forget()
            wanted = [Wanted(chunk, size if known else 0) for chunk, size in zip(chunks, SIZES, strict=True)]
            for got, payload in zip(await rig.stripes.read(wanted), payloads, strict=True):
                assert not isinstance(got, LakeError)
                assert bytes_of(got, 0, 0) == payload

    in_lake(body, protection, count)


def test_shards_lie_where_the_table_says_and_short_chunks_lie_in_copies() -> None:
    async def body(rig: Rig) -> None:
        short, long = payload_of(4 * KIB), payload_of(MIB)
        await rig.store(short, long)
        assert await rig.shards(short) == {shard: [rig.home(short, shard)] for shard in (0, 4, 5)}
        assert await rig.shards(long) == {shard: [rig.home(long, shard)] for shard in range(6)}
        assert rig.members.calls["StoreShards"] <= 6, "all shards for a member are one request"

    in_lake(body)


@pytest.mark.parametrize("known", [True, False])
def test_ranges_are_read_in_whole_granules_and_no_more(known: bool) -> None:
    async def body(rig: Rig) -> None:
        payload = payload_of(1_234_567)
        await rig.store(payload)
        chunk = data_chunk_id(payload)
        rig.forget()
        for offset, length in [
            (0, 1),
            (70_000, 10),
            (300_000, 200_000),
            (390_000, 10_000),
            (1_234_566, 1),
            (1_200_000, 0),
        ]:
            [got] = await rig.stripes.read([Wanted(chunk, len(payload) if known else 0, offset, length)])
            assert not isinstance(got, LakeError)
            wanted = payload[offset : offset + length] if length else payload[offset:]
            assert bytes_of(got, offset, length) == wanted
            assert len(got.payload) < len(wanted) + 2 * 65536
        for offset, length in [(1_234_567, 1), (1_234_000, 1000), (-1, 5)]:
            with pytest.raises(InvalidArgument):
                await rig.read(chunk, len(payload) if known else 0, offset, length)

    in_lake(body)


def test_a_manifest_is_stored_as_other_chunks_are() -> None:
    async def body(rig: Rig) -> None:
        payload = payload_of(100_000)
        chunk = manifest_chunk_id(payload)
        assert await rig.stripes.store(GENERATION, [new(payload)._replace(chunk=chunk)]) == [True]
        rig.forget()
        assert await rig.read(chunk, 0) == payload

    in_lake(body)


def test_a_chunk_that_was_never_stored_is_not_found() -> None:
    async def body(rig: Rig) -> None:
        for size in (10, MIB):
            for known in (size, 0):
                with pytest.raises(ChunkNotFound):
                    await rig.read(data_chunk_id(payload_of(size)), known)

    in_lake(body)


def test_a_request_may_name_a_chunk_twice() -> None:
    async def body(rig: Rig) -> None:
        payload = payload_of(100_000)
        assert await rig.store(payload, payload) == [True, False]
        assert await rig.present([data_chunk_id(payload)] * 2) == [True, True]
        chunk = data_chunk_id(payload)
        both = await rig.stripes.read([Wanted(chunk, 100_000), Wanted(chunk, 100_000, 70_000, 5)])
        assert [bytes_of(got, 70_000, 5) for got in both if not isinstance(got, LakeError)] == [
            payload[70_000:70_005]
        ] * 2

    in_lake(body)
