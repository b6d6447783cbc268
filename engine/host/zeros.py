"""Zeros for filling files ahead of later writes: one shared mebibyte, repeated as often as needed.

Buffers of 4 MiB made for each fill would come from the heap of small objects, and fragment it.
"""

from __future__ import annotations

from typing import Final

from lakefs.limits import MIB

_PIECE: Final = memoryview(bytes(MIB))
"""Never written: the kernel maps its page of zeros there."""


def zeros(count: int) -> list[memoryview]:
    """Return `count` zero bytes, as buffers for `DiskFile.pwritev`."""
    whole, rest = divmod(count, len(_PIECE))
    return [_PIECE] * whole + ([_PIECE[:rest]] if rest else [])
