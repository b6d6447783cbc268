"""Whether an index is whole: a look at each opening, and a walk through all of it behind start-up.

Values carry checksums over table, key and value; what leads to them in LMDB's pages (roots, keys in branches, places of
records) carries none.  A root that is another table's, or an old one, makes a table look empty or old.  So the opening
looks at the pages that trees are made of, both ends of each table, and all counters, whose numbers would be given out
again if they were not found.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Final

import trio

from engine.format.layouts import Table, open_value
from engine.tables.index_progress import IndexProgress
from engine.tables.lmdb_index import DATA_FILE, Index, IndexSnapshot
from engine.tables.lmdb_pages import check_pages
from lakefs.errors import IndexDamaged
from lakefs.ids import Sequence
from lakefs.limits import VERIFY_BATCH
from lakefs.ports import Offload

_WALK_PAUSE_S: Final = 0.05
"""Between two batches of a walk: it takes a tenth of a core at most."""


def probe(index: Index) -> Sequence:
    """`index.applied`, after the look that an opening cannot do without; some 20 leaves are read.  IndexDamaged."""
    check_pages(index.path / DATA_FILE)
    snapshot = index.snapshot()
    try:
        for table in Table:
            ends = snapshot.ends(table)
            for key, sealed in ends:
                open_value(table, key, sealed)
            if bool(ends) != bool(snapshot.stats(table)[0]):
                what = (
                    "has records, and none were written" if ends else "looks empty, and records were written"
                )
                raise IndexDamaged(
                    f"table {table.name.lower()} of the index {what}", subject=table.name.lower()
                )
        counters = Verification(snapshot, [Table.COUNTERS])
        while counters.step(64):
            pass
        return snapshot.applied
    finally:
        snapshot.close()


class Verification:
    """Compares every record with its checksum, and each table with its count and XOR, step by step.

    Every record is looked up by its key, too: a walk goes from page to page whatever the keys in branch pages say, and
    a look-up goes by those, which no checksum covers.  When all that is there is found, whatever else is looked for
    ends at its right neighbour.

    It works on one snapshot, so writers may go on meanwhile.
    """

    def __init__(self, snapshot: IndexSnapshot, tables: Iterable[Table] = Table) -> None:
        self._snapshot = snapshot
        self._tables = list(tables)
        self._after = b""
        self._count = self._xor = 0
        self.record_count = 0

    def step(self, limit: int) -> bool:
        """Check up to `limit` records; False when all are done.  IndexDamaged names table and key or sums."""
        while self._tables and limit > 0:
            limit -= self._check_records(self._tables[0], limit)
        return bool(self._tables)

    def _check_records(self, table: Table, limit: int) -> int:
        """The next records of the first table, its sums behind the last; how many those were."""
        done = 0
        for key, sealed in self._snapshot.sealed_records(table, self._after):
            open_value(table, key, sealed)
            if key <= self._after or self._snapshot.sealed(table, key) != sealed:
                raise IndexDamaged(
                    f"a record of table {table.name.lower()} of the index is there and is not found by its key",
                    subject=table.name.lower(),
                )
            self._xor ^= int.from_bytes(sealed[-4:], "little")
            self._after = key
            done += 1
            if done == limit:
                break
        self._count += done
        self.record_count += done
        if done < limit:
            self._finish_table(table)
        return done

    def _finish_table(self, table: Table) -> None:
        expected = self._snapshot.stats(table)
        if (self._count, self._xor) != expected:
            raise IndexDamaged(
                f"table {table.name.lower()} of the index has {self._count} records with checksum sum "
                f"{self._xor:08x}; {expected[0]} with {expected[1]:08x} were written",
                subject=table.name.lower(),
            )
        self._tables.pop(0)
        self._after = b""
        self._count = self._xor = 0


async def walk(index: Index, offload: Offload, progress: IndexProgress) -> int:
    """Check every record of an open index, beside everything else; their count.  IndexDamaged at the first mismatch."""
    snapshot = await offload.run(index.snapshot)
    with closing(snapshot), progress.of("being checked"):
        index.is_walked = False
        verification = Verification(snapshot)
        count = sum(snapshot.stats(table)[0] for table in Table)
        while await offload.run(verification.step, VERIFY_BATCH):
            progress.checked(verification.record_count, count)
            await trio.sleep(_WALK_PAUSE_S)
        index.is_walked = True
        return verification.record_count
