"""The reader of the keyed index: which keys of a space have a value, and where, without a request.

    finder.match(space, keys)  ->  True, False or None for each key
    finder.plan(space, keys, rooms)  ->  misses, values that may be read with their places, and what has to be asked for

Rules kept here:
- The table is that of the shared index, and as safe to read while the engine writes (`lakefs.shared_index.table`).
- A key is looked up between two looks at its space.  What is found was so at a moment of the look-up, if the engine
  maintains the table after it: the caller checks that `is_current` and that its connection is open, after the look-up.
- Keys without entry are absent only if the space had all its keys in the table, before and after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lakefs.shared_index import table
from lakefs.shared_index.key_format import KEYED_MAGIC, SOME_EXPIRE, id_of_space
from lakefs.shared_index.table import SharedIndexReader

if TYPE_CHECKING:
    from lakefs.shared_index._keys import HomesFinder as HomesFinder, KeyFinder as KeyFinder, key_id as key_id

    IS_BUILT: bool
else:
    try:
        from lakefs.shared_index._keys import HomesFinder, KeyFinder, key_id
    except ImportError:
        HomesFinder = KeyFinder = key_id = None
    IS_BUILT = KeyFinder is not None and table.IS_BUILT


class KeyedIndexReader(SharedIndexReader):
    """A read-only mapping of the engine's keyed index."""

    def __init__(self, descriptor: int) -> None:
        """See `SharedIndexReader`."""
        super().__init__(descriptor, KEYED_MAGIC)
        self.finder: Final = KeyFinder(self.table)

    def may_expire(self, space: int) -> bool:
        """Return True unless the table says that no value of this space expires, or ever did."""
        entry = self.table.find(id_of_space(space))
        return entry is None or entry[3] == SOME_EXPIRE
