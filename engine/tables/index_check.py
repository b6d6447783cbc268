"""Checks that an index is whole: `probe` at each opening, and `walk` through all records after start-up.

`IndexProgress` says how far a walk, or a rebuild, has come.

Values carry checksums over table, key and value.  LMDB's pages that lead to them (roots, keys in branches, places of
records) carry none: a wrong or old root makes a table look empty or old.  So the opening checks the pages of all trees,
both ends of each table, and all counters; a counter that was not found would hand out its numbers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Final

import structlog
import trio

from engine.format.layouts import Table, open_value
from engine.tables.lmdb_index import DATA_FILE, Index, IndexSnapshot
from engine.tables.lmdb_pages import check_pages
from lakefs.errors import IndexDamaged
from lakefs.ids import Sequence
from lakefs.limits import VERIFY_BATCH
from lakefs.ports import Offload

_WALK_PAUSE_S: Final = 0.05
"""Pause between two batches of a walk, which so uses a tenth of a core at most."""
LOGGED_EVERY_RECORDS: Final = 1_000_000
"""A rebuild logs its progress after this many records: some seconds to a minute of work, depending on the disk."""
_log: Final = structlog.get_logger(__name__)


class IndexProgress:
    """Work on a whole index: the work under way, "" when there is none, and its progress as text for people.

    The work is a walk that checks the index, or a rebuild.  Written by one thread, read by any.
    """

    __slots__ = ("_logged", "_records", "doing", "text")

    def __init__(self) -> None:
        self._set("")

    @contextmanager
    def of(self, doing: str) -> Iterator[None]:
        """Report the work as under way until the block ends."""
        self._set(doing)
        try:
            yield
        finally:
            self._set("")

    def _set(self, doing: str) -> None:
        self.doing, self.text = doing, "begun"
        self._records = self._logged = 0

    def checked(self, records: int, of: int) -> None:
        """Set the number of records that the walk has compared."""
        self.text = f"{records} of {of} records checked"

    def loaded(self, records: int, of: int) -> None:
        """Set the number of the checkpoint's records that are in the new index."""
        self.text = f"{records} of {of} records of the checkpoint restored"
        self._log_now_and_then(records)

    def replayed(self, records: int, sequence: Sequence, upto: Sequence) -> None:
        """Add `records` of the journal's groups up to `sequence`, which are in the new index now."""
        self.text = f"the checkpoint and the journal up to group {sequence} of {upto} restored"
        self._log_now_and_then(self._records + records)

    def _log_now_and_then(self, records: int) -> None:
        self._records = records
        if records - self._logged >= LOGGED_EVERY_RECORDS:
            self._logged = records
            _log.warning("the index is being rebuilt", progress=self.text)


def probe(index: Index) -> Sequence:
    """Do the check that every opening needs, and return `index.applied`; reads some 20 leaves.  IndexDamaged."""
    check_pages(index.path / DATA_FILE)
    with closing(index.snapshot()) as snapshot:
        for table in Table:
            ends = snapshot.ends(table)
            for key, sealed in ends:
                open_value(table, key, sealed)
            if bool(ends) != bool(snapshot.stats(table)[0]):
                what = "has records, and none were written" if ends else "looks empty, and records were written"
                raise IndexDamaged(f"table {table.name.lower()} of the index {what}", subject=table.name.lower())
        counters = Verification(snapshot, [Table.COUNTERS])
        while counters.step(64):
            pass
        return snapshot.applied


class Verification:
    """Compares every record with its checksum, and each table with its count and XOR, step by step.

    Every record is looked up by its key, too.  A walk follows pages and ignores the keys in branch pages; a look-up
    follows those keys, which no checksum covers.  When every present record is found by its key, a look-up of any
    other key ends between its true neighbours.

    It works on one snapshot, so writers may continue during the check.
    """

    def __init__(self, snapshot: IndexSnapshot, tables: Iterable[Table] = Table) -> None:
        self._snapshot = snapshot
        self._tables = list(tables)
        self._after = b""
        self._count = self._xor = 0
        self.record_count = 0

    def step(self, limit: int) -> bool:
        """Check up to `limit` records; returns False when all are done.  IndexDamaged names table and key, or sums."""
        while self._tables and limit > 0:
            limit -= self._check_records(self._tables[0], limit)
        return bool(self._tables)

    def _check_records(self, table: Table, limit: int) -> int:
        """Check the next records of the first table, and its sums after the last one; returns how many."""
        assert limit > 0, "a step checks at least one record"
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
    """Check every record of an open index while it is used; returns their count.  IndexDamaged on a mismatch."""
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
