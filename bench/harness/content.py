"""Bytes for measuring: incompressible, all different, and quick to make.

A base block of random bytes is repeated; every 4 KiB page begins with a stamp that is never repeated in this process,
so no two pages, and no two chunks, are equal.
"""

from __future__ import annotations

import itertools
import os
from functools import cache
from pathlib import Path
from typing import Final

PAGE: Final = 4096
BLOCK: Final = 4 << 20
_base: Final = os.urandom(BLOCK)
_run: Final = os.urandom(8)
_stamps: Final = itertools.count()


def _stamp() -> bytes:
    return _run + next(_stamps).to_bytes(8, "little")


def block(size: int = BLOCK) -> bytearray:
    """Return `size` bytes, at most 4 MiB, unlike any other."""
    content = bytearray(_base[:size])
    for offset in range(0, size, PAGE):
        content[offset : offset + 16] = _stamp()[: size - offset]
    return content


def payload(size: int) -> bytes:
    """Return a small payload, unlike any other; at least 16 bytes."""
    assert size >= 16
    return (_stamp() + _base[: size - 16]) if size <= PAGE else bytes(block(size))


WINDOW_MAX: Final = 64 << 20
_WINDOW_ROOM: Final = 16 << 20
_WINDOW_STEP: Final = 16
_windows: Final = itertools.count()


@cache
def _random() -> memoryview:
    return memoryview(os.urandom(WINDOW_MAX + _WINDOW_ROOM))


def window(size: int) -> memoryview:
    """Return `size` bytes, at most 64 MiB, at no cost: a view of one run of random bytes, each time from another
    offset.

    So no two views have a chunk in common, wherever they are cut; about a million views differ before offsets
    repeat.
    """
    assert size <= WINDOW_MAX
    begin = next(_windows) * _WINDOW_STEP % (WINDOW_MAX + _WINDOW_ROOM - size)
    return _random()[begin : begin + size]


def write_file(path: Path, size: int) -> None:
    """Write a file of different pages, on disk and in the page cache."""
    with path.open("wb") as file:
        for offset in range(0, size, BLOCK):
            file.write(block(min(BLOCK, size - offset)))
        file.flush()
        os.fsync(file.fileno())


def renew_file(path: Path) -> None:
    """Make every chunk of a file new, by a new stamp in each 64 KiB; synced."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, 1 << 16):
            os.pwrite(file.fileno(), _stamp()[: size - offset], offset)
        os.fsync(file.fileno())
