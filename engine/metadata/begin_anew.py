"""Lets a store begin anew from another replica's checkpoint, in place of all that its metadata were.

    CheckpointCopy      the bytes arrive, under a temporary name                            the old metadata are whole
    take_over           mark  --  rename the checkpoint and check it  --  remove the index, the journal and older
                        checkpoints  --  begin a journal behind it  --  superblock  --  unmark
    finish              at each opening: goes on where a crash has ended `take_over`

Rules kept here:
- Until the copy is whole and checked, nothing of the old metadata is removed.
- A mark says that what follows may be gone on with, or was not begun.  So a crash leaves the old or the new metadata.
- The copy has this store's identity in its header; its records and their checksum are the other replica's.

All functions block and run in a thread.  The store's lock is held, and nothing of the metadata is open.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.format.layouts import CHECKPOINT_HEADER, StoreIdentity
from engine.host.small_file import replace_small_file
from engine.journal.reader import JOURNAL_FOLDER, journal_paths
from engine.journal.writer import start_journal
from engine.metadata.checkpoint import CHECKPOINT_FOLDER, checkpoint_path, checkpoints, pack_header, read_checkpoint
from engine.metadata.recovery import INDEX_FOLDER
from engine.superblock.superblock import Superblock, write_superblock
from engine.tables.index_folder import remove_index
from lakefs.errors import LakeError
from lakefs.ids import Sequence
from lakefs.ports import Clock, Disk

MARK_PATH: Final = "begins-anew"
"""Its content is the sequence of the checkpoint, as text."""
_MARK_BYTES_MAX: Final = 32


class CheckpointCopy:
    """The copy of a checkpoint, under a temporary name until `take_over`."""

    def __init__(self, disk: Disk, identity: StoreIdentity, sequence: Sequence) -> None:
        """Begin a copy of the checkpoint of a sequence, in place of one that was left.  StoreFull, DiskFailed."""
        self.sequence: Final = sequence
        self._disk = disk
        disk.make_folder(CHECKPOINT_FOLDER)
        path = temporary_path(sequence)
        if disk.exists(path):
            disk.unlink(path)
        self._file = disk.open(path, create=True)
        self._file.pwrite(pack_header(identity, sequence), 0)

    def write(self, piece: bytes, offset: int) -> None:
        """Write bytes of the other replica's file; those of its header are left out.  StoreFull, DiskFailed."""
        skipped = max(0, CHECKPOINT_HEADER.size - offset)
        if len(piece) > skipped:
            self._file.pwrite(piece[skipped:], offset + skipped)

    def close(self, *, whole: bool) -> None:
        """Close the file, synced if it is whole; else it is removed."""
        try:
            if whole:
                self._file.sync_data()
        finally:
            self._file.close()
        if not whole:
            with suppress(LakeError, FileNotFoundError):
                self._disk.unlink(temporary_path(self.sequence))


def temporary_path(sequence: Sequence) -> str:
    """Return the path of a copy that is not taken over yet."""
    return f"{checkpoint_path(sequence)}.copied"


def take_over(disk: Disk, clock: Clock, superblock: Superblock, sequence: Sequence) -> Superblock:
    """Let the copied checkpoint be all that this store's metadata are; returns the superblock, written.

    StoreDamaged for a copy that is not whole: the old metadata stay.  StoreFull, DiskFailed: `finish` goes on.
    """
    replace_small_file(disk, MARK_PATH, b"%d" % sequence)
    disk.rename(temporary_path(sequence), checkpoint_path(sequence))
    return _go_on(disk, clock, superblock, sequence)


def finish(disk: Disk, clock: Clock, superblock: Superblock) -> Superblock:
    """Go on with what a crash has interrupted; returns the superblock, the same if nothing was."""
    sequence = _marked(disk)
    if sequence is None:
        return superblock
    if not disk.exists(checkpoint_path(sequence)):  # not begun: the old metadata are whole
        _unmark(disk)
        return superblock
    return _go_on(disk, clock, superblock, sequence)


def _go_on(disk: Disk, clock: Clock, superblock: Superblock, sequence: Sequence) -> Superblock:
    path = checkpoint_path(sequence)
    disk.sync_folder(CHECKPOINT_FOLDER)  # a process that was killed may have renamed it, and no more
    try:
        read_checkpoint(disk, path, superblock.store_id).close()
    except LakeError:
        disk.unlink(path)
        _unmark(disk)
        raise
    remove_index(Path(disk.local_path(INDEX_FOLDER)))
    _remove(disk, JOURNAL_FOLDER, journal_paths(disk))
    _remove(disk, CHECKPOINT_FOLDER, [other.path for other in checkpoints(disk) if other.path != path])
    start_journal(disk, superblock.identity, clock, end_sequence=sequence, carried=None, files=()).close()
    found = replace(superblock, clean_sequence=sequence)
    write_superblock(disk, found)
    _unmark(disk)
    return found


def _remove(disk: Disk, folder: str, paths: list[str]) -> None:
    for path in paths:
        disk.unlink(path)
    if paths:
        disk.sync_folder(folder)


def _marked(disk: Disk) -> Sequence | None:
    if not disk.exists(MARK_PATH):
        return None
    with closing(disk.open(MARK_PATH, read_only=True)) as file:
        content = bytearray(min(file.size(), _MARK_BYTES_MAX))
        file.pread_into(memoryview(content), 0)
    return Sequence(int(content))


def _unmark(disk: Disk) -> None:
    disk.unlink(MARK_PATH)
    disk.sync_folder("")
