"""The shared index's table: native, or None where it was not built.

A Robin Hood hash table (Celis, 1986) with linear probing and backward-shift deletion: the chunks of a run lie in the
order of their homes, so a lookup ends at the first slot whose chunk is nearer to its home than the wanted one would be.

Rules kept here:
- One writer, any number of readers in other processes, no locks.  An entry's version is odd while the entry is written;
  a reader that sees an odd or changed version, or a failed check, uses nothing of the entry.
- Entries that make room move away from their homes, the last one first: a reader can find each at any time.
  Entries that fill a gap move towards their homes, under odd stripe counters: a reader that finds nothing compares
  the counters with those it saw before.
- `find` returns an entry that was put for this chunk, or None: not known; the store may still have the chunk.
- The code relies on the store order of x86.  Where the order is weaker, the check catches torn entries.

A client without the native table asks the engine for every chunk.  The engine does not run without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakefs.shared_index._table import SharedTable as SharedTable

    IS_BUILT: bool
else:
    try:
        from lakefs.shared_index._table import SharedTable
    except ImportError:
        SharedTable = None
    IS_BUILT = SharedTable is not None
