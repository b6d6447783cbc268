"""Sets of dense numbers: births in gc's mark set and in a session's references, node ids in fsck's walk.

A paged bitmap costs little more than a bit for each number where numbers are neighbours: the set of a session that
stored 1 TiB in one go takes 42 KiB, the mark set of ten million chunks 1.7 MiB.
"""

from __future__ import annotations

from typing import Final

_PAGE_BITS: Final = 4096


class NumberSet:
    """A set of numbers; memory is bounded by a page of 512 bytes for each 4,096 numbers that it touches."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, number: int) -> None:
        """Add a number."""
        page, bit = divmod(number, _PAGE_BITS)
        bits = self._pages.get(page)
        if bits is None:
            bits = self._pages[page] = bytearray(_PAGE_BITS // 8)
        bits[bit >> 3] |= 1 << (bit & 7)

    def update(self, numbers: NumberSet) -> None:
        """Add all numbers of another set."""
        for page, bits in numbers._pages.items():
            own = int.from_bytes(self._pages.get(page, b""), "little")
            merged = own | int.from_bytes(bits, "little")
            self._pages[page] = bytearray(merged.to_bytes(_PAGE_BITS // 8, "little"))

    def __contains__(self, number: int) -> bool:
        page, bit = divmod(number, _PAGE_BITS)
        bits = self._pages.get(page)
        return bits is not None and bool(bits[bit >> 3] & (1 << (bit & 7)))

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __len__(self) -> int:
        return sum(int.from_bytes(bits, "little").bit_count() for bits in self._pages.values())
