"""The hot index as its readers see it: where chunks are, looked up in memory that the engine shares.

How to read with it:

    found = reader.find(chunk)            # (tier, segment, offset, stored_bytes, crc), or None
    if found is None: ask the engine      # not known here; that proves nothing
    read the bytes there, check them (crc: CRC32C, or the digest), and ask the engine when they are not the chunk's

The tuple is what a grant of medium `tier` says.  Reading is safe beside the engine's writing, without locks or calls;
a place may be given up between the look and the read of the bytes, so bytes are checked, always.

Rules kept here:
- The mapping is read-only, and of memory that nobody can take away under it: a memfd sealed against shrinking, a
  device (device-dax) of root's, or a file of root's or the reader's own on a DAX file system.  A mapping of any other
  file dies of SIGBUS when it is cut or its disk fails: refused.
- Nothing that the table says is believed past what `find` answers; a table of nonsense costs time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from typing import Final

from lakefs.aligned_mapping import map_aligned
from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.hot_table import HotTable
from lakefs.hot_table_format import HEADER_PAGE_BYTES, MAGIC, Found, TableHeader, table_bytes, unpack_header

F_GET_SEALS: Final = 1034
F_SEAL_SHRINK: Final = 0x0002
MAP_SHARED_VALIDATE: Final = 0x03
MAP_SYNC: Final = 0x80000
"""Given by DAX file systems and devices only."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class HotIndexReader:
    """A read-only mapping of the engine's hot index; one for a process and engine, shared by its threads."""

    def __init__(self, descriptor: int) -> None:
        """Map what the engine handed over; the descriptor is the caller's and may be closed behind the call.

        PermissionDenied: it could be cut under the mapping.  StoreDamaged: it is no hot index of this version.
        """
        flags = _safe_map_flags(descriptor)
        try:
            first, begin = map_aligned(descriptor, HEADER_PAGE_BYTES, flags)
            with first:
                self.header: Final[TableHeader] = unpack_header(first[begin : begin + HEADER_PAGE_BYTES])
            length = table_bytes(self.header.capacity)
            memory, begin = map_aligned(descriptor, length, flags)
            self._memory = memoryview(memory).toreadonly()[begin : begin + length]
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"the hot index cannot be mapped: {error}", subject="hot index") from error
        self._table = HotTable(self._memory, self.header.capacity)
        self.find = self._table.find

    @property
    def is_current(self) -> bool:
        """Whether the engine keeps this table true; else it stopped, or has another one, which OpenHotIndex gives."""
        return bytes(self._memory[: len(MAGIC)]) == MAGIC

    def find_many(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """`find` of each, in order; a quarter of its time for each chunk, from batches of a dozen on."""
        return self._table.find_many(chunks if isinstance(chunks, list) else list(chunks))

    def find_packed(self, chunks: list[bytes], into: bytearray | memoryview) -> int:
        """The same as numbers in memory of the caller's, a `lakefs.hot_table_format.PLACE` each; how many were found.

        A third of the time of `find_many`, most of which makes tuples.
        """
        return self._table.find_packed(chunks, into)


def _safe_map_flags(descriptor: int) -> int:
    """Flags to map with; PermissionDenied when who has the file could make the mapping fail."""
    status = os.fstat(descriptor)
    if stat.S_ISCHR(status.st_mode) and status.st_uid == 0:
        return mmap.MAP_SHARED
    try:
        if fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK:
            return mmap.MAP_SHARED
    except OSError:
        pass  # no memfd
    is_ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE
    flags = MAP_SHARED_VALIDATE | MAP_SYNC
    if stat.S_ISREG(status.st_mode) and is_ours:
        try:
            mmap.mmap(descriptor, HEADER_PAGE_BYTES, flags, mmap.PROT_READ).close()
        except (OSError, ValueError):
            pass  # not on a DAX file system
        else:
            return flags
    raise PermissionDenied("the hot index lies in a file that could be cut under its readers")
