"""The shared index as its readers see it: where chunks are, looked up in memory that the engine shares.

How to read with it:

    found = reader.find(chunk)            # (tier, segment, offset, stored_bytes, crc), or None
    if found is None: ask the engine      # not known here; that proves nothing
    read the bytes there, check them (crc: CRC32C, or the digest), and ask the engine when they are not the chunk's

The tuple is what a grant of medium `tier` says.  Reading is safe beside the engine's writing, without locks or calls;
a place may be given up between the look and the read of the bytes, so bytes are checked, always.

Rules kept here:
- The mapping is read-only, and of memory that nobody can take away under it: a memfd sealed against shrinking.  A
  mapping of any other file dies of SIGBUS when it is cut or its disk fails: refused.
- Nothing that the table says is believed past what `find` answers; a table of nonsense costs time.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from typing import Final

from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.host.aligned_mapping import map_aligned
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import (
    HEADER_PAGE_BYTES,
    MAGIC,
    Found,
    TableHeader,
    table_bytes,
    unpack_header,
)

F_GET_SEALS: Final = 1034
F_SEAL_SHRINK: Final = 0x0002


class SharedIndexReader:
    """A read-only mapping of the engine's shared index; one for a process and engine, shared by its threads."""

    def __init__(self, descriptor: int) -> None:
        """Map what the engine handed over; the descriptor is the caller's and may be closed behind the call.

        PermissionDenied: it could be cut under the mapping.  StoreDamaged: it is no shared index of this version.
        """
        _refuse_cuttable(descriptor)
        try:
            first, begin = map_aligned(descriptor, HEADER_PAGE_BYTES)
            with first:
                self.header: Final[TableHeader] = unpack_header(first[begin : begin + HEADER_PAGE_BYTES])
            length = table_bytes(self.header.capacity)
            memory, begin = map_aligned(descriptor, length)
            self._memory = memoryview(memory).toreadonly()[begin : begin + length]
        except (OSError, ValueError) as error:
            raise StoreDamaged(
                f"the shared index cannot be mapped: {error}", subject="shared index"
            ) from error
        self._table = SharedTable(self._memory, self.header.capacity)
        self.find = self._table.find

    @property
    def is_current(self) -> bool:
        """Whether the engine still maintains this table; if not, OpenSharedIndex returns the present one."""
        return bytes(self._memory[: len(MAGIC)]) == MAGIC

    def find_many(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """`find` of each, in order; a quarter of its time for each chunk, from batches of a dozen on."""
        return self._table.find_many(chunks if isinstance(chunks, list) else list(chunks))

    def find_packed(self, chunks: list[bytes], into: bytearray | memoryview) -> int:
        """The same as numbers in memory of the caller's, a `table_format.PLACE` each; how many were found.

        A third of the time of `find_many`, most of which makes tuples.
        """
        return self._table.find_packed(chunks, into)


def _refuse_cuttable(descriptor: int) -> None:
    """PermissionDenied when who has the file could make a mapping of it fail."""
    try:
        if fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK:
            return
    except OSError:
        pass  # no memfd
    raise PermissionDenied("the shared index lies in a file that could be cut under its readers")
