"""A chunk from some of its shards, proven by its hash: the only source of what is stored anew.

Nothing proves a shard by itself: its member compares it with checksums that somebody sent.  A shard made from wrong
ones would be stored with right checksums, and the damage would spread.  So a chunk is decoded whole, and shards are
made from it only if its BLAKE3 is its id.  That costs 0.6 ms for 4 MiB, and less than to read the shards.

`solve` finds, in this order:
- the length, if the shards say several: the one that is said most often first, and at most m + 1 of them, which is
  enough while at most m members lie.
- the shards that lie, if there are more than are needed: each choice of as many as are needed is tried, until one
  makes the chunk; every other shard is then compared with the true one.

Pure; blocks for milliseconds, so it runs in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product
from typing import Any, Final, NamedTuple

import blake3

from engine.stripes.said_lengths import lengths_said
from lakefs.cluster.erasure import ErasureCode
from lakefs.content.verify import granule_crcs
from lakefs.ids import DIGEST_BYTES, MANIFEST_CONTEXT, Buffer, ChunkId, ChunkKind, kind_of

CHOICES_MAX: Final = 128
"""Choices of shards that are tried of one length.  8 of 10: 45; 4 of 6, with both copies of two of them: 60."""


class Read(NamedTuple):
    """A shard that was read: its number, the length of its chunk as its member says it, and its bytes."""

    number: int
    chunk_bytes: int
    payload: Buffer


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


def solve(code: ErasureCode, chunk: ChunkId, read: Sequence[Read]) -> Solved | None:
    """Return the chunk that the shards make; None if no choice of them makes it.

    `read`: several shards with one number if copies differ.
    """
    for length in lengths_said(one.chunk_bytes for one in read)[: code.parity + 1]:
        for chosen in islice(_choices(code, length, read), CHOICES_MAX):
            solved = _solve_one(code, chunk, length, chosen)
            if solved is not None:
                solved.wrong = _wrong_ones(solved, read)
                return solved
    return None


def _choices(code: ErasureCode, length: int, read: Sequence[Read]) -> Iterator[dict[int, Buffer]]:
    """Yield choices of as many shards as are needed, data first, of those that a chunk of that length may have."""
    sizes = code.sizes(length)
    variants: dict[int, list[Buffer]] = {}
    for number, _, payload in read:
        if len(payload) == sizes.get(number):
            known = variants.setdefault(number, [])
            if not any(_are_equal(payload, other) for other in known):
                known.append(payload)
    for some in combinations(sorted(variants), code.data_shards(length)):
        for payloads in product(*(variants[number] for number in some)):
            yield dict(zip(some, payloads, strict=True))


def _solve_one(code: ErasureCode, chunk: ChunkId, length: int, chosen: Mapping[int, Buffer]) -> Solved | None:
    """Return the chunk if these shards make it."""
    numbers = range(code.data_shards(length))
    made = {number: bytearray(code.part_bytes(length, number)) for number in numbers if number not in chosen}
    if made:
        code.rebuild(length, chosen, made)
    present: dict[int, Buffer] = {number: made[number] if number in made else chosen[number] for number in numbers}
    hasher = _hasher(chunk)
    for part in present.values():
        hasher.update(part)
    return Solved(code, length, present) if hasher.digest() == chunk[-DIGEST_BYTES:] else None


def _hasher(chunk: ChunkId) -> Any:
    if kind_of(chunk) is ChunkKind.MANIFEST:
        return blake3.blake3(derive_key_context=MANIFEST_CONTEXT)
    return blake3.blake3()


def _wrong_ones(solved: Solved, read: Sequence[Read]) -> list[int]:
    """Return the indexes of shards that the chunk has not, or with other bytes, or that say another length of it."""
    exist = set(solved.code.shards(solved.length))
    return [
        index
        for index, (number, chunk_bytes, payload) in enumerate(read)
        if number not in exist or chunk_bytes != solved.length or not _are_equal(payload, solved.shard(number))
    ]


def _are_equal(one: Buffer, other: Buffer) -> bool:
    """Compare bytes.  Views are copied: they are compared an item at a time, twenty times slower."""
    return one is other or (len(one) == len(other) and bytes(one) == bytes(other))
