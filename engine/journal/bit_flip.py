"""Telling a flipped bit from a torn write, at the one place where nothing else can: the journal's last group.

A write is torn by whole sectors of 512 bytes, and the journal is zero-filled ahead: what was not written reads as
zeros.  A group whose sectors are all written, and that is one bit off its checksum, was written whole.  Its last sector
may have a few bytes of it only, with a single bit in them: where that bit is the one that lacks, nobody can tell, and
the write was torn as far as anybody knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from crc32c import crc32c

SECTOR_BYTES: Final = 512
_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli, reflected."""
_SEARCHED_BYTES_MAX: Final = 1 << 20
"""8 million steps, about a second; once, at the opening after a crash that left such a group."""


def byte_with_bit_off(content: bytes | bytearray, crc: int) -> int | None:
    """Where the byte is in which turning one bit over gives content of that CRC32C.

    None: there is no such bit, or it is too long to tell.
    """
    if len(content) > _SEARCHED_BYTES_MAX:
        return None
    difference = crc32c(content) ^ crc
    # CRC is linear: a flipped bit changes it by a value that depends on its distance from the end alone.
    change = _POLYNOMIAL
    for distance in range(8 * len(content)):
        if change == difference:
            return len(content) - 1 - distance // 8
        change = change >> 1 ^ (_POLYNOMIAL if change & 1 else 0)
    return None


def with_one_bit_turned(content: bytes) -> Iterator[bytes]:
    """The content with each of its bits turned over in turn."""
    for at in range(len(content)):
        for bit in range(8):
            yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def is_in_empty_sector(content: bytes | bytearray, at: int) -> bool:
    """Whether the sector of a byte reads as zeros, as far as it is of what begins at a sector's start."""
    begin = at - at % SECTOR_BYTES
    return not any(content[begin : begin + SECTOR_BYTES])


def has_unwritten_sector(content: bytes | bytearray) -> bool:
    """Whether a whole sector of what begins at a sector's start reads as zeros."""
    empty = bytes(SECTOR_BYTES)
    return any(
        content[at : at + SECTOR_BYTES] == empty
        for at in range(0, len(content) - SECTOR_BYTES + 1, SECTOR_BYTES)
    )
