"""Pure: a chunk's length from the lengths of its shards, which members answer to OfferShards.

A shard that is absent and one that does not exist look alike.  So when the last data shard that was found is as long
as a shard can be, and is not the last that a chunk may have, more of them may exist: the length is then likely, and
only the chunk's BLAKE3 proves it.  That is so for chunks of exactly some granules, up to nine of them at 4+2.  When the
last data shards were not found, and must exist, a chunk of the greatest length is likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lakefs.cluster.erasure import ErasureCode
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES


class Length(NamedTuple):
    """A chunk's length; `is_certain` False: more of its data shards may exist, and be lost."""

    length: int
    is_certain: bool


def length_from(code: ErasureCode, lengths: Sequence[int]) -> Length | None:
    """Return the length of a chunk whose shard i has `lengths[i]` bytes, 0 for one that was not found.

    None if these shards do not say it, or do not belong together.
    """
    data, parity = lengths[: code.data], {length for length in lengths[code.data :] if length}
    found = [shard for shard, length in enumerate(data) if length]
    step = shard_bytes_from(code, lengths)
    if not step or max(lengths) > step or len(parity) > 1:
        return None
    if not found:
        if step < GRANULE_BYTES or code.data == 1:
            return Length(step, is_certain=True)
        return Length(code.data * step, is_certain=False) if code.data * step <= CHUNK_BYTES else None
    last = found[-1]
    if any(data[shard] != step for shard in found[:-1]):
        return None
    length = last * step + data[last]
    if length <= CHUNK_BYTES and code.shard_bytes(length) == step and code.data_shards(length) == last + 1:
        return Length(length, data[last] < step or last == code.data - 1 or step < GRANULE_BYTES)
    full = code.data * step
    return Length(full, is_certain=False) if data[last] == step and full <= CHUNK_BYTES else None


def shard_bytes_from(code: ErasureCode, lengths: Sequence[int]) -> int:
    """Return the bytes of each shard but the last data shard; 0 if the shards that were found do not say it."""
    for length in lengths[code.data :]:
        if length:
            return length
    found = [shard for shard, length in enumerate(lengths[: code.data]) if length]
    if not found or (len(found) == 1 and found[0]):
        return 0
    return lengths[found[0]]
