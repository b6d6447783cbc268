"""Reader of the shared index: looks up the places of chunks in memory that the engine shares.

Steps of a read:

    found = reader.find(chunk)            # (tier, segment, offset, stored_bytes, crc), or None
    if found is None: ask the engine      # not known here; the store may still have the chunk
    read the bytes there, check them (crc: CRC32C, or the digest), and ask the engine if they are not the chunk's

The tuple has the fields of a grant of medium `tier`.  Reading is safe while the engine writes, without locks or system
calls.  A place may be freed between the lookup and the read of the bytes, so the bytes are checked.

Rules kept here:
- The mapping is read-only, and of memory that cannot be shrunk under it: a memfd sealed against shrinking.  Any other
  file is refused: reading its mapping gets SIGBUS when the file is cut or its disk fails.
- Only the answers of `find` are used, and only as hints: a table of nonsense costs time.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from typing import Final

from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.host.aligned_mapping import map_aligned
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import HEADER_PAGE_BYTES, MAGIC, Found, TableHeader, table_bytes, unpack_header

F_GET_SEALS: Final = 1034
F_SEAL_SHRINK: Final = 0x0002


class SharedIndexReader:
    """A read-only mapping of the engine's shared index; one per process and engine, shared by the process's threads."""

    def __init__(self, descriptor: int) -> None:
        """Map the index by the engine's descriptor, which stays the caller's and may be closed after the call.

        PermissionDenied: it could be shrunk under the mapping.  StoreDamaged: it is no shared index of this version.
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
            raise StoreDamaged(f"the shared index cannot be mapped: {error}", subject="shared index") from error
        self._table = SharedTable(self._memory, self.header.capacity)
        self.find = self._table.find

    @property
    def is_current(self) -> bool:
        """True while the engine maintains this table; if False, OpenSharedIndex returns the current one."""
        return bytes(self._memory[: len(MAGIC)]) == MAGIC

    def find_many(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """Return `find` of each chunk, in order; takes a quarter of its time per chunk, from batches of a dozen on."""
        return self._table.find_many(chunks if isinstance(chunks, list) else list(chunks))

    def find_packed(self, chunks: list[bytes], into: bytearray | memoryview) -> int:
        """Write a `table_format.PLACE` for each chunk into memory of the caller; return the count of chunks found.

        Takes a third of the time of `find_many`, which spends most of its time making tuples.
        """
        return self._table.find_packed(chunks, into)


def _refuse_cuttable(descriptor: int) -> None:
    """Raise PermissionDenied if the file could be shrunk, which would make reads of a mapping fail."""
    try:
        if fcntl.fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK:
            return
    except OSError:
        pass  # no memfd
    raise PermissionDenied("the shared index lies in a file that could be cut under its readers")
