"""Pure: the length of a chunk of which the shards that say it are lost, from those that are left.  Blocks.

The number of its data shards is tried, and what the last one holds is decoded: its bytes, then the zeros that parity
counts for bytes that it lacks.  Where its content ends is found by BLAKE3: at its full length or behind its last byte
that is not zero in nearly every chunk, else somewhere in the zeros, where each length is tried.

A try costs about 2 us, and there are at most 2 MiB of zeros: some seconds for a chunk that ends in so many of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import blake3

from engine.stripes.shard_lengths import shard_bytes_from
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import MANIFEST_CONTEXT, Buffer, ChunkId, ChunkKind, kind_of
from lakefs.limits import CHUNK_BYTES

_TRIES: Final = 4096
"""Lengths that are tried before others may use the interpreter."""


def lengths_tried(code: ErasureCode, chunk: ChunkId, shards: Mapping[int, Buffer]) -> Iterator[int]:
    """Yield 0 after each step of the search, and the chunk's length when it was found, which ends it.

    Ends without a length if these shards do not make the chunk.
    """
    lengths = [len(shards.get(shard, b"")) for shard in range(code.data + code.parity)]
    step = shard_bytes_from(code, lengths)
    if not step or max(lengths) > step:
        return
    tried: list[tuple[memoryview, int]] = []
    """Chunks padded with zeros, and the shortest length that each can have."""
    for count in range(1, code.data + 1):
        padded = _padded(code, shards, step, count)
        if padded is not None:
            tried.append((padded, len(padded) if count - 1 in shards else _content_end(padded, step)))
    for padded, end in tried:
        for length in (len(padded), end):
            if _hasher(chunk).update(padded[:length]).digest() == chunk[1:]:
                yield length
                return
        yield 0
    for padded, end in tried:
        hasher = _hasher(chunk).update(padded[:end])
        for length in range(end + 1, len(padded)):
            if hasher.update(b"\0").digest() == chunk[1:]:
                yield length
                return
            if length % _TRIES == 0:
                yield 0


def _padded(code: ErasureCode, shards: Mapping[int, Buffer], step: int, count: int) -> memoryview | None:
    """Return the chunk as if it had so many data shards; the last one, if it is lost, with zeros up to a whole shard.

    None if the shards are too few, or say that it has not.
    """
    data = [shard for shard in shards if shard < code.data]
    last = len(shards.get(count - 1, b"")) or step
    length = (count - 1) * step + last
    if any(shard >= count or (shard < count - 1 and len(shards[shard]) != step) for shard in data):
        return None
    if not length <= CHUNK_BYTES or code.shard_bytes(length) != step or code.data_shards(length) != count:
        return None
    existing = {shard: shards[shard] for shard in code.shards(length) if shard in shards}
    memory = memoryview(bytearray(length))
    targets = {shard: memory[shard * step : shard * step + code.extent(length, shard)[1]] for shard in range(count)}
    lacking = {shard: target for shard, target in targets.items() if shard not in existing}
    if len(existing) < count:
        return None
    for shard in targets.keys() - lacking.keys():
        targets[shard][:] = existing[shard]
    if lacking:
        code.rebuild(length, existing, lacking)
    return memory


def _content_end(padded: memoryview, step: int) -> int:
    """Return the shortest length that the chunk can have: up to its last byte that is not zero, in its last shard."""
    begin = (len(padded) - 1) // step * step
    return begin + max(1, len(bytes(padded[begin:]).rstrip(b"\0")))


def _hasher(chunk: ChunkId) -> blake3.blake3:
    if kind_of(chunk) is ChunkKind.MANIFEST:
        return blake3.blake3(derive_key_context=MANIFEST_CONTEXT)
    return blake3.blake3()
