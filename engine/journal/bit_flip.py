"""Tells a flipped bit from a torn write in the journal's last group, where nothing else can.

A write is torn by whole sectors of 512 bytes, and the journal is filled with zeros ahead, so unwritten sectors read as
zeros.  A group with no unwritten sector that is one bit off its checksum was written whole, and the bit flipped.  One
case is undecidable: the last sector may hold a few bytes of the group with a single bit set.  If that bit is the
missing one, the group is taken for torn.  So is a group with a body of more than 1 MiB, which is not searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from crc32c import crc32c

SECTOR_BYTES: Final = 512
_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli, reflected."""
_SEARCHED_BYTES_MAX: Final = 1 << 20
"""Longest content searched: 8 million steps, about a second, once at the opening after a crash left such a group."""


def byte_with_bit_off(content: bytes | bytearray, crc: int) -> int | None:
    """Return the index of the byte in which one flipped bit gives content of that CRC32C.

    None when no single bit does, or the content is too long to search.
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
    """Yield copies of the content, each with another one of its bits flipped."""
    for at in range(len(content)):
        for bit in range(8):
            yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def is_in_empty_sector(content: bytes | bytearray, at: int) -> bool:
    """Return True if the sector of the byte `at` reads as zeros, within `content`, which begins at a sector's start."""
    begin = at - at % SECTOR_BYTES
    return not any(content[begin : begin + SECTOR_BYTES])


def has_unwritten_sector(content: bytes | bytearray) -> bool:
    """Return True if a whole sector of `content`, which begins at a sector's start, reads as zeros."""
    empty = bytes(SECTOR_BYTES)
    return any(
        content[at : at + SECTOR_BYTES] == empty for at in range(0, len(content) - SECTOR_BYTES + 1, SECTOR_BYTES)
    )
