"""The pure parts of stripes: places of shards, lengths from shards, when an answer is late."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from engine.stripes.answer_times import AnswerTimes
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.said_lengths import lengths_said
from engine.stripes.stripe_layout import is_at_home, is_stored, placed
from engine.stripes.stripe_shards import PORTION_BYTES, portions
from lakefs.ids import MemberId, data_chunk_id
from lakefs.limits import HEDGE_S_MAX, HEDGE_S_MIN, KIB, MIB
from tests.unit.engine.cluster.stripe_rig import id_of, new, payload_of, table_of
from tests.unit.lakefs.cluster.chunks_cut import CODES, boundaries

CODE = CODES["4+2"]
LAKES = (("4+2", 6), ("4+2", 9), ("4+2", 3), ("4+2", 4), ("2+1", 3), ("2+1", 6), ("1+1", 2), ("1+1", 4), ("8+2", 12))


@settings(max_examples=150)
@given(st.sampled_from(LAKES), st.integers(0, 4095), st.integers(1, 8), st.sets(st.integers(0, 11), max_size=4))
def test_placed_shards_keep_the_rules(lake: tuple[str, int], seed: int, data_shards: int, away: set[int]) -> None:
    table = table_of(*lake)
    k, m = table.protection.data, table.protection.parity
    chunk = data_chunk_id(payload_of(20, seed))
    shards = [*range(min(data_shards, k)), *range(k, k + m)]
    gone = {id_of(number) for number in away}
    where = placed(table, chunk, {}, shards, lambda member, _: member not in gone)
    homes = table.homes(chunk)
    assert not gone & {*where.values()}
    assert all(where[shard] == homes[shard] for shard in shards if homes[shard] not in gone)
    strays = {member for shard, member in where.items() if member != homes[shard]}
    counts = Counter(where.values())
    assert all(counts[member] <= m for member in strays)
    usable = [member.id for member in table.members if member.id in {*homes, *table.substitutes(chunk)} - gone]
    if len(where) < len(shards):
        assert all(counts[member] >= m for member in usable), "no place is left"
    again = placed(table, chunk, where, [s for s in shards if s not in where], lambda member, _: member not in gone)
    assert again == {}
    if is_stored(where, min(data_shards, k), len(shards)) and len(homes) == len({*homes}):
        for lost in usable:
            assert sum(member != lost for member in where.values()) >= min(data_shards, k)
    assert is_at_home(table, chunk, where, len(shards)) == all(where.get(shard) == homes[shard] for shard in shards)


def test_fewer_shards_count_as_stored_only_if_enough_stay_whichever_member_goes() -> None:
    a, b, c, d, e = (id_of(number) for number in range(5))
    assert is_stored({0: a, 1: b, 2: c, 3: d, 4: e}, 4, 6)
    assert not is_stored({0: a, 1: a, 2: c, 3: d, 4: e}, 4, 6)
    assert is_stored({0: a, 1: a, 2: b, 3: b, 4: c, 5: c}, 4, 6)
    assert is_stored({0: a, 4: b}, 1, 3)
    assert not is_stored({0: a, 4: a}, 1, 3)
    assert not is_stored({}, 1, 3)


def test_the_length_that_most_members_say_comes_first_and_impossible_ones_are_left_out() -> None:
    assert lengths_said([5, 7, 7, 0, -1, (4 << 20) + 1, 9, 5, 7]) == [7, 5, 9]
    assert lengths_said([0, -3]) == []


@pytest.mark.parametrize("name", CODES)
def test_sizes_of_shards_are_those_of_the_parts_of_the_chunk(name: str) -> None:
    code = CODES[name]
    for length in boundaries(code.data):
        sizes = code.sizes(length)
        assert sizes == {shard: code.part_bytes(length, shard) for shard in code.shards(length)}
        assert sum(sizes.values()) == code.stored_bytes(length)


def test_an_answer_is_late_after_the_p95_within_bounds() -> None:
    times = AnswerTimes()
    slow, fast = MemberId(b"s" * 16), MemberId(b"f" * 16)
    assert HEDGE_S_MIN < times.late_after_s(slow) < HEDGE_S_MAX
    for number in range(100):
        times.note(slow, 9.0 if number % 20 == 0 else 0.1)
        times.note(fast, 0.0001)
    assert times.late_after_s(slow) == 0.1
    assert times.late_after_s(fast) == HEDGE_S_MIN
    for _ in range(3):
        times.note(slow, 9.0)
    assert times.late_after_s(slow) == HEDGE_S_MAX


def test_chunks_are_stored_in_portions_whose_parity_finds_room() -> None:
    chunks = [new(bytes(size)) for size in (4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 4 * KIB, 65_537)]
    cut = portions(CODE, chunks)
    assert [new for portion in cut for new in portion] == chunks
    for portion in cut:
        assert sum(CODE.stored_bytes(len(chunk.payload)) for chunk in portion) <= PORTION_BYTES
    assert len(cut) == 2


def test_the_chunks_that_were_noted_last_are_known() -> None:
    known = KnownChunks(2)
    ids = [data_chunk_id(bytes([number])) for number in range(3)]
    for chunk in (ids[0], ids[1], ids[0], ids[2]):
        known.note(chunk, 1, b"crcs")
    assert [known.get(chunk) is not None for chunk in ids] == [True, False, True]


def test_a_member_is_wrong_about_a_chunk_until_it_is_asked_again_or_the_chunk_is_forgotten() -> None:
    known, member = KnownChunks(1), id_of(1)
    first, second = map(data_chunk_id, (b"1", b"2"))
    known.note(first, 1, b"")
    known.note_wrong(first, {(member, 2)})
    assert known.is_wrong(first, member, 2)
    assert not known.is_wrong(first, member, 1)
    known.note_wrong(first, set())
    assert not known.is_wrong(first, member, 2)
    known.note_wrong(first, {(member, 2)})
    known.note(second, 1, b"")
    assert not known.is_wrong(first, member, 2)
