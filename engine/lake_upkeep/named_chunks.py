"""The chunks that names refer to, as short as can be: to tell which listed shards are garbage.

A chunk is 8 bytes of its digest.  Two chunks that share them are as likely as one in 10^7 among a million, and then a
piece of garbage is not counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from lakefs.ids import ChunkId, Partition
from lakefs.limits import PARTITION_BITS

NAMED_CHUNKS_MAX: Final = 1 << 24
"""128 MiB.  A lake with more, which is 64 TiB of full chunks, has its garbage not counted."""
_BUCKET_BITS: Final = PARTITION_BITS
_NUMBER_SHIFT: Final = 64 - _BUCKET_BITS


class NamedChunks:
    """A set of chunks; asked for in the order of digests, it is as fast as a set."""

    def __init__(self) -> None:
        self._buckets: list[array[int]] = [array("Q") for _ in range(1 << _BUCKET_BITS)]
        self._count = 0

    @property
    def is_complete(self) -> bool:
        """False if there were too many, so that some are missing."""
        return self._count <= NAMED_CHUNKS_MAX

    def add(self, chunks: Sequence[ChunkId]) -> None:
        """Add chunks; one that is added twice takes room twice."""
        self._count += len(chunks)
        if self.is_complete:
            for chunk in chunks:
                self._buckets[_bucket_of(chunk)].append(int.from_bytes(chunk[1:9], "big"))

    def add_numbers(self, numbers: array[int]) -> None:
        """Add chunks by the first 8 bytes of their digests, as numbers, ascending."""
        self._count += len(numbers)
        if self.is_complete:
            for number in numbers:
                self._buckets[number >> _NUMBER_SHIFT].append(number)

    def leave_incomplete(self) -> None:
        """Note that some chunks are missing."""
        self._count = NAMED_CHUNKS_MAX + 1

    def add_all(self, other: NamedChunks) -> None:
        """Add the chunks of another set."""
        self._count += other._count
        if self.is_complete:
            for bucket, more in zip(self._buckets, other._buckets, strict=True):
                bucket.extend(more)

    def page(self, after: int, limit: int) -> array[int]:
        """Return the lowest `limit` chunks above a number, as `add_numbers` takes them; fewer at the end."""
        found = array("Q")
        for bucket in range(min(max(after, 0) >> _NUMBER_SHIFT, len(self._buckets)), len(self._buckets)):
            wanted = sorted({number for number in self._buckets[bucket] if number > after})
            found.extend(wanted[: limit - len(found)])
            if len(found) == limit:
                break
        return found

    def absent(self, chunks: Sequence[bytes]) -> list[bool]:
        """Return for each chunk if it is not in the set; chunks are in the order of their digests."""
        found: list[bool] = []
        number, bucket = -1, set[int]()
        for chunk in chunks:
            wanted = _bucket_of(chunk)
            if wanted != number:
                number, bucket = wanted, set(self._buckets[wanted])
            found.append(int.from_bytes(chunk[1:9], "big") not in bucket)
        return found

    def partitions(self, partition_bits: int) -> list[Partition]:
        """Return the partitions in which a chunk of the set lies; all if the set is not complete."""
        split = partition_bits - _BUCKET_BITS
        assert split >= 0, "a table has at least as many partitions"
        used = [number for number, bucket in enumerate(self._buckets) if bucket or not self.is_complete]
        return [Partition(number << split | low) for number in used for low in range(1 << split)]


def _bucket_of(chunk: bytes) -> int:
    return (chunk[1] << 8 | chunk[2]) >> 16 - _BUCKET_BITS
