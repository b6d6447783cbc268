"""Checksums of pages inside granules: a page that is read again is checked without reading its whole granule.

The store has one CRC32C for each granule of 64 KiB.  When a granule is read for a few of its pages, its CRC is computed
page by page.  If the result is the store's, the CRC after each page is kept.  A run of those pages that is read later
is checked alone: from the CRC before the run, its bytes must lead to the CRC behind it.

Rules kept here:
- CRCs are kept only of bytes that matched the store's checksum.  No bytes are kept, and nothing counts as good
  because it was good before: a reader checks the bytes that it has read.
- A chunk is named by its content, so its CRCs stay true at any place and for any opener.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import accumulate
from typing import Final

from lakefs.host.crc import crc32c
from lakefs.ids import ChunkId
from lakefs.limits import PAGE_BYTES, PAGE_SUMS_MAX

_START: Final = 0


class PageSums:
    """CRCs after each page, for the granules that were last read in part; keyed by chunk and granule number."""

    def __init__(self, granules_max: int = PAGE_SUMS_MAX) -> None:
        self._granules_max = granules_max
        self._sums: OrderedDict[tuple[ChunkId, int], array[int]] = OrderedDict()

    def learn(self, chunk: ChunkId, number: int, granule: memoryview, crc: int) -> bool:
        """Check a whole granule against the store's checksum and keep its CRCs; False, keeping none, if it differs."""
        pages = (granule[at : at + PAGE_BYTES] for at in range(0, len(granule), PAGE_BYTES))
        sums = array("I", accumulate(pages, _extended, initial=_START))
        if sums[-1] != crc:
            return False
        self._sums[chunk, number] = sums
        if len(self._sums) > self._granules_max:
            self._sums.popitem(last=False)
        return True

    def of(self, chunk: ChunkId, number: int) -> array[int] | None:
        """Return the CRC after none, one, two, ... all pages of a granule; None if they are not kept."""
        return self._sums.get((chunk, number))


def _extended(crc: int, page: memoryview) -> int:
    return crc32c(page, crc)
