"""Lengths of chunks from lengths of shards: the true one is always among the readings, and odd ones have none."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from engine.stripes.shard_lengths import Reading, readings_of
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.protection import PROTECTIONS
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES

CODES = [ErasureCode(protection.data, protection.parity) for protection in PROTECTIONS]
EDGES = [1, 2, GRANULE_BYTES, CHUNK_BYTES, *(GRANULE_BYTES * n for n in range(1, 17))]
LENGTHS = sorted({length + near for length in EDGES for near in (-1, 0, 1) if 0 < length + near <= CHUNK_BYTES})


def shards_of(code: ErasureCode, length: int) -> dict[int, int]:
    return {number: code.part_bytes(length, number) for number in code.shards(length)}


@pytest.mark.parametrize("code", CODES, ids=lambda code: f"{code.data}+{code.parity}")
def test_the_true_length_is_among_the_readings_whatever_is_lost(code: ErasureCode) -> None:
    drawn = random.Random(1)
    for length in [*LENGTHS, *(drawn.randint(1, CHUNK_BYTES) for _ in range(20))]:
        shards = shards_of(code, length)
        for count in range(code.data_shards(length), len(shards) + 1):
            for kept in list(combinations(shards, count))[:20]:
                readings = readings_of(code, {number: shards[number] for number in kept})
                true = [r for r in readings if r.shortest <= length <= r.longest]
                assert [r.data_shards for r in true] == [code.data_shards(length)], (length, kept)
                assert readings == sorted(readings)
                for reading in readings:
                    for possible in (reading.shortest, reading.longest):
                        assert code.shard_bytes(possible) == code.shard_bytes(length)
                        assert code.data_shards(possible) == reading.data_shards


@pytest.mark.parametrize("code", CODES, ids=lambda code: f"{code.data}+{code.parity}")
def test_all_shards_leave_one_reading_unless_the_chunk_ends_where_a_shard_ends(code: ErasureCode) -> None:
    for length in LENGTHS:
        readings = readings_of(code, shards_of(code, length))
        assert readings[0] == Reading(code.data_shards(length), length, length)
        if length % code.shard_bytes(length) or code.data_shards(length) == code.data:
            assert len(readings) == 1, length


def test_lengths_that_no_chunk_has_are_not_guessed_at() -> None:
    code = ErasureCode(4, 2)
    whole = shards_of(code, 300_000)
    for number in whole:
        for wrong in (1, whole[number] + 1, whole[number] + GRANULE_BYTES):
            if number == 2 and wrong <= whole[0]:
                continue  # another length of the last data shard is another chunk's
            assert readings_of(code, {**whole, number: wrong}) == [], (number, wrong)
    assert readings_of(code, {**whole, 6: whole[0]}) == []
    assert readings_of(code, {0: 1000, 1: 1000, 4: 1000}) == []
    assert readings_of(code, {0: 8 << 20}) == []
