"""Blocks for the key-value scenarios: what each key's block is, known to every process without being sent.

A block is a cut of one run of random bytes, with the key in its first 16 bytes; so no two blocks are the same, and one
is made by one copy into memory that is there already.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Final

STAMP_BYTES: Final = 16
_ROOM: Final = 4 << 20
_BLOCK_MAX: Final = 4 << 20
_STEP: Final = 4096


@cache
def _base() -> memoryview:
    return memoryview(random.Random(6).randbytes(_BLOCK_MAX + _ROOM))


def _stamp(key: int) -> bytes:
    return key.to_bytes(STAMP_BYTES, "little")


def write_block(key: int, memory: memoryview) -> None:
    """Make all of `memory` the key's block."""
    begin = key * _STEP % _ROOM
    memory[:] = _base()[begin : begin + len(memory)]
    memory[:STAMP_BYTES] = _stamp(key)


def is_block(key: int, memory: memoryview) -> bool:
    """Whether memory holds what `write_block` wrote for the key."""
    begin = key * _STEP % _ROOM + STAMP_BYTES
    same = memory[STAMP_BYTES:] == _base()[begin : begin + len(memory) - STAMP_BYTES]
    return bool(same) and memory[:STAMP_BYTES] == _stamp(key)
