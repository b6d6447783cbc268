"""Chunks from some of their shards: found whatever is lost and whichever shards lie, and never a wrong one."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from engine.stripes.decode import Read, solve
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


def solved(code: ErasureCode, chunk: ChunkId, length: int, shards: dict[int, bytes]) -> dict[int, bytes] | None:
    """Return all shards of the chunk that these make, and check that none was called wrong."""
    found = solve(code, chunk, [Read(number, length, payload) for number, payload in shards.items()])
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
            assert solved(code, chunk, length, {number: shards[number] for number in kept}) == shards, (length, kept)


@pytest.mark.parametrize("length", [5000, 300_000])
@pytest.mark.parametrize("said", [0, -1, 1, 299_999, 300_001, 262_144, 1 << 22, 1 << 40])
def test_the_length_that_the_hash_proves_is_found_though_m_shards_say_another(length: int, said: int) -> None:
    payload = random.Random(6).randbytes(length - 900).ljust(length, b"\0")
    chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
    for liars in [*combinations(shards, 1), *combinations(shards, 2)]:
        read = [Read(n, said if n in liars else len(payload), shards[n]) for n in shards]
        found = solve(CODE, chunk, read)
        assert found is not None, liars
        assert (found.length, [read[index].number for index in found.wrong]) == (len(payload), list(liars))
        assert {n: bytes(found.shard(n)) for n in shards} == shards


def test_a_shard_that_lies_is_found_while_there_are_more_than_are_needed() -> None:
    payload = random.Random(7).randbytes(300_000)
    chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
    for liars in [*combinations(shards, 1), *combinations(shards, 2)]:
        read = [Read(n, len(payload), shards[n] if n not in liars else bytes(len(shards[n]))) for n in shards]
        found = solve(CODE, chunk, read)
        assert found is not None, liars
        assert [read[index][0] for index in found.wrong] == list(liars)
        assert {n: bytes(found.shard(n)) for n in shards} == shards


def test_of_two_copies_the_wrong_one_is_named() -> None:
    payload = random.Random(8).randbytes(200_000)
    chunk, shards = chunk_id_of(ChunkKind.DATA, payload), shards_of(CODE, payload)
    read = [Read(1, len(payload), bytes(GRANULE_BYTES)), *(Read(n, len(payload), shards[n]) for n in (0, 1, 2, 3))]
    found = solve(CODE, chunk, read)
    assert found is not None
    assert found.wrong == [0]


def test_shards_that_make_another_chunk_make_none() -> None:
    payload = random.Random(9).randbytes(300_000)
    shards = shards_of(CODE, payload)
    other = chunk_id_of(ChunkKind.DATA, payload[:-1] + b"!")
    assert solved(CODE, other, len(payload), shards) is None
    del shards[2]
    assert solved(CODE, other, len(payload), shards) is None
    manifest = ChunkId(b"\x02" + chunk_id_of(ChunkKind.DATA, payload)[1:])
    assert solved(CODE, manifest, len(payload), shards) is None, "a manifest has another hash"
