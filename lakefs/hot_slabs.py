"""Reading chunks of the hot index that the engine has in memory: an entry of tier 3 tells slab, offset and generation.

    the generation is that of the entry  ->  copy from the slab  ->  it still is  ->  CRC32C or BLAKE3  ->  done

Rules kept here:
- Bytes count when the slot's generation was the entry's before and after they were copied: then they are those for
  which the entry was made, also when the entry, the slot or the engine have gone since.  Then they are checked, as the
  client's `Check` says; what is checked is the copy.
- Anything odd is no error: the caller asks the engine, and so gets the slab when it was not mapped.
"""

from __future__ import annotations

from blake3 import blake3

from lakefs.crc import crc32c
from lakefs.errors import StaleGrant
from lakefs.ids import ChunkId
from lakefs.limits import GRANULE_BYTES
from lakefs.movers import Check, check_granules
from lakefs.slabs import Slabs


def is_read_in_slab(
    slabs: Slabs,
    chunk: ChunkId,
    found: tuple[int, int, int, int, int],
    target: memoryview,
    check: Check,
) -> bool:
    """Fill `target`, as long as the chunk, from where `found`, of tier 3, says; False: it may hold anything."""
    _, place, offset, length, crc = found
    vector: memoryview | None = None
    if check is Check.CRC32C and length > GRANULE_BYTES:
        vector = memoryview(bytearray(4 * -(-length // GRANULE_BYTES)))
    if len(target) != length or not slabs.copy_place(place, offset, target, vector):
        return False
    if check is Check.BLAKE3:
        return blake3(target).digest() == chunk[1:]
    if check is Check.NONE:
        return True
    if vector is None:
        return crc32c(target) == crc
    return crc32c(vector) == crc and _has_granules(chunk, target, vector)


def _has_granules(chunk: ChunkId, payload: memoryview, vector: memoryview) -> bool:
    try:
        check_granules(chunk, payload, bytes(vector))
    except StaleGrant:
        return False
    return True
