"""A histogram counts every duration, gives percentiles to 0.8%, and never grows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from lakefs.histogram import Histogram
from lakefs.limits import HISTOGRAM_MAX_NS

DURATIONS = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)


@given(DURATIONS, st.floats(0, 1))
def test_a_percentile_is_that_of_the_sorted_values_to_a_bucket(values: list[int], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert exact <= histogram.percentile_ns(share) <= exact * (1 + 1 / 128) + 1


@given(DURATIONS, DURATIONS)
def test_two_added_up_are_as_one_that_recorded_all(first: list[int], second: list[int]) -> None:
    both, one, other = Histogram(), Histogram(), Histogram()
    for values, into in ((first, one), (second, other)):
        for value in values:
            into.record(value)
            both.record(value)
    one.add(other)
    assert list(one.buckets()) == list(both.buckets())
    assert (one.count, one.highest_ns) == (both.count, both.highest_ns)


def test_what_takes_longer_than_the_longest_counts_as_that_and_what_takes_less_than_nothing_as_none() -> None:
    histogram = Histogram.of_seconds([1e9, -1.0])
    assert histogram.percentile_ns(1) == HISTOGRAM_MAX_NS
    assert histogram.percentile_ns(0) == 0


def test_without_values_there_is_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        Histogram().percentile_ns(0.5)
