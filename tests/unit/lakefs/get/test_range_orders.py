"""Orders of a file's ranges: prefetch for a reader that follows one, none for others; and all of it is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hypothesis import assume, given, strategies as st

from lakefs.get.range_orders import MISSES_MAX, NEAR_BYTES, STEPS_MIN, Extent, OrderFollower, RangeTable
from lakefs.limits import GRANULE_BYTES, KIB, MIB, READ_AHEAD_WINDOW_BYTES_MAX, TABLE_RANGES_AHEAD_MAX

HEADER = 10 * KIB
FIRST = MIB
"""Offset of the first range: the reader of the header does not get there by reading on."""


def table_of(lengths: Sequence[int], *sequences: Sequence[int], gap: int = 0) -> RangeTable:
    """Return ranges of these lengths after a header, in the order of the file, so far apart."""
    begins = accumulate((length + gap for length in lengths[:-1]), initial=FIRST)
    return RangeTable(list(zip(begins, lengths, strict=True)), sequences)


def holds(extents: Sequence[Extent], offset: int) -> bool:
    """Return whether one of the extents has that byte."""
    return any(begin <= offset < begin + length for begin, length in extents)


def read(follower: OrderFollower, begin: int, end: int, block: int, told: list[Extent]) -> list[Extent]:
    """Read a stretch in blocks; return the extents announced during that."""
    new: list[Extent] = []
    for offset in range(begin, end, block):
        new += follower.after(offset, min(block, end - offset)) or []
    told += new
    return new


def shuffled(count: int, seed: int = 1) -> list[int]:
    """Return a permutation that is not the file's order."""
    sequence = list(range(count))
    random.Random(seed).shuffle(sequence)
    return sequence


tables = st.lists(
    st.one_of(st.integers(65 * KIB, 300 * KIB), st.integers(MIB, 12 * MIB)), min_size=3, max_size=20
).flatmap(lambda lengths: st.tuples(st.just(lengths), st.permutations(range(len(lengths)))))


@given(tables, st.sampled_from([64 * KIB, MIB, 16 * MIB]), st.sampled_from([0, 4 * KIB, 3 * MIB]))
def test_who_follows_an_order_finds_each_range_told_before_it_comes_there(
    drawn: tuple[list[int], list[int]], block: int, gap: int
) -> None:
    lengths, sequence = drawn
    table = table_of(lengths, sequence, gap=gap)
    assume(table.orders)
    follower = OrderFollower(table)
    told: list[Extent] = []
    read(follower, 0, HEADER, block, told)
    steps = 0
    before: int | None = None
    for number in sequence:
        begin, end = table.begins[number], table.ends[number]
        if before is not None and not 0 <= begin - table.ends[before] <= GRANULE_BYTES:
            assert steps < STEPS_MIN or holds(told, begin)
            steps += 1
        new = read(follower, begin, end, block, told)
        assert sum(length for _, length in new) <= end - begin + 2 * READ_AHEAD_WINDOW_BYTES_MAX
        before = number
    for begin, length in told:
        assert sum(max(0, min(e, begin + length) - max(b, begin)) for b, e in _ranges(table)) == length


def _ranges(table: RangeTable) -> Iterator[tuple[int, int]]:
    return zip(table.begins, table.ends, strict=True)


@given(tables, st.lists(st.tuples(st.integers(0, 200 * MIB), st.integers(0, 4 * MIB)), max_size=60))
def test_reads_of_anything_are_told_ranges_or_nothing(
    drawn: tuple[list[int], list[int]], reads: list[tuple[int, int]]
) -> None:
    lengths, sequence = drawn
    table = table_of(lengths, sequence, list(reversed(sequence)))
    follower = OrderFollower(table)
    for offset, length in reads:
        for begin, count in follower.after(offset, length) or []:
            assert table.begins[0] <= begin
            assert 0 < count <= table.ends[-1] - begin


def test_who_takes_ranges_at_random_is_hardly_ever_followed() -> None:
    lengths = [4 * MIB] * 200
    told_bytes = 0
    for seed in range(20):
        table = table_of(lengths, shuffled(200, 100), shuffled(200, 101), gap=MIB)
        follower = OrderFollower(table)
        told: list[Extent] = []
        for number in shuffled(200, seed):
            read(follower, table.begins[number], table.ends[number], MIB, told)
        told_bytes += sum(length for _, length in told)
    assert told_bytes < 20 * 200 * 4 * MIB / 50


def test_guesses_that_miss_end() -> None:
    sequence = shuffled(200)
    table = table_of([4 * MIB] * 200, sequence, gap=MIB)
    follower = OrderFollower(table)
    told: list[list[Extent]] = []
    for rank in range(0, 200, 20):  # follow the order for five ranges, then jump
        told.append([])
        for number in sequence[rank : rank + 5]:
            read(follower, table.begins[number], table.ends[number], MIB, told[-1])
    assert all(told[:MISSES_MAX])
    assert not any(told[MISSES_MAX:])
    assert sum(length for extents in told for _, length in extents) <= MISSES_MAX * 2 * READ_AHEAD_WINDOW_BYTES_MAX


def test_who_goes_on_in_the_file_is_not_taken_for_one_who_follows_the_order() -> None:
    sequence = [5, 9, 1, 7, 3, 0, 2, 4, 6, 8]
    table = table_of([30 * MIB] * 10, sequence)
    follower = OrderFollower(table)
    told: list[Extent] = []
    for number in sequence[:3]:
        read(follower, table.begins[number], table.ends[number], MIB, told)
    assert holds(told, table.begins[7])
    end = table.ends[1]
    read(follower, end, end + NEAR_BYTES, MIB, told)
    assert follower.after(end + NEAR_BYTES, MIB) is None


def test_of_two_orders_the_one_that_was_followed_longer_is_taken() -> None:
    first, second = [0, 4, 2, 6, 1, 5, 3, 7], [0, 4, 2, 7, 5, 3, 1, 6]
    table = table_of([4 * MIB] * 8, first, second, gap=MIB)
    follower = OrderFollower(table)
    told: list[Extent] = []
    for step, number in enumerate(second):
        assert step < 4 or holds(told, table.begins[number])
        read(follower, table.begins[number], table.ends[number], MIB, told)


def test_an_order_is_seen_of_a_reader_whose_buffer_reads_on_behind_each_range() -> None:
    sequence = shuffled(40)
    table = table_of([8 * MIB + 512] * 40, sequence)
    follower = OrderFollower(table)
    told: list[Extent] = []
    for step, number in enumerate(sequence):
        begin, end = table.begins[number], table.ends[number]
        assert step <= STEPS_MIN + 1 or holds(told, begin)
        read(follower, begin, end + MIB, MIB, told)


def test_ranges_that_a_buffer_had_are_left_out_and_the_order_goes_on() -> None:
    sequence = shuffled(60)
    lengths = [4 * MIB if number % 3 else 2 * KIB for number in range(60)]
    table = table_of(lengths, sequence, gap=MIB)
    follower = OrderFollower(table)
    told: list[Extent] = []
    seen = [number for number in sequence if lengths[number] > MIB]
    for step, number in enumerate(seen):
        assert step <= STEPS_MIN or holds(told, table.begins[number])
        read(follower, table.begins[number], table.ends[number], MIB, told)


def test_the_order_of_the_file_is_no_order_of_its_own() -> None:
    assert not table_of([1, 2, 3], [0, 1, 2]).orders
    assert len(table_of([1, 2, 3], [0, 2, 1], [0, 1, 2], [0, 2, 1]).orders) == 1


def test_a_line_of_tiny_ranges_is_told_in_bounded_steps() -> None:
    count = 2000
    table = table_of([100] * count, list(reversed(range(count))))
    [order] = table.orders
    extents = table.on_line(order, 0, MIB)
    assert len(extents) == TABLE_RANGES_AHEAD_MAX
    assert extents[0] == (table.begins[-1], 100)
