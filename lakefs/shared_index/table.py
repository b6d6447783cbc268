"""The shared index's table: native, or None where it was not built.

A Robin Hood table (Celis, 1986) with linear probing and backward-shift deletion: the chunks of a run lie in the order
of their homes, so a look ends at the first slot whose chunk is nearer to its home than the one looked for would be.

Rules kept here:
- One writer, any number of readers in other processes, no locks.  An entry is written under its version, which is odd
  meanwhile; a reader that sees the version odd or changed, or a check that fails, has seen nothing.
- Entries that make room move away from their homes beginning with the last: none is ever out of a reader's sight.
  Entries that fill a gap move towards their homes, under odd stripe counters: a reader that finds nothing looks at
  the counters again.
- `find` answers an entry that was put for this chunk, or None: not known.  None proves nothing.
- The order of stores is what an x86 does.  Where the order is weaker, the check catches what it lets through.

A client without it asks the engine for every chunk.  The engine does not run without it.
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
