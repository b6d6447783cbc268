"""Prefetch: brings the next ranges of an opened object into the page cache while its reader uses the last one.

`lakefs.get.lookahead` predicts the ranges; a thread of the client brings them in (`lakefs.grants.read_ahead`).
Prefetch is only a hint: errors here are dropped, and the read that needs the bytes raises them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakefs.content.safetensors import LENGTH_BYTES, header_bytes
from lakefs.content.verify import granules_around
from lakefs.errors import LakeError
from lakefs.get.fetch import locate
from lakefs.get.lookahead import Lookahead
from lakefs.get.objects import read_range
from lakefs.get.opened import Access, Opened
from lakefs.get.range_orders import Extent
from lakefs.get.tensor_table import tensor_table
from lakefs.grants.grant_reads import BRING_IN_FROM, read_ahead
from lakefs.ids import ChunkId
from lakefs.limits import GRANULE_BYTES, TABLE_HEADER_BYTES_MAX
from lakefs.steps.steps import Steps, work


def look_ahead(access: Access, opened: Opened, offset: int, length: int) -> Steps[None]:
    """Start to bring in the ranges predicted after [offset, offset + length); called before that range is read."""
    if not access.can_use_descriptors:
        return
    yield from bring_in(access, opened, opened.lookahead.after(offset, length))


def bring_in(access: Access, opened: Opened, extents: Sequence[Extent]) -> Steps[None]:
    """Start to bring in ranges that `Opened.lookahead` predicted; learn the object's table if that is wanted now."""
    if opened.lookahead.wants_table:
        yield from learn_table(access, opened, opened.lookahead)
    if extents:
        yield from _bring_in(access, opened, extents)


def learn_table(access: Access, opened: Opened, lookahead: Lookahead) -> Steps[None]:
    """Learn the table of a safetensors file, if it is one.  The header was just read, so no disk is waited for."""
    lookahead.learn(None)  # no other read asks while this one parses
    size_bytes = opened.stat.size_bytes
    try:
        prefix = yield from read_range(access, opened, 0, GRANULE_BYTES)
        needed = header_bytes(prefix, size_bytes) if len(prefix) > LENGTH_BYTES else None
        if needed is None or needed > TABLE_HEADER_BYTES_MAX:
            return
        if needed > len(prefix):
            prefix = yield from read_range(access, opened, 0, needed)
        lookahead.learn((yield from work(tensor_table, prefix, size_bytes)))
    except LakeError:
        return


def _bring_in(access: Access, opened: Opened, extents: Sequence[Extent]) -> Steps[None]:
    wanted = granules_of(opened, extents)
    if not wanted:
        return
    try:
        yield from locate(access, opened, list(wanted))
    except LakeError:
        return
    for chunk, (begin, end) in wanted.items():
        read_ahead(access.descriptors, opened.grants[chunk], begin, end)


def granules_of(opened: Opened, extents: Sequence[Extent]) -> dict[ChunkId, tuple[int, int]]:
    """Return for each chunk the whole granules that hold the extents, as one range, in the extents' order.

    A range below BRING_IN_FROM becomes the whole chunk: in a chunk of short ranges the rest is read soon.
    """
    found: dict[ChunkId, tuple[int, int]] = {}
    for offset, length in extents:
        for piece in opened.overlapping(offset, length):
            if piece.chunk in opened.inline:
                continue
            first, last = max(offset - piece.offset, 0), min(offset + length - piece.offset, piece.length)
            begin, end = granules_around(first, last - first, piece.length)
            if end - begin < BRING_IN_FROM:
                begin, end = 0, piece.length
            known = found.get(piece.chunk, (begin, end))
            found[piece.chunk] = min(begin, known[0]), max(end, known[1])
    return found
