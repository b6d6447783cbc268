"""Chunks for the tests of the erasure code, their shards cut by plain slices, and lengths at which the rule changes."""

from __future__ import annotations

import random
from typing import Final

from lakefs.cluster.erasure import PROTECTIONS, ErasureCode
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES

CODES: Final = {f"{data}+{parity}": ErasureCode(data, parity) for data, parity in PROTECTIONS}
_CONTENT: Final = random.Random(31).randbytes(CHUNK_BYTES)


def boundaries(data: int) -> list[int]:
    """Return lengths around all that changes the number of shards or their length, and odd ones."""
    edges = (GRANULE_BYTES, 2 * GRANULE_BYTES, data * GRANULE_BYTES, 2 * data * GRANULE_BYTES, 1 << 20, CHUNK_BYTES)
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    return sorted({1, 2, 63, 64, 65, 4096, 100_000, 777_777} | {length for length in near if length <= CHUNK_BYTES})


def chunk_of(length: int) -> bytes:
    """Return random bytes, the same for the same length."""
    return _CONTENT[-length:]


def data_shards_of(chunk: bytes, data: int) -> list[bytes]:
    """Return the data shards of a chunk: equal slices of whole granules, or the chunk itself if it is short."""
    if len(chunk) <= GRANULE_BYTES or data == 1:
        return [chunk]
    granules = 1
    while data * granules * GRANULE_BYTES < len(chunk):
        granules += 1
    step = granules * GRANULE_BYTES
    return [chunk[begin : begin + step] for begin in range(0, len(chunk), step)]


def encoded(code: ErasureCode, chunk: bytes) -> dict[int, bytes]:
    """Return all shards of a chunk, by number; the parity is the product's."""
    parity = [bytearray(code.shard_bytes(len(chunk))) for _ in range(code.parity)]
    code.encode(chunk, parity)
    found = dict(enumerate(data_shards_of(chunk, code.data)))
    return found | {code.data + row: bytes(made) for row, made in enumerate(parity)}


def rebuilt(
    code: ErasureCode, length: int, present: dict[int, bytes], wanted: list[int], begin: int = 0, end: int | None = None
) -> dict[int, bytes]:
    """Return the wanted shards' range, made from whole shards that are present."""
    room = {shard: bytearray(code.part_bytes(length, shard, begin, end)) for shard in wanted}
    code.rebuild(length, {shard: content[begin:end] for shard, content in present.items()}, room, begin, end)
    return {shard: bytes(made) for shard, made in room.items()}
