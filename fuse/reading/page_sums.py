"""Checksums of the pages of granules, so that a page that is read again needs not the whole granule to be checked.

The store has one CRC32C for each granule of 64 KiB.  When a granule is read for a few pages of it, its CRC is computed
page by page, and what it has come to after each page is kept, if in the end it is the store's.  A run of those pages
that is read later is checked alone: from the sum before it, its bytes must lead to the sum behind it.

Rules kept here:
- Sums are kept only of bytes that matched the store's checksum; no bytes are kept, and nothing is called good because
  it was good before: whoever reads checks what was read.
- A chunk is named by its content, so what is known of it stays true wherever it lies and whoever opens it.
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
    """Of the granules that were read last for a part of them, by chunk and number."""

    def __init__(self, granules_max: int = PAGE_SUMS_MAX) -> None:
        self._granules_max = granules_max
        self._sums: OrderedDict[tuple[ChunkId, int], array[int]] = OrderedDict()

    def learn(self, chunk: ChunkId, number: int, granule: memoryview, crc: int) -> bool:
        """Check a whole granule against the store's checksum; False when it is another's.  Then nothing is kept."""
        pages = (granule[at : at + PAGE_BYTES] for at in range(0, len(granule), PAGE_BYTES))
        sums = array("I", accumulate(pages, _go_on, initial=_START))
        if sums[-1] != crc:
            return False
        self._sums[chunk, number] = sums
        if len(self._sums) > self._granules_max:
            self._sums.popitem(last=False)
        return True

    def of(self, chunk: ChunkId, number: int) -> array[int] | None:
        """What the CRC comes to after none, one, two, ... all pages of a granule; None while it is not known."""
        return self._sums.get((chunk, number))


def _go_on(crc: int, page: memoryview) -> int:
    return crc32c(page, crc)
