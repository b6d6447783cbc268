"""How long operations took, in a fixed number of buckets whatever their number: the layout of HdrHistogram.

Values are whole nanoseconds.  Below `_LINEAR` each has a bucket of its own; above, every doubling is cut into `_HALF`
buckets of one width, so that a bucket is at most 1/128 of its values wide: a percentile is right to 0.8%.  A value
beyond an hour counts as an hour.  Nothing here is locked: one thread records, or each has a histogram and they are
added up.

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
    """Counts of durations.  At most `_BUCKETS` counters, 5 thousand, however many values are recorded."""

    __slots__ = ("_counts", "count", "highest_ns")

    def __init__(self) -> None:
        self.count = 0
        """Values that were recorded."""
        self.highest_ns = 0
        """The largest of them, exactly."""
        self._counts = [0] * _BUCKETS

    @classmethod
    def of_seconds(cls, values_s: Iterable[float]) -> Histogram:
        """Of durations in seconds."""
        made = cls()
        for value_s in values_s:
            made.record(int(value_s * 1e9))
        return made

    def record(self, value_ns: int, times: int = 1) -> None:
        """Count a duration, in ns; a negative one counts as none."""
        value_ns = min(max(0, value_ns), HISTOGRAM_MAX_NS)
        self._counts[_bucket(value_ns)] += times
        self.count += times
        self.highest_ns = max(self.highest_ns, value_ns)

    def add(self, other: Histogram) -> None:
        """Count all that another has counted."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.highest_ns = max(self.highest_ns, other.highest_ns)

    def percentile_ns(self, share: float) -> int:
        """The duration that `share` (0 to 1) of all values do not exceed, right to 0.8%; ValueError for no values.

        The highest value of the bucket, as HdrHistogram has it: never less than what was measured.
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
        """(smallest value of the bucket in ns, count) of each bucket that is not empty, rising."""
        return ((_lowest(bucket), count) for bucket, count in enumerate(self._counts) if count)
