"""A set of ranges behaves like a set of bytes."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from fuse.staging.byte_ranges import RangeSet
from tests.lengths import repeated

PLACES = st.integers(0, 40)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PLACES, PLACES),
        st.tuples(st.just("remove"), PLACES, PLACES),
        st.tuples(st.just("cut"), PLACES, PLACES),
    ),
    max_size=20,
)


def runs(places: set[int]) -> list[tuple[int, int]]:
    """Return the ranges of a set of places."""
    begins = sorted(place for place in places if place - 1 not in places)
    ends = sorted(place + 1 for place in places if place + 1 not in places)
    return list(zip(begins, ends, strict=True))


@settings(max_examples=repeated(300, 1000))
@given(CHANGES, PLACES, PLACES)
def test_ranges_are_what_a_set_of_bytes_is(changes: list[tuple[str, int, int]], begin: int, end: int) -> None:
    ranges, model = RangeSet(), set[int]()
    for change, first, second in changes:
        if change == "add":
            added, more = ranges.bytes_added(first, second), ranges.ranges_added(first, second)
            before = (ranges.byte_count, len(ranges))
            ranges.add(first, second)
            model |= set(range(first, second))
            assert (ranges.byte_count, len(ranges)) == (before[0] + added, before[1] + more)
        elif change == "remove":
            ranges.remove(first, second)
            model -= set(range(first, second))
        else:
            below = ranges.end_below(first)
            ranges.cut(first)
            assert ranges.end == below
            model = {place for place in model if place < first}
        assert list(ranges) == runs(model)
        assert len(ranges) == len(runs(model))
        assert ranges.byte_count == len(model)
    asked = set(range(begin, end))
    assert list(ranges.within(begin, end)) == runs(asked & model)
    assert list(ranges.gaps(begin, end)) == runs(asked - model)
    assert ranges.contains(begin, end) == (asked <= model)
    assert ranges.overlaps(begin, end) == bool(asked & model)
    assert ranges.end == max(model, default=-1) + 1
    assert ranges.last_begin == (runs(model)[-1][0] if model else 0)
    assert RangeSet(ranges) == ranges
    copy = ranges.copy()
    assert (copy, copy.byte_count) == (ranges, len(model))
    ranges.clear()
    assert copy == RangeSet(runs(model))
    assert ranges == RangeSet()
    assert ranges.byte_count == 0
