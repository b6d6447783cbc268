"""Histogram of durations, with a fixed number of buckets however many are recorded: the layout of HdrHistogram.

Values are whole nanoseconds.  Below `_LINEAR` each value has its own bucket.  Above, every doubling is cut into
`_HALF` buckets of equal width, so a bucket is at most 1/128 of its values wide, and a percentile is right to 0.8%.  A
value beyond an hour counts as an hour.  Nothing here is locked: one thread records, or each thread has its own
histogram and the histograms are added.

Source: Gil Tene, HdrHistogram, "Configuration Parameters" (the sub-bucket scheme).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from lakefs.limits import HISTOGRAM_MAX_NS, HISTOGRAM_PRECISION_BITS

_HALF_BITS: Final = HISTOGRAM_PRECISION_BITS
_HALF: Final = 1 << _HALF_BITS
_LINEAR: Final = 2 * _HALF


def _bucket(value_ns: int) -> int:
    """The bucket of a value; the inverse of `_lowest`."""
    shift = max(0, value_ns.bit_length() - _HALF_BITS - 1)
    return (shift << _HALF_BITS) + (value_ns >> shift)


def _lowest(bucket: int) -> int:
    """The smallest value of a bucket, in ns."""
    shift = max(0, (bucket >> _HALF_BITS) - 1)
    return (bucket - (shift << _HALF_BITS)) << shift


_BUCKETS: Final = _bucket(HISTOGRAM_MAX_NS) + 1


class Histogram:
    """Counts of durations.  At most `_BUCKETS` counters (about 5,000), however many values are recorded."""

    __slots__ = ("_counts", "count", "highest_ns")

    def __init__(self) -> None:
        self.count = 0
        """Number of recorded values."""
        self.highest_ns = 0
        """Largest recorded value, exact."""
        self._counts = [0] * _BUCKETS

    @classmethod
    def of_seconds(cls, values_s: Iterable[float]) -> Histogram:
        """Return a histogram of durations given in seconds."""
        made = cls()
        for value_s in values_s:
            made.record(int(value_s * 1e9))
        return made

    def record(self, value_ns: int, times: int = 1) -> None:
        """Count a duration, in ns, `times` times; a negative one counts as 0."""
        value_ns = min(max(0, value_ns), HISTOGRAM_MAX_NS)
        self._counts[_bucket(value_ns)] += times
        self.count += times
        self.highest_ns = max(self.highest_ns, value_ns)

    def add(self, other: Histogram) -> None:
        """Add all counts of another histogram to this one."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.highest_ns = max(self.highest_ns, other.highest_ns)

    def percentile_ns(self, share: float) -> int:
        """Return the duration that `share` (0 to 1) of all values do not exceed, right to 0.8%; ValueError for no
        values.

        The result is the highest value of its bucket, as in HdrHistogram: never less than the measured value.
        """
        if not self.count:
            raise ValueError("no values were recorded")
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return min(self.highest_ns, _lowest(bucket + 1) - 1)
        raise AssertionError("counts do not add up")

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield (smallest value of the bucket in ns, count) of each bucket that is not empty, in ascending order."""
        return ((_lowest(bucket), count) for bucket, count in enumerate(self._counts) if count)
