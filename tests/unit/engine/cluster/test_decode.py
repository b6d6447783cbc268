"""Chunks from some of their shards: found whatever is lost and whichever shards lie, and never a wrong one."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from engine.stripes.decode import solve
from engine.stripes.shard_lengths import readings_of
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.protection import PROTECTIONS
from lakefs.ids import ChunkId, ChunkKind, chunk_id_of
from lakefs.limits import GRANULE_BYTES

CODES = [ErasureCode(protection.data, protection.parity) for protection in PROTECTIONS]
CODE = CODES[3]
LENGTHS = (1, 4096, GRANULE_BYTES, GRANULE_BYTES + 1, 2 * GRANULE_BYTES, 200_000, 300_000, 700_001)


def shards_of(code: ErasureCode, chunk: bytes) -> dict[int, bytes]:
    size = code.shard_bytes(len(chunk))
    parity = [bytearray(size) for _ in range(code.parity)]
    code.encode(chunk, parity)
    shards = {n: chunk[n * size : (n + 1) * size] for n in range(code.data_shards(len(chunk)))}
    return {**shards, **{code.data + p: bytes(memory) for p, memory in enumerate(parity)}}


def solved(code: ErasureCode, chunk: ChunkId, shards: dict[int, bytes]) -> dict[int, bytes] | None:
    """Return all shards of the chunk that these make, and check that none was called wrong."""
    readings = readings_of(code, {number: len(payload) for number, payload in shards.items()})
    found = solve(code, chunk, readings, list(shards.items()))
    if found is None:
        return None
    assert found.wrong == []
    return {number: bytes(found.shard(number)) for number in code.shards(found.length)}


@pytest.mark.parametrize("code", CODES, ids=lambda code: f"{code.data}+{code.parity}")
@pytest.mark.parametrize("kind", ChunkKind)
def test_any_shards_that_are_enough_make_the_chunk(code: ErasureCode, kind: ChunkKind) -> None:
    drawn = random.Random(5)
    for length in LENGTHS:
        payload = drawn.randbytes(length)
        chunk, shards = chunk_id_of(kind, payload), shards_of(code, payload)
        choices = list(combinations(shards, code.data_shards(length)))
        for kept in drawn.sample(choices, min(8, len(choices))):
            assert solved(code, chunk, {number: shards[number] for number in kept}) == shards, (length, kept)


@pytest.mark.parametrize("zeros", [1, 100, GRANULE_BYTES - 1, GRANULE_BYTES, GRANULE_BYTES + 1])
def test_a_length_that_is_lost_is_found_also_when_the_chunk_ends_in_zeros(zeros: int) -> None:
    for length in (GRANULE_BYTES, 2 * GRANULE_BYTES, 200_000, 300_000):
        payload = random.Random(6).randbytes(max(1, length - zeros)).ljust(length, b"\0")
        chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
        last = CODE.data_shards(length) - 1
        assert solved(CODE, chunk, {n: shards[n] for n in shards if n != last}) == shards


def test_a_shard_that_lies_is_found_while_there_are_more_than_are_needed() -> None:
    payload = random.Random(7).randbytes(300_000)
    chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
    readings = readings_of(CODE, {number: len(shard) for number, shard in shards.items()})
    for liars in [*combinations(shards, 1), *combinations(shards, 2)]:
        read = [(n, shards[n] if n not in liars else bytes(len(shards[n]))) for n in shards]
        found = solve(CODE, chunk, readings, read)
        assert found is not None, liars
        assert [read[index][0] for index in found.wrong] == list(liars)
        assert {n: bytes(found.shard(n)) for n in shards} == shards


def test_of_two_copies_the_wrong_one_is_named() -> None:
    payload = random.Random(8).randbytes(200_000)
    chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
    readings = readings_of(CODE, {number: len(shard) for number, shard in shards.items()})
    read = [(1, bytes(GRANULE_BYTES)), *((n, shards[n]) for n in (0, 1, 2, 3))]
    found = solve(CODE, chunk, readings, read)
    assert found is not None
    assert found.wrong == [0]


def test_shards_that_make_another_chunk_make_none() -> None:
    payload = random.Random(9).randbytes(300_000)
    shards = shards_of(CODE, payload)
    other = chunk_id_of(ChunkKind.DATA, payload[:-1] + b"!")
    assert solved(CODE, other, shards) is None
    del shards[2]
    assert solved(CODE, other, shards) is None
    manifest = ChunkId(b"\x02" + chunk_id_of(ChunkKind.DATA, payload)[1:])
    assert solved(CODE, manifest, shards) is None, "a manifest has another hash"


def test_a_lie_is_found_also_where_the_length_is_lost_and_only_just_enough_shards_are_true() -> None:
    payload = random.Random(10).randbytes(300_000)
    chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
    del shards[2]
    readings = readings_of(CODE, {number: len(shard) for number, shard in shards.items()})
    assert [reading.data_shards for reading in readings] == [3, 4]
    for liar in shards:
        read = [(n, shards[n] if n != liar else bytes(len(shards[n]))) for n in shards]
        found = solve(CODE, chunk, readings, read)
        assert found is not None, liar
        assert (found.length, [read[index][0] for index in found.wrong]) == (len(payload), [liar])
