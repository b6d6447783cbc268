"""The shared index's table (native, or None where it was not built), and the reader of a table that the engine shares.

A Robin Hood hash table (Celis, 1986) with linear probing and backward-shift deletion: the chunks of a run lie in the
order of their homes, so a lookup ends at the first slot whose chunk is nearer to its home than the wanted one would be.

Rules of the table:
- One writer, any number of readers in other processes, no locks.  An entry's version is odd while the entry is written;
  a reader that sees an odd or changed version, or a failed check, uses nothing of the entry.
- Entries that make room move away from their homes, the last one first: a reader can find each at any time.
  Entries that fill a gap move towards their homes, under odd stripe counters: a reader that finds nothing compares
  the counters with those it saw before.
- `find` returns an entry that was put for this chunk, or None: not known; the store may still have the chunk.
- The code relies on the store order of x86.  Where the order is weaker, the check catches torn entries.

A client without the native table asks the engine for every chunk.  The engine does not run without it.

Steps of a read in memory that the engine shares:

    found = reader.find(chunk)            # (tier, segment, offset, stored_bytes, crc), or None
    if found is None: ask the engine      # not known here; the store may still have the chunk
    read the bytes there, check them (crc: CRC32C, or the digest), and ask the engine if they are not the chunk's

The tuple has the fields of a grant of medium `tier`.  Reading is safe while the engine writes, without locks or system
calls.  A place may be freed between the lookup and the read of the bytes, so the bytes are checked.

Rules of the reader:
- The mapping is read-only, and of memory that cannot be shrunk under it: a memfd sealed against shrinking.  Any other
  file is refused: reading its mapping gets SIGBUS when the file is cut or its disk fails.
- Only the answers of `find` are used, and only as hints: a table of nonsense costs time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.host.aligned_mapping import map_aligned
from lakefs.host.descriptors import is_cuttable
from lakefs.shared_index.table_format import HEADER_PAGE_BYTES, MAGIC, TableHeader, table_bytes, unpack_header

if TYPE_CHECKING:
    from lakefs.shared_index._table import SharedTable as SharedTable

    IS_BUILT: bool
else:
    try:
        from lakefs.shared_index._table import SharedTable
    except ImportError:
        SharedTable = None
    IS_BUILT = SharedTable is not None


class SharedIndexReader:
    """A read-only mapping of the engine's shared index; one per process and engine, shared by the process's threads."""

    def __init__(self, descriptor: int, magic: bytes = MAGIC) -> None:
        """Map the index by the engine's descriptor, which stays the caller's and may be closed after the call.

        `magic`: of a table with other contents in the same format.
        PermissionDenied: it could be shrunk under the mapping.  StoreDamaged: it is no shared index of this version.
        """
        if is_cuttable(descriptor):
            raise PermissionDenied("the shared index lies in a file that could be cut under its readers")
        try:
            first, begin = map_aligned(descriptor, HEADER_PAGE_BYTES)
            with first:
                self.header: Final[TableHeader] = unpack_header(first[begin : begin + HEADER_PAGE_BYTES], magic)
            length = table_bytes(self.header.capacity)
            memory, begin = map_aligned(descriptor, length)
            self._memory = memoryview(memory).toreadonly()[begin : begin + length]
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"the shared index cannot be mapped: {error}", subject="shared index") from error
        self._magic: Final = magic
        table = self.table = SharedTable(self._memory, self.header.capacity)
        """The table, for other native modules."""
        self.find: Final = table.find
        self.find_many: Final = table.find_many
        """Return `find` of each chunk, in order; takes a quarter of its time per chunk, from batches of a dozen on."""
        self.find_packed: Final = table.find_packed
        """Write a `table_format.PLACE` for each chunk into memory of the caller; return the count of chunks found.

        Takes a third of the time of `find_many`, which spends most of its time making tuples.
        """

    @property
    def is_current(self) -> bool:
        """True while the engine maintains this table; if False, OpenSharedIndex returns the current one."""
        return bytes(self._memory[: len(MAGIC)]) == self._magic
