"""Zeros to write ahead of what will be written: one mebibyte of them, as often as it takes.

Made anew for each fill, 4 MiB of them at a time would come from the heap that small objects live in, and tear it apart.
"""

from __future__ import annotations

from typing import Final

from lakefs.limits import MIB

_PIECE: Final = memoryview(bytes(MIB))
"""Never touched: the kernel reads its page of zeros there."""


def zeros(count: int) -> list[memoryview]:
    """`count` zero bytes, for `DiskFile.pwritev`."""
    whole, rest = divmod(count, len(_PIECE))
    return [_PIECE] * whole + ([_PIECE[:rest]] if rest else [])
