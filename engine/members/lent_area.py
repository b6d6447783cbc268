"""`LentArea`: memory of this process that members on its machine read shards from.

One memfd, lent to each member over its connection; payload that lies in it is named by its offset, and passes no
socket.  The pools of a head (payload that it receives, parity) lie here, so nothing is copied to get there.

Rules kept here:
- The file's size is sealed, so a member finds all of it.
- Pages are allocated when they are first used, and kept, as those of any pool.  So the area takes what its pools would
  take elsewhere, and its size bounds them.
- Members read it, and write nothing there: what they send arrives through their sockets.

Used on the loop.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

from lakefs.ids import Buffer
from lakefs.limits import PAGE_BYTES

_SEALS: Final = 0x0001 | 0x0002 | 0x0004
"""No more seals, no shrinking, no growing: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW."""
_ADD_SEALS: Final = 1033


class LentArea:
    """Shared memory of `size_bytes`.  OSError when none can be had."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes: Final = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self.descriptor: Final = os.memfd_create("lake-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close: Final = weakref.finalize(self, os.close, self.descriptor)
        """Closes the descriptor; the memory stays until nobody refers to it."""
        os.ftruncate(self.descriptor, self.size_bytes)
        fcntl.fcntl(self.descriptor, _ADD_SEALS, _SEALS)
        self._mapping = mmap.mmap(self.descriptor, self.size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._given = 0

    def part(self, size_bytes: int) -> memoryview:
        """Return the next part of the area, page-aligned, for a pool."""
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        begin, self._given = self._given, self._given + size_bytes
        assert self._given <= self.size_bytes, "an area is as large as its parts"
        return memoryview(self._mapping)[begin : begin + size_bytes]

    def forget(self, offset: int, size_bytes: int) -> None:
        """Give the pages of a range back; it reads as zeros until it is written again."""
        self._mapping.madvise(mmap.MADV_REMOVE, offset, size_bytes)

    def offset_of(self, memory: Buffer) -> int | None:
        """Return the offset of memory in the area; None for other memory."""
        if not isinstance(memory, memoryview) or memory.obj is not self._mapping or not memory.c_contiguous:
            return None
        return ctypes.addressof(ctypes.c_char.from_buffer(memory)) - self._address if memory else 0

    def offsets_of(self, memories: Sequence[Buffer]) -> list[int] | None:
        """Return the offset of each, or None if one of them lies elsewhere."""
        offsets = [offset for memory in memories if (offset := self.offset_of(memory)) is not None]
        return offsets if len(offsets) == len(memories) else None
