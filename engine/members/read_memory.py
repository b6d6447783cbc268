"""Memory that chunks are read into: used again when nobody refers to it any more.

New memory of a chunk's length costs more than to receive its bytes: it is cleared, and each of its pages is made.

It lies in one memfd, which members on this machine are lent for writing: they read shards from their disk to where the
chunk is put together, and nothing passes a socket (`engine.members.lent_payload`).

Rules kept here:
- A view that was returned is its holders' as long as one of them refers to it, or to a part of it: readers, an answer
  that is being sent, the tier that copies it, a connection that may still receive into it.  Nothing is released.
- Memory into which a member may still write, because its connection was lost amid that, is never used again.
- At most `kept_bytes` are kept for the next reads.
- Contents are not cleared: whoever takes memory writes all of it before others see it.

Views may be dropped in any thread; all else is done on the loop.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from engine.members.lent_area import LentArea
from lakefs.limits import GIB, MIB

READ_MEMORY_BYTES: Final = 4 * GIB
"""Addresses, not memory: pages are made when they are used.  1,024 chunks that are read or sent at a time, or were read
when a connection was lost; others get memory elsewhere."""
READ_MEMORY_KEPT_BYTES: Final = 32 * MIB
"""Memory of chunks that were read, kept for the next reads: eight chunks."""
KEPT_FROM_BYTES: Final = 256 << 10
"""Shorter memory is made anew: that costs some 10 us."""

Take = Callable[[int], memoryview]
"""Returns memory of a length, writable, with any content."""


def take_anew(size_bytes: int) -> memoryview:
    """Return new memory."""
    return memoryview(bytearray(size_bytes))


class ReadMemory:
    """Memory for reads of one process.  OSError when none can be had."""

    def __init__(self, kept_bytes: int = READ_MEMORY_KEPT_BYTES, size_bytes: int = READ_MEMORY_BYTES) -> None:
        self.area: Final = LentArea(size_bytes)
        self._memory = self.area.part(size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._given = 0
        self._kept_bytes_max = kept_bytes
        self._kept: dict[int, list[int]] = {}
        """Offsets of blocks that are kept, by their length."""
        self._cold: dict[int, list[int]] = {}
        """Offsets of blocks whose pages were given back."""
        self._dropped = deque[tuple[int, int]]()
        """Offset and length of blocks whose views are gone, in whatever thread that was."""
        self._retired: set[int] = set()
        """Offsets of blocks that are not used again."""

    def close(self) -> None:
        """Close the descriptor: members are not lent the memory any more, which stays its holders'."""
        self.area.close()

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the next reads."""
        self._take_back()
        return sum(length * len(offsets) for length, offsets in self._kept.items())

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of that length, writable, with any content."""
        if size_bytes < KEPT_FROM_BYTES:
            return take_anew(size_bytes)
        length = KEPT_FROM_BYTES << (-(-size_bytes // KEPT_FROM_BYTES) - 1).bit_length()
        offset = self._free_block(length)
        if offset is None:
            return take_anew(size_bytes)
        block = (ctypes.c_char * size_bytes).from_buffer(self._memory, offset)
        weakref.finalize(block, self._dropped.append, (offset, length)).atexit = False
        return memoryview(block).cast("B")

    def offsets_of(self, views: Sequence[memoryview]) -> list[int] | None:
        """Return the offset of each view in the area; None if one lies elsewhere."""
        offsets: list[int] = []
        for view in views:
            offset = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self._address
            if not 0 <= offset < len(self._memory):
                return None
            offsets.append(offset)
        return offsets

    def retire(self, views: Sequence[memoryview]) -> None:
        """Never use these views' memory again: somebody may write to it at any time."""
        for view in views:
            self._retired.add(ctypes.addressof(ctypes.c_char.from_buffer(view.obj)) - self._address)

    def _free_block(self, length: int) -> int | None:
        """Return the offset of a block that nobody uses; None when there is none."""
        self._take_back()
        for blocks in (self._kept, self._cold):
            if offsets := blocks.get(length):
                return offsets.pop()
        if self._given + length > len(self._memory):
            return None
        self._given += length
        return self._given - length

    def _take_back(self) -> None:
        """Keep the blocks whose views are gone, or give their pages back."""
        while self._dropped:
            offset, length = self._dropped.popleft()
            kept = sum(size * len(offsets) for size, offsets in self._kept.items())
            if kept + length <= self._kept_bytes_max and offset not in self._retired:
                self._kept.setdefault(length, []).append(offset)
                continue
            self.area.forget(offset, length)
            if offset in self._retired:
                self._retired.discard(offset)
            else:
                self._cold.setdefault(length, []).append(offset)
