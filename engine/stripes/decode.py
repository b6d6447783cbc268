"""A chunk from some of its shards, proven by its hash: the only source of what is stored anew.

Nothing proves a shard by itself: its member compares it with checksums that somebody sent.  A shard made from wrong
ones would be stored with right checksums, and the damage would spread.  So a chunk is decoded whole, and shards are
made from it only if its BLAKE3 is its id.  That costs 0.6 ms for 4 MiB, and less than to read the shards.

`solve` finds, in this order:
- the length, if several are possible: for each number of data shards the longest first, then the shortest that holds
  all bytes that are not zero, then longer ones by a zero each.  They differ in zeros at the end only, because a code
  counts what a data shard does not have as zeros.
- the shards that lie, if there are more than are needed: each choice of as many as are needed is tried, until one
  makes the chunk; every other shard is then compared with the true one.

Pure; blocks for milliseconds, so it runs in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product
from typing import Any, Final

import blake3

from engine.stripes.shard_lengths import Reading
from lakefs.cluster.erasure import ErasureCode
from lakefs.content.verify import granule_crcs
from lakefs.ids import DIGEST_BYTES, MANIFEST_CONTEXT, Buffer, ChunkId, ChunkKind, kind_of

CHOICES_MAX: Final = 128
"""Choices of shards that are tried.  8 of 10: 45; 4 of 6, with both copies of two of them: 60."""


@dataclass
class Solved:
    """A chunk that matches its id.  `made` are shards that were decoded; `wrong` are indexes of the read ones that lie.

    All shards of the chunk can be had from it, as long as the memory of what was read is.
    """

    code: ErasureCode
    length: int
    present: dict[int, Buffer]
    wrong: list[int] = field(default_factory=list)
    _crcs: dict[int, bytes] = field(default_factory=dict)

    def shard(self, number: int) -> Buffer:
        """Return the bytes of a shard that exists."""
        found = self.present.get(number)
        if found is None:
            assert number >= self.code.data, "data shards are all here"
            made = bytearray(self.code.part_bytes(self.length, number))
            self.code.rebuild(self.length, self.present, {number: made})
            found = self.present[number] = made
        return found

    def crcs(self, number: int) -> bytes:
        """Return the CRC32Cs of the granules of a shard."""
        found = self._crcs.get(number)
        if found is None:
            found = self._crcs[number] = granule_crcs(self.shard(number))
        return found


def solve(
    code: ErasureCode, chunk: ChunkId, readings: Sequence[Reading], read: Sequence[tuple[int, Buffer]]
) -> Solved | None:
    """Return the chunk that the shards make; None if no choice of them makes it.

    `read` has shards with their numbers; several with one number if copies differ.  Their lengths fit the readings.
    """
    for chosen in islice(_choices(readings, read), CHOICES_MAX):
        for reading in readings:
            solved = _solve_one(code, chunk, reading, chosen)
            if solved is not None:
                solved.wrong = _wrong_ones(solved, read)
                return solved
    return None


def _choices(readings: Sequence[Reading], read: Sequence[tuple[int, Buffer]]) -> Iterator[dict[int, Buffer]]:
    """Yield choices of shards, data first: as many as the most data shards need, then fewer."""
    variants: dict[int, list[Buffer]] = {}
    for number, payload in read:
        known = variants.setdefault(number, [])
        if not any(_are_equal(payload, other) for other in known):
            known.append(payload)
    numbers = sorted(variants)
    seen: set[int] = set()
    for reading in reversed(readings):
        count = min(reading.data_shards, len(numbers))
        if count in seen:
            continue
        seen.add(count)
        for some in combinations(numbers, count):
            for payloads in product(*(variants[number] for number in some)):
                yield dict(zip(some, payloads, strict=True))


def _solve_one(code: ErasureCode, chunk: ChunkId, reading: Reading, chosen: Mapping[int, Buffer]) -> Solved | None:
    """Return the chunk if these shards make it with that number of data shards."""
    count = reading.data_shards
    if len(chosen) < count or any(count <= number < code.data for number in chosen):
        return None
    if any(len(payload) != code.part_bytes(reading.longest, number) for number, payload in chosen.items()):
        return None
    made = {n: bytearray(code.part_bytes(reading.longest, n)) for n in range(count) if n not in chosen}
    if made:
        code.rebuild(reading.longest, chosen, made)
    parts = [made[n] if n in made else chosen[n] for n in range(count)]
    length = _length_of(chunk, [memoryview(part) for part in parts], reading)
    if not length:
        return None
    last = count - 1
    parts[last] = memoryview(parts[last])[: code.part_bytes(length, last)]
    return Solved(code, length, dict(enumerate(parts)))


def _length_of(chunk: ChunkId, parts: Sequence[memoryview], reading: Reading) -> int:
    """Return the length at which the data shards have the chunk's hash; 0 if there is none."""
    digest = chunk[-DIGEST_BYTES:]
    before = _hasher(chunk)
    for part in parts[:-1]:
        before.update(part)
    last = parts[-1]
    start = sum(len(part) for part in parts[:-1])
    full = before.copy()
    full.update(last)
    if full.digest() == digest:
        return start + len(last)
    if reading.is_exact:
        return 0
    size = max(len(bytes(last).rstrip(b"\0")), reading.shortest - start)
    before.update(last[:size])
    while size < len(last):
        if before.digest() == digest:
            return start + size
        before.update(b"\0")
        size += 1
    return 0


def _hasher(chunk: ChunkId) -> Any:
    if kind_of(chunk) is ChunkKind.MANIFEST:
        return blake3.blake3(derive_key_context=MANIFEST_CONTEXT)
    return blake3.blake3()


def _wrong_ones(solved: Solved, read: Sequence[tuple[int, Buffer]]) -> list[int]:
    """Return the indexes of shards whose bytes are not those that the chunk has."""
    exist = set(solved.code.shards(solved.length))
    return [
        index
        for index, (number, payload) in enumerate(read)
        if number not in exist or not _are_equal(payload, solved.shard(number))
    ]


def _are_equal(one: Buffer, other: Buffer) -> bool:
    """Compare bytes.  Views are copied: they are compared an item at a time, twenty times slower."""
    return one is other or (len(one) == len(other) and bytes(one) == bytes(other))
