"""The index: the tables in LMDB, derived from checkpoint and journal.  The only importer of lmdb.

Rules kept here:
- Commits are synced.  No weaker mode (NOSYNC, MAPASYNC, WRITEMAP) is ever used: a power loss would corrupt the index.
- One writer at a time, in a thread.  Records, the tables' counts and XORs of checksums, and the applied sequence
  change in one LMDB transaction.
- The loop's reader is one read transaction, open from `refresh` to `refresh`.  `refresh` is called in the step in which
  the overlay drops its applied layer, so overlay and reader together are always one instant.  (Measured: begin and
  abort cost 0.25 us, a get 0.45 us, an apply 0.7 to 1.2 us a record.)
- Every value read is checked against its key, and keys in a row against their order; IndexDamaged otherwise.
- LMDB finds a key by the keys in its branch pages, which no checksum covers.  So until a walk has checked the whole
  index, a key that is not found counts as absent only if the records before and behind it match their checksums and
  enclose it; IndexDamaged otherwise.
- LMDB opens its files itself, so the folder is handled with `os` here and not through the `Disk` port.

Long readers (checkpoint, verification) use a snapshot of their own, `IndexSnapshot`; one at a time, because an open
snapshot keeps LMDB from reusing pages.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb

from engine.format.layouts import Table, open_value, seal_value
from engine.host.failpoints import reached
from engine.host.memory_limits import refuse_little_address_space
from engine.tables.index_folder import sync_path
from engine.tables.overlay import Entry, Layer
from lakefs.errors import DiskFailed, IndexDamaged, LakeError, StoreFull
from lakefs.ids import Sequence
from lakefs.limits import LMDB_MAP_BYTES, MIB, PAGE_BYTES

_APPLIED_KEY: Final = b"applied"
_STORE_KEY: Final = b"store"
_APPLIED: Final = struct.Struct("<Q")
_STATS: Final = struct.Struct("<QI")
DATA_FILE: Final = "data.mdb"
_READERS_MAX: Final = 64
_ROOM_TO_WRITE_BYTES: Final = MIB
"""With less room than this on the disk, a write may be cut short."""
_COMPACT_BYTES_MIN: Final = 64 * MIB
"""A smaller file is not worth copying."""
_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)


@contextmanager
def _translated(doing: str, writing_to: Path | None = None) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _translate(error, doing, writing_to) from error


def _translate(error: lmdb.Error, doing: str, writing_to: Path | None = None) -> LakeError:
    code = error.args[1] if len(error.args) > 1 else getattr(error, "code", 0)
    is_full = isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or code in (errno.ENOSPC, errno.EDQUOT)
    if code == errno.EIO and writing_to is not None:
        # LMDB reports EIO for a write that was cut short, too, and some full disks cut the last write short.
        is_full = _free_bytes(writing_to) < _ROOM_TO_WRITE_BYTES
    if is_full:
        return StoreFull(f"no room to {doing} the index: {error}", subject="index")
    if isinstance(error, _DAMAGE):
        return IndexDamaged(f"cannot {doing} the index: {error}", subject="index")
    return DiskFailed(f"cannot {doing} the index: {error}", subject="index")


def database_of(table: Table) -> str:
    """Return the name of the table's database in LMDB.

    It is the table's name in lower case; that of `coordinator` is older than its use.
    """
    return "segments" if table is Table.COORDINATOR else table.name.lower()


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class IndexPages:
    """Pages of LMDB's file: pages its trees use, and all others."""

    used: int = 0
    free: int = 0
    page_bytes: int = PAGE_BYTES


class Index:
    """An open LMDB environment.  Reads are the loop's; `apply` and `copy_to` run in a writer thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the environment.  IndexDamaged, StoreFull, DiskFailed; ConfigError if it cannot be mapped."""
        refuse_little_address_space()
        self.path = path
        self.committed: Callable[[], None] | None = None
        """Called in the writer's thread after each commit; the simulator learns from it what is durable."""
        self.owner = b""
        """The store's id; when set, the next `apply` writes it to the index."""
        self.is_walked = False
        """True if every record was found by its key, so that a key not found is absent."""
        path.mkdir(mode=0o700, exist_ok=True)
        with _translated("open"):
            self._env = lmdb.open(
                str(path),
                map_size=LMDB_MAP_BYTES,
                max_dbs=len(Table) + 1,
                max_readers=_READERS_MAX,
                readahead=False,
                mode=0o600,
            )
        try:
            self._refuse_truncated()
            with _translated("open"):
                self._databases = self._open_databases()
                self._reader: lmdb.Transaction[bytes] = self._env.begin()
        except BaseException:
            self._env.close()
            raise
        self._get = self._reader.get

    def _refuse_truncated(self) -> None:
        """Raise IndexDamaged for a file shorter than its pages: touching the map past its end would be SIGBUS."""
        state = self._env.info()
        needed = (state["last_pgno"] + 1) * self._env.stat()["psize"]
        size = (self.path / DATA_FILE).stat().st_size
        if size < needed:
            raise IndexDamaged(f"the index has {size} bytes of {needed}", subject="index")

    def _open_databases(self) -> list[lmdb._Database | None]:
        """Return the databases by table id; entry 0 is `meta`.  Creates them in a new index, never in an old one."""
        databases: list[lmdb._Database | None] = [None] * (max(Table) + 1)
        databases[0] = self._env.open_db(b"meta")
        with self._env.begin() as txn:
            is_new = txn.get(_APPLIED_KEY, None, databases[0]) is None
        for table in Table:
            databases[table] = self._env.open_db(database_of(table).encode(), create=is_new)
        return databases

    # --- reading, on the loop ----------------------------------------------------------------------------

    @property
    def applied(self) -> Sequence:
        """Sequence of the last group in the reader's snapshot.  IndexDamaged when it cannot be read."""
        return _applied(self._reader, self._databases[0])

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the checked value in the reader's snapshot; None when absent."""
        try:
            sealed = self._get(key, None, self._databases[table])
        except lmdb.Error as error:
            raise _translate(error, "read") from error
        if sealed is not None:
            return open_value(table, key, sealed)
        if not self.is_walked:
            _show_absent(self._reader, self._databases[table], table, key, or_at=False)
        return None

    def present(self, table: Table, keys: list[bytes]) -> set[bytes]:
        """Return the keys that have a value in the reader's snapshot, which is checked; one call of LMDB for all."""
        database = self._databases[table]
        with _translated("read"), self._reader.cursor(database) as cursor:
            found = cursor.getmulti(keys)
        present = {key for key, sealed in found if open_value(table, key, sealed) is not None}
        if not self.is_walked:
            for key in set(keys) - present:
                _show_absent(self._reader, database, table, key, or_at=False)
        return present

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the checked entries with start <= key < end in the reader's snapshot.  Close it before `refresh`."""
        return _scan(self._reader, self._databases[table], table, start, end, self.is_walked)

    def is_foreign(self, store_id: bytes) -> bool:
        """Return True if the index holds another store's id; an index of an earlier release holds none."""
        with _translated("read"):
            noted = self._reader.get(_STORE_KEY, None, self._databases[0])
        return noted is not None and noted != store_id

    def refresh(self) -> None:
        """Move the reader to the newest state; the caller drops the overlay's applied layer in the same step."""
        with _translated("read"):
            self._reader.abort()
            self._reader = self._env.begin()
        self._get = self._reader.get

    # --- writing, in a thread ----------------------------------------------------------------------------

    def apply(self, layer: Layer, applied: Sequence) -> None:
        """Write a frozen layer and the sequence it ends with, in one synced transaction.

        Errors: StoreFull (nothing changed, may be tried again), IndexDamaged, DiskFailed.
        """
        assert layer.last_sequence <= applied, "the applied sequence covers the layer"
        with self._writing() as txn:
            for table, entries in layer.non_empty_tables():
                self._apply_table(txn, table, entries)
            txn.put(_APPLIED_KEY, _APPLIED.pack(applied), db=self._databases[0])
            if self.owner:
                txn.put(_STORE_KEY, self.owner, db=self._databases[0])

    def load(self, table: Table, records: list[tuple[bytes, bytes]]) -> None:
        """Add records of one table, ascending and behind all present ones; for rebuilding only."""
        checksums = 0
        sealed: list[tuple[bytes, bytes]] = []
        for key, value in records:
            stored = seal_value(table, key, value)
            checksums ^= int.from_bytes(stored[-4:], "little")
            sealed.append((key, stored))
        with self._writing() as txn:
            count, xor = _read_stats(txn, self._databases[0], table)
            with txn.cursor(self._databases[table]) as cursor:
                _, added = cursor.putmulti(sealed, dupdata=False, overwrite=False, append=True)
            if added != len(sealed):
                raise IndexDamaged(f"table {table.name.lower()}: {len(sealed) - added} records out of order")
            stats = _STATS.pack(count + added, xor ^ checksums)
            txn.put(_stats_key(table), stats, db=self._databases[0])

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        with _translated("write", self.path):
            txn = self._env.begin(write=True)
            try:
                yield txn
            except BaseException:
                txn.abort()
                raise
            reached("index.before-commit")
            txn.commit()
            reached("index.committed")
        if self.committed is not None:
            self.committed()

    def _apply_table(self, txn: lmdb.Transaction[bytes], table: Table, entries: dict[bytes, Entry]) -> None:
        """Write one table's entries in key order and update its count and XOR."""
        database = self._databases[table]
        count, xor = _read_stats(txn, self._databases[0], table)
        put, replace, pop = txn.put, txn.replace, txn.pop
        for key in sorted(entries):
            _, value, absent = entries[key]
            if value is None:
                old = None if absent else pop(key, database)
            else:
                sealed = seal_value(table, key, value)
                xor ^= int.from_bytes(sealed[-4:], "little")
                count += 1
                if absent and put(key, sealed, True, False, False, database):
                    continue
                # The key is present (perhaps in spite of `absent`): its old record leaves the sums.
                old = replace(key, sealed, database)
            if old is not None:
                count -= 1
                xor ^= int.from_bytes(old[-4:], "little")
        txn.put(_stats_key(table), _STATS.pack(count, xor), db=self._databases[0])

    # --- whole-index operations --------------------------------------------------------------------------

    def snapshot(self) -> IndexSnapshot:
        """Open a long-lived reader for one thread at a time; close it soon.  The caller keeps it to one at a time."""
        with _translated("read"):
            return IndexSnapshot(self._env.begin(), self._databases)

    def file_bytes(self) -> int:
        """Length of LMDB's file."""
        return (self.path / DATA_FILE).stat().st_size

    def pages(self) -> IndexPages:
        """Count the pages of LMDB's file that are used, and those free for the next writes."""
        page_count = self._env.info()["last_pgno"] + 1
        used = 0
        with _translated("read"), self._env.begin() as txn:
            for database in self._databases:
                if database is not None:
                    stat = txn.stat(database)
                    used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return IndexPages(used, page_count - used, self._env.stat()["psize"])

    def is_mostly_free(self) -> bool:
        """Return True if a compacted copy would save more than half of a file large enough to be worth copying."""
        pages = self.pages()
        is_worth_it = (pages.used + pages.free) * pages.page_bytes >= _COMPACT_BYTES_MIN
        return is_worth_it and pages.used < pages.free

    def copy_to(self, path: Path) -> None:
        """Write a copy without free pages, synced.  StoreFull leaves a partial copy, which the caller removes."""
        path.mkdir(mode=0o700)
        with _translated("copy"):
            self._env.copy(str(path), compact=True)
        sync_path(path / DATA_FILE)
        sync_path(path)

    def close(self) -> None:
        """Close reader and environment.  No snapshot may be open."""
        self._reader.abort()
        self._env.close()


class IndexSnapshot:
    """The index at one instant, for a thread that walks all of it."""

    def __init__(self, txn: lmdb.Transaction[bytes], databases: list[lmdb._Database | None]) -> None:
        self._txn = txn
        self._databases = databases
        self.applied = _applied(txn, databases[0])

    def records(self, table: Table, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield all records of a table behind the key `after`, ascending, checked and without checksums."""
        start = after + b"\0" if after else b""
        return _scan(self._txn, self._databases[table], table, start, None)

    def sealed_records(self, table: Table, after: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield all records of a table behind the key `after`, as stored and unchecked."""
        with _translated("read"), self._txn.cursor(self._databases[table]) as cursor:
            if cursor.set_range(after + b"\0" if after else b"\0"):
                yield from cursor.iternext()

    def sealed(self, table: Table, key: bytes) -> bytes | None:
        """Look up one record as readers do; as stored and unchecked, None when not found."""
        with _translated("read"):
            return self._txn.get(key, None, self._databases[table])

    def ends(self, table: Table) -> list[tuple[bytes, bytes]]:
        """Return the first and the last record, as stored and unchecked; an empty list for an empty table."""
        with _translated("read"), self._txn.cursor(self._databases[table]) as cursor:
            return [cursor.item() for go in (cursor.first, cursor.last) if go()]

    def stats(self, table: Table) -> tuple[int, int]:
        """Return the count of records and the XOR of their checksums, as the writers keep them."""
        return _read_stats(self._txn, self._databases[0], table)

    def close(self) -> None:
        """End the snapshot."""
        self._txn.abort()


def _scan(
    txn: lmdb.Transaction[bytes],
    database: lmdb._Database | None,
    table: Table,
    start: bytes,
    end: bytes | None,
    is_walked: bool = False,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield checked records; compares each key with the one before, as no checksum covers the keys LMDB searches by."""
    if not is_walked:
        _show_absent(txn, database, table, start, or_at=True)
    previous = b""
    with _translated("read"), txn.cursor(database) as cursor:
        if not cursor.set_range(start or b"\0"):
            return
        for key, sealed in cursor.iternext():
            if key < start or key <= previous:
                raise _out_of_order(table)
            if end is not None and key >= end:
                if not is_walked:
                    open_value(table, key, sealed)
                return
            previous = key
            yield key, open_value(table, key, sealed)


def _show_absent(
    txn: lmdb.Transaction[bytes], database: lmdb._Database | None, table: Table, key: bytes, *, or_at: bool
) -> None:
    """Raise IndexDamaged unless the records on both sides of the look-up's end are whole and enclose `key`.

    If a look-up ends at a wrong place, the key lies before the record before it or behind the record behind it.  With
    `or_at` the key itself may be present, as the start of a range.
    """
    with _translated("read"), txn.cursor(database) as cursor:
        if cursor.set_range(key or b"\0"):
            behind, sealed = cursor.item()
            open_value(table, behind, sealed)
            if behind < key or (behind == key and not or_at):
                raise _out_of_order(table)
            has_before = cursor.prev()
        else:
            has_before = cursor.last()
        if has_before:
            before, sealed = cursor.item()
            open_value(table, before, sealed)
            if before >= key:
                raise _out_of_order(table)


def _out_of_order(table: Table) -> IndexDamaged:
    return IndexDamaged(f"table {table.name.lower()} of the index is out of order", subject=table.name.lower())


def _applied(txn: lmdb.Transaction[bytes], meta: lmdb._Database | None) -> Sequence:
    with _translated("read"):
        packed = txn.get(_APPLIED_KEY, None, meta)
    if packed is None or len(packed) != _APPLIED.size:
        raise IndexDamaged("the index does not say up to which sequence it is complete", subject="index")
    return Sequence(_APPLIED.unpack(packed)[0])


def _read_stats(txn: lmdb.Transaction[bytes], meta: lmdb._Database | None, table: Table) -> tuple[int, int]:
    with _translated("read"):
        packed = txn.get(_stats_key(table), None, meta)
    if packed is None:
        return 0, 0
    if len(packed) != _STATS.size:
        raise IndexDamaged(f"the sums of table {table.name.lower()} are not readable", subject="index")
    count, xor = _STATS.unpack(packed)
    return count, xor


def _stats_key(table: Table) -> bytes:
    return b"stats/" + bytes([table])
