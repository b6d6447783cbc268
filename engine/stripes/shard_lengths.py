"""Lengths that a chunk may have, from the lengths of some of its shards.

The length of a chunk decides how many data shards it has and how long they are (`lakefs.cluster.erasure`).  Who sees
shards alone knows no lengths of chunks.  All but the last data shard have the same length s, so the longest of the
shards tells s, and s leaves an interval of lengths for each number of data shards: a `Reading`.  A shorter last data
shard leaves exactly one.

Several remain when the last data shard is among those that are missing, or when a chunk ends exactly where a shard
ends: three full data shards are a whole chunk of three, or one of four that lost its last.  Which reading is right
only the chunk's hash can tell (`engine.stripes.decode`).

No readings: no chunk has such shards.  Some of them are damaged, and nothing is guessed.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lakefs.cluster.erasure import ErasureCode
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES


class Length(NamedTuple):
    """A chunk's length; `is_certain` False: more of its data shards may exist, and be lost."""

    length: int
    is_certain: bool


class Reading(NamedTuple):
    """A possible number of data shards, with the chunk's lengths that give it, both ends included."""

    data_shards: int
    shortest: int
    longest: int

    @property
    def is_exact(self) -> bool:
        """True if one length is left."""
        return self.shortest == self.longest


def readings_of(code: ErasureCode, lengths: Mapping[int, int]) -> list[Reading]:
    """Return the readings that these shards' lengths (by number; at least one) leave, the fewest data shards first."""
    size = max(lengths.values())
    for number, length in lengths.items():
        is_parity = code.data <= number < code.data + code.parity
        if (is_parity and length != size) or not (is_parity or 0 <= number < code.data):
            return []
    numbers = [number for number in lengths if number < code.data]
    last = max(numbers, default=-1)
    if any(lengths[number] != size for number in numbers if number != last):
        return []
    fewest = last + 1 if last >= 0 else 1
    readings = [reading for count in range(fewest, code.data + 1) if (reading := _reading(code, size, count))]
    if last < 0:
        return readings
    return _with_last(readings, last, size, lengths[last])


def length_from(code: ErasureCode, lengths: Sequence[int]) -> Length | None:
    """Return the length, or a likely one, of a chunk whose shard i has `lengths[i]` bytes, 0 for one not found.

    None if these shards do not say it, or do not belong together.
    """
    found = {shard: length for shard, length in enumerate(lengths) if length}
    if not found or (len(found) == 1 and 0 < min(found) < code.data):  # alone, it may be a short last one
        return None
    readings = readings_of(code, found)
    if not readings:
        return None
    first, last = readings[0], readings[-1]
    return Length(first.longest if first.is_exact else last.longest, is_certain=first.is_exact and first is last)


def exact_reading(code: ErasureCode, length: int) -> Reading:
    """Return the reading of a chunk whose length is known."""
    return Reading(code.data_shards(length), length, length)


def _with_last(readings: list[Reading], last: int, size: int, length: int) -> list[Reading]:
    """Keep the readings that fit the last data shard that is present; it is the chunk's last if it is short."""
    kept: list[Reading] = []
    whole = last * size + length
    for reading in readings:
        if reading.data_shards == last + 1:
            if reading.shortest <= whole <= reading.longest:
                kept.append(Reading(last + 1, whole, whole))
        elif length == size:
            kept.append(reading)
    return kept


def _reading(code: ErasureCode, size: int, count: int) -> Reading | None:
    """Return the lengths of chunks with `count` data shards of `size` bytes; None if there are none."""
    if size % GRANULE_BYTES or code.data == 1:
        return Reading(1, size, size) if count == 1 and size <= CHUNK_BYTES else None
    row = code.data * GRANULE_BYTES
    granules = size // GRANULE_BYTES
    shortest = max((count - 1) * size + 1, (granules - 1) * row + 1, GRANULE_BYTES)
    longest = min(count * size, granules * row, CHUNK_BYTES)
    return Reading(count, shortest, longest) if shortest <= longest else None
