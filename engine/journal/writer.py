"""The journal's writer: appends groups of mutations, and syncs each.

Rules kept here:
- Group n+1 is written only after group n's `fdatasync` returned.  So after a crash, at most the last group of a journal
  is in doubt.
- A journal file appears under its name only whole: written under a temporary name, synced, renamed, folder
  synced.  So a file without a good header is damage, never a torn write.
- After an unclean stop the new file begins with a copy of the last good group, written and synced anew.  A reader may
  have seen that group in the page cache only: never synced, or dropped by the kernel after a failed sync.  A
  later file ends its predecessor (`docs/format.md`), so only the copy counts.
- A group counts as written only while this journal's file is the last one, and at its path.  A later file, or another
  one at that path, is another process's: its groups end or replace this file's, and later appends here would be lost.
  So the append raises StoreReadOnly, and no later group may be acknowledged.
- A failed write or sync is never retried; the journal refuses every later append.  Exceptions, for lack of room:
  extending the file and writing a new one, still under its temporary name, are retried after a part of the store's
  reserve was released.  If no new file can be begun, the journal stays in its file, beyond the usual length.

All methods block and are called by one thread at a time.  `engine.journal.reader` reads the journal.
`engine.metadata.group_commit` decides on the content of groups, and on the consequences of a failure for the store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog
from crc32c import crc32c

from engine.format.layouts import (
    FORMAT_VERSION,
    GROUP_HEADER,
    GROUP_MAGIC,
    JOURNAL_HEADER,
    JOURNAL_MAGIC,
    PAGE,
    StoreIdentity,
)
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.host.failpoints import reached
from engine.host.zeros import zeros
from engine.journal.reader import JOURNAL_FOLDER, Group, JournalFile, is_journal_name, journal_path
from lakefs.errors import EngineBusy, LakeError, StoreFull, StoreReadOnly
from lakefs.ids import Sequence
from lakefs.ports import Clock, Disk, DiskFile

_log: Final = structlog.get_logger(__name__)
_GROUP_CHECKED_BYTES: Final = GROUP_HEADER.size - 4
_FILE_CHECKED_BYTES: Final = JOURNAL_HEADER.size - 4


def no_reserve() -> bool:
    """Return False: the `release_reserve` of a store without a reserve."""
    return False


class Journal:
    """The open journal.  `bytes_written` counts whole groups, padding included, since it was opened."""

    def __init__(
        self,
        disk: Disk,
        identity: StoreIdentity,
        clock: Clock,
        release_reserve: Callable[[], bool],
        sizes: MetadataSizes = DEFAULT_SIZES,
    ) -> None:
        """Use `start_journal`.  `release_reserve` frees a part of the reserve; it returns False when none is left."""
        self._disk = disk
        self._identity = identity
        self._boot_tag = identity.boot_tag
        self._clock = clock
        self._release_reserve = release_reserve
        self._sizes = sizes
        self._file: DiskFile | None = None
        self._first_sequence = Sequence(0)  # of the file that is being appended to; such a file is never removed
        self._path = ""
        self._inode = 0
        self._end = 0  # offset of the next group
        self._filled = 0  # blocks are written up to this offset
        self._broken: LakeError | None = None
        self.bytes_written = 0

    @property
    def first_sequence(self) -> Sequence:
        """The first group of the file that is written now."""
        return self._first_sequence

    def append_blocking(self, sequence: Sequence, body: bytes, record_count: int) -> None:
        """Write one group and sync it; durable on return.

        After an error (StoreFull, StoreReadOnly, DiskFailed) it is unknown if the group is on the medium, and every
        later append raises StoreReadOnly.
        """
        if self._broken is not None:
            raise StoreReadOnly(f"an earlier write to the journal failed: {self._broken}") from self._broken
        assert self._file is not None, "the journal is closed"
        try:
            self._append(sequence, self._pack(sequence, self._clock.wall_ns(), body, record_count))
        except LakeError as error:
            self._broken = error
            raise

    def begin_file(self, first_sequence: Sequence, carried: Group | None = None) -> None:
        """Continue in a new file, which may begin with a copy of its first group; durable on return.

        If no file can be created, takes an inode from the reserve.
        """
        while True:
            try:
                file = self._open_temporary(first_sequence)
                break
            except StoreFull:
                if not self._release_reserve():
                    raise
        self._go_on_in(file, first_sequence, carried)

    def _go_on_in(self, file: DiskFile, first_sequence: Sequence, carried: Group | None = None) -> None:
        parts = [self._pack_file_header(first_sequence)]
        if carried is not None:
            assert carried.sequence == first_sequence, "a file is named by its first group"
            parts += self._pack(carried.sequence, carried.time_ns, carried.body, carried.record_count)
        path = journal_path(first_sequence)
        self._make_whole(file, path, parts)
        self.close()
        self._file = file
        self._path, self._inode = path, self._disk.stat(path).inode
        self._first_sequence = first_sequence
        self._end = self._filled = sum(map(len, parts))
        assert self._end % PAGE == 0, "groups begin at pages"

    def close(self) -> None:
        """Cut off the zeros behind the last group and close the file.  No append may follow."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._broken is None and self._filled > self._end:
                file.truncate(self._end)
        finally:
            file.close()

    def _begin_next(self, sequence: Sequence) -> None:
        """Begin the next file, or stay in this one beyond its length while no descriptor or room can be had.

        This file may still grow: its room may come from the reserve.
        """
        try:
            file = self._open_temporary(sequence)
        except (EngineBusy, StoreFull) as error:
            _log.warning("the journal goes on in its file: no other can be opened", reason=error.message)
        else:
            self._go_on_in(file, sequence)

    def _append(self, sequence: Sequence, parts: list[bytes]) -> None:
        group_bytes = sum(map(len, parts))
        if self._end > PAGE and self._end + group_bytes > self._sizes.journal_file:
            self._begin_next(sequence)
        file = self._file
        assert file is not None, "the journal is open"
        assert group_bytes % PAGE == 0, "groups are whole pages"
        assert sequence >= self._first_sequence, "a file holds no group before its first"
        end = self._end + group_bytes
        filled = self._filled
        if end > filled:
            filled = self._extend(file, end)
            reached("journal.extended")
        file.pwritev(parts, self._end)
        assert end <= filled, "room and zeros reach to the group's end"
        reached("journal.written")
        file.sync_data()
        reached("journal.synced")
        self._refuse_another_writer()
        self._end, self._filled = end, filled
        self.bytes_written += group_bytes

    def _refuse_another_writer(self) -> None:
        """Raise StoreReadOnly when another process has begun a file of this journal; 6 us with few files."""
        path = self._path
        names = self._disk.list_folder(JOURNAL_FOLDER)
        last = [f"{JOURNAL_FOLDER}/{name}" for name in list(filter(is_journal_name, names))[-1:]]
        with suppress(FileNotFoundError):
            if last == [path] and self._disk.stat(path).inode == self._inode:
                return
        self._disk.check_lock()  # raises a better error when the whole folder was replaced
        raise StoreReadOnly(
            f"another process has begun {last[0]}, or taken {path} away, under the engine, which writes nothing more: "
            "stop that process, restart the engine, and run: lake fsck"
            if last
            else f"the files of {JOURNAL_FOLDER}/ were taken away under the engine, which writes nothing more",
            subject=JOURNAL_FOLDER,
        )

    def _extend(self, file: DiskFile, group_end: int) -> int:
        """Allocate room and write zeros behind `group_end`, covered by the group's own sync; returns the new fill end.

        On a full disk allocates room for the group alone, if need be from the reserve.
        """
        fill = self._sizes.journal_fill
        target = -(-group_end // fill) * fill
        start = self._filled
        while True:
            try:
                file.allocate(start, target - start)
                file.pwritev(zeros(target - group_end), group_end)
            except StoreFull:
                if target == group_end and not self._release_reserve():
                    raise
                target = group_end
            else:
                return target

    def _open_temporary(self, first_sequence: Sequence) -> DiskFile:
        """Create the file that begins with that group, under its temporary name."""
        temporary = f"{journal_path(first_sequence)}.new"
        if self._disk.exists(temporary):
            self._disk.unlink(temporary)
        return self._disk.open(temporary, create=True)

    def _make_whole(self, file: DiskFile, path: str, parts: list[bytes]) -> None:
        """Write a temporary file, sync it and rename it to `path`; closes it on an error."""
        try:
            self._write_new(file, parts)
            reached("journal-file.written")
            file.sync_data()
            reached("journal-file.synced")
            self._disk.rename(f"{path}.new", path)
            reached("journal-file.renamed")
            self._disk.sync_folder(JOURNAL_FOLDER)
            reached("journal-file.durable")
        except BaseException:
            file.close()
            raise

    def _write_new(self, file: DiskFile, parts: list[bytes]) -> None:
        """Write the content of a temporary file; on a full disk takes room from the reserve."""
        while True:
            try:
                file.pwritev(parts, 0)
                return
            except StoreFull:
                if not self._release_reserve():
                    raise

    def _pack_file_header(self, first_sequence: Sequence) -> bytes:
        identity = self._identity
        head = JOURNAL_HEADER.pack(
            JOURNAL_MAGIC,
            FORMAT_VERSION,
            bytes(4),
            first_sequence,
            identity.store_id,
            identity.boot_id,
            identity.boot_before[:4],
            0,
        )[:_FILE_CHECKED_BYTES]
        return (head + crc32c(head).to_bytes(4, "little")).ljust(PAGE, b"\0")

    def _pack(self, sequence: Sequence, time_ns: int, body: bytes, record_count: int) -> list[bytes]:
        """Return header, body and padding of a group."""
        head = GROUP_HEADER.pack(
            GROUP_MAGIC, len(body), sequence, time_ns, self._boot_tag, record_count, crc32c(body), bytes(4), 0
        )[:_GROUP_CHECKED_BYTES]
        padding = -(GROUP_HEADER.size + len(body)) % PAGE
        return [head + crc32c(head).to_bytes(4, "little"), body, bytes(padding)]


def start_journal(
    disk: Disk,
    identity: StoreIdentity,
    clock: Clock,
    *,
    end_sequence: Sequence,
    carried: Group | None,
    files: tuple[JournalFile, ...],
    release_reserve: Callable[[], bool] = no_reserve,
    sizes: MetadataSizes = DEFAULT_SIZES,
) -> Journal:
    """Open the journal for appending group `end_sequence` + 1; the new file is durable on return.

    `carried` is the last good group after an unclean stop (None when no file holds one).  `files` that begin behind the
    end hold no acknowledged group, and are removed.
    """
    assert carried is None or carried.sequence == end_sequence, "the last group is the one carried over"
    journal = Journal(disk, identity, clock, release_reserve, sizes)
    first_sequence = carried.sequence if carried is not None else Sequence(end_sequence + 1)
    journal.begin_file(first_sequence, carried)
    path = journal_path(first_sequence)
    behind = [file.path for file in files if file.first_sequence > end_sequence and file.path != path]
    for stale in behind:
        disk.unlink(stale)
        reached("recovery.stale-removed")
    if behind:
        disk.sync_folder(JOURNAL_FOLDER)
    return journal
