"""Content that begins with the whole of an earlier one: an append, which handles that read the earlier one follow.

Chunks are named by their content: as long as both have the same chunks at the same offsets, their bytes are the same.
From the first chunk that differs on, mostly the last one, the bytes themselves are compared.  Each is checked as it is
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fuse.reading.blob_reader import BlobReader
from lakefs.get.opened import Piece
from lakefs.limits import MIB

COMPARED_MAX: Final = 64 * MIB
"""Most bytes that are compared, or kept.  An append cuts at most the last chunks anew, less than 8 MiB; a file that was
written anew with the same beginning may have other cuts."""
_STEP_BYTES: Final = MIB


def common_bytes(own: Sequence[Piece], longer: Sequence[Piece]) -> int:
    """Return up to which offset both contents have the same chunks."""
    at = 0
    for one, other in zip(own, longer, strict=False):
        if one != other:
            break
        at = one.offset + one.length
    return at


async def appended(own: BlobReader, longer: BlobReader, *, keep: bool) -> bytes | None:
    """Return what follows the whole of `own` in another content, b"" unless `keep`; None if that begins otherwise.

    None too if more would have to be compared or kept than `COMPARED_MAX`.  Raises the errors of the reads.
    """
    begin, size, end = 0, own.opened.stat.size_bytes, longer.opened.stat.size_bytes
    begin = min(common_bytes(own.opened.pieces, longer.opened.pieces), size)
    if end < size or size - begin > COMPARED_MAX or (keep and end - size > COMPARED_MAX):
        return None
    while begin < size:
        length = min(_STEP_BYTES, size - begin)
        mine = bytes(await own.read(begin, length))  # a copy: what a read returns is valid until the next one
        if len(mine) != length or mine != bytes(await longer.read(begin, length)):
            return None
        begin += length
    added = bytearray()
    while keep and size + len(added) < end:
        piece = bytes(await longer.read(size + len(added), min(_STEP_BYTES, end - size - len(added))))
        if not piece:
            return None
        added += piece
    return bytes(added)
