"""Zeros for filling files ahead of later writes: one shared mebibyte, repeated as often as needed.

Buffers of 4 MiB made for each fill would come from the heap of small objects, and fragment it.
"""

from __future__ import annotations

import mmap
from typing import Final

from lakefs.limits import MIB

_PIECE: Final = memoryview(mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).toreadonly()
"""Never written: the kernel maps its page of zeros there.  Page-aligned, so that a file opened with O_DIRECT takes it
too."""


def zeros(count: int) -> list[memoryview]:
    """Return `count` zero bytes, as buffers for `DiskFile.pwritev`."""
    whole, rest = divmod(count, len(_PIECE))
    return [_PIECE] * whole + ([_PIECE[:rest]] if rest else [])
