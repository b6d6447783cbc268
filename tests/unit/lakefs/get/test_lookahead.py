"""Guesses about a reader's next reads: on from where it was, or by a table that is asked for once, when it may help."""

from __future__ import annotations

from lakefs.get.lookahead import Lookahead
from lakefs.get.range_orders import RangeTable
from lakefs.limits import KIB, MIB, TABLE_OBJECT_BYTES_MIN

SIZE = 256 * MIB
TENSORS = 20
TENSOR = 8 * MIB


def table() -> RangeTable:
    """Return ranges of 8 MiB after a first MiB, and their order backwards."""
    extents = [(MIB + number * TENSOR, TENSOR) for number in range(TENSORS)]
    return RangeTable(extents, [list(reversed(range(TENSORS)))])


def test_a_table_is_wanted_by_who_began_at_the_first_byte_and_jumped() -> None:
    ahead = Lookahead(SIZE)
    for offset, length in ((0, 8), (8, 64 * KIB), (9 + 64 * KIB, MIB)):
        ahead.after(offset, length)
        assert not ahead.wants_table
    ahead.after(100 * MIB, MIB)
    assert ahead.wants_table
    ahead.learn(None)
    ahead.after(0, 8)
    ahead.after(50 * MIB, MIB)
    assert not ahead.wants_table


def test_no_table_is_wanted_of_what_is_short_or_was_not_begun_with() -> None:
    short, inside = Lookahead(TABLE_OBJECT_BYTES_MIN - 1), Lookahead(SIZE)
    for offset in (0, 8 * MIB, 4 * MIB):
        short.after(offset, 100)
        inside.after(offset + 1, 100)
        assert not short.wants_table
        assert not inside.wants_table


def test_a_reader_in_order_is_preceded_as_without_a_table() -> None:
    plain, knowing = Lookahead(SIZE), Lookahead(SIZE)
    knowing.learn(table())
    for offset in range(0, 100 * MIB, MIB):
        assert plain.after(offset, MIB) == knowing.after(offset, MIB)


def test_a_reader_of_the_table_is_preceded_in_it_and_in_order_once_it_leaves_it() -> None:
    ahead = Lookahead(SIZE)
    ahead.after(0, 100)
    ahead.after(MIB + 19 * TENSOR, TENSOR)
    ahead.learn(table())
    told = [ahead.after(MIB + number * TENSOR, TENSOR) for number in (18, 17, 16)]
    assert not told[0]
    assert told[1] == [(MIB + 16 * TENSOR, 4 * MIB)]
    ahead.after(MIB + 2 * TENSOR, MIB)
    assert ahead.after(2 * MIB + 2 * TENSOR, MIB) == [(3 * MIB + 2 * TENSOR, 4 * MIB)]


def test_what_is_read_behind_the_end_or_before_the_begin_is_no_reason_for_anything() -> None:
    ahead = Lookahead(SIZE)
    for offset, length in ((SIZE + 5, 10), (-1, 4), (SIZE - 1, 100), (SIZE, 0)):
        assert not ahead.after(offset, length)
