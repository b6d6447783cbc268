"""Blocks for the key-value scenarios: every process can compute a key's block, so none has to be sent.

A block is a cut of one run of random bytes, with the key in its first 16 bytes; so no two blocks are equal, and
making one is a single copy into existing memory.
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
    """Fill all of `memory` with the key's block."""
    begin = key * _STEP % _ROOM
    memory[:] = _base()[begin : begin + len(memory)]
    memory[:STAMP_BYTES] = _stamp(key)


def is_block(key: int, memory: memoryview) -> bool:
    """Return True if memory holds what `write_block` writes for the key."""
    begin = key * _STEP % _ROOM + STAMP_BYTES
    same = memory[STAMP_BYTES:] == _base()[begin : begin + len(memory) - STAMP_BYTES]
    return bool(same) and memory[:STAMP_BYTES] == _stamp(key)
