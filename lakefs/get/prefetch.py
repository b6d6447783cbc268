"""Prefetch: brings the next bytes of an opened object into the page cache while its reader uses the last ones.

`Opened.window` predicts them; a thread of the client brings them in (`lakefs.grants.read_ahead`).  Prefetch is only a
hint: errors here are dropped, and the read that needs the bytes raises them.
"""

from __future__ import annotations

from lakefs.content.verify import granules_around
from lakefs.errors import LakeError
from lakefs.get.fetch import locate
from lakefs.get.opened import Access, Opened
from lakefs.grants.grant_reads import BRING_IN_FROM, read_ahead
from lakefs.ids import ChunkId
from lakefs.steps.steps import Steps


def look_ahead(access: Access, opened: Opened, offset: int, length: int) -> Steps[None]:
    """Start to bring in what is predicted after [offset, offset + length); called before that range is read."""
    if not access.offers.places:
        return
    begin, wanted = opened.window.after(offset, length, opened.stat.size_bytes)
    if wanted:
        yield from bring_in(access, opened, begin, wanted)


def bring_in(access: Access, opened: Opened, offset: int, length: int) -> Steps[None]:
    """Start to bring in a range that `Opened.window` predicted."""
    wanted = granules_of(opened, offset, length)
    if not wanted:
        return
    try:
        yield from locate(access, opened, list(wanted))
    except LakeError:
        return
    for chunk, (begin, end) in wanted.items():
        if access.reads_here(grant := opened.grants[chunk]):
            read_ahead(access.descriptors, grant, begin, end)


def granules_of(opened: Opened, offset: int, length: int) -> dict[ChunkId, tuple[int, int]]:
    """Return for each chunk the whole granules that hold bytes of a range, in the range's order.

    A range below BRING_IN_FROM becomes the whole chunk: in a chunk of short ranges the rest is read soon.
    """
    found: dict[ChunkId, tuple[int, int]] = {}
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
