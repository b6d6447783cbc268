"""Memory that chunks are read into: used again when nobody refers to it any more.

New memory of a chunk's length costs more than to receive its bytes: it is cleared, and each of its pages is made.

Rules kept here:
- A view that was returned is its holders' as long as one of them refers to it, or to a part of it: readers, an answer
  that is being sent, the tier that copies it, a connection that may still receive into it.  Nothing is released.
- At most `kept_bytes` are kept for the next reads.
- Contents are not cleared: whoever takes memory writes all of it before others see it.

Views may be dropped in any thread; memory is taken on the loop.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Final

from lakefs.limits import MIB

READ_MEMORY_KEPT_BYTES: Final = 32 * MIB
"""Memory of chunks that were read, kept for the next reads: eight chunks."""
KEPT_FROM_BYTES: Final = 256 << 10
"""Shorter memory is made anew: that costs some 10 us."""


class ReadMemory:
    """Memory for reads of one process."""

    def __init__(self, kept_bytes: int = READ_MEMORY_KEPT_BYTES) -> None:
        self._kept_bytes_max = kept_bytes
        self._kept: dict[int, list[mmap.mmap]] = {}
        self.kept_bytes = 0
        """Bytes kept for the next reads; short of them for a moment, while views are dropped in several threads."""

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of that length, writable, with any content."""
        if size_bytes < KEPT_FROM_BYTES:
            return memoryview(bytearray(size_bytes))
        needed = KEPT_FROM_BYTES << (-(-size_bytes // KEPT_FROM_BYTES) - 1).bit_length()
        kept = self._kept.setdefault(needed, [])
        memory = kept.pop() if kept else mmap.mmap(-1, needed)
        self.kept_bytes = sum(length * len(some) for length, some in self._kept.items())
        area = (ctypes.c_char * size_bytes).from_buffer(memory)
        weakref.finalize(area, self._give_back, memory).atexit = False
        return memoryview(area).cast("B")

    def _give_back(self, memory: mmap.mmap) -> None:
        """Keep memory that nobody refers to any more, or let it go."""
        if self.kept_bytes + len(memory) <= self._kept_bytes_max:
            self.kept_bytes += len(memory)
            self._kept[len(memory)].append(memory)


_OF_PROCESS: Final = ReadMemory()


def new_memory(size_bytes: int) -> memoryview:
    """Return memory of this process; see `ReadMemory.take`."""
    return _OF_PROCESS.take(size_bytes)
