"""Survey of the files of a closed store: the whole ones, and the sources that the tables can be read from.

The store's lock is held.  Nothing is changed on disk, and all functions block.  `lake fsck --data` reports the survey;
`engine.fsck.repair` acts on it.  Payloads are not read, and names not compared: the check of the open store does that.

The tables (chunks, nodes, names, ...) are stored twice: in checkpoint and journal, and in the index.  `TableSources`
says up to which group each is good.  A file is bad if it is not as it was written: cut short, changed, or another
store's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from engine.format.layouts import StoreIdentity
from engine.host import crash_marker as crash_marker
from engine.journal.reader import JOURNAL_FOLDER, JournalFile, journal_file, journal_paths, sequence_in
from engine.journal.salvage import checked_end, highest_readable
from engine.metadata.checkpoint import CHECKPOINT_FOLDER, Checkpoint, checkpoints, read_checkpoint
from engine.metadata.recovery import INDEX_FOLDER
from engine.segments.files import SEGMENTS_FOLDER, check_segment_header, parse_segment_name
from engine.superblock.superblock import COPY_PATH, SUPERBLOCK_PATH, BadFile, Superblock, read_head, what_is_wrong
from engine.tables.index_check import Verification
from engine.tables.lmdb_index import Index
from lakefs.errors import CorruptionError, IndexDamaged, LakeError, StoreDamaged, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import Sequence
from lakefs.ports import Disk

INDEX: Final = "index"
_TEMPORARY_SUFFIX: Final = ".new"
_VERIFIED_AT_ONCE: Final = 65_536


@dataclass(frozen=True)
class TableSources:
    """The sources of a store's tables.  `files` and `checkpoint` are the usable ones."""

    identity: StoreIdentity
    clean_sequence: int | None
    checkpoint: Checkpoint | None
    bad_checkpoints: tuple[BadFile, ...]
    files: tuple[JournalFile, ...]
    bad_files: tuple[BadFile, ...]
    """Journal files with a bad header."""
    applied: Sequence | None
    """The last group in the index if it is whole, every record checked; None if it is not whole."""
    bad_index: BadFile | None
    durable: Sequence
    """Every group up to this one was durable once."""
    end: Sequence
    """The last group, if `problem` is None."""
    problem: LakeError | None
    """The error that keeps checkpoint and journal from having every group."""

    @property
    def after(self) -> Sequence:
        """The last group in the checkpoint."""
        return Sequence(0) if self.checkpoint is None else self.checkpoint.sequence

    def is_superseded(self, path: str, after: Sequence) -> bool:
        """Return True if a usable journal file begins behind this one, and no later than with group `after` + 1."""
        return any(path < file.path and file.first_sequence <= after + 1 for file in self.files)


def survey_tables(disk: Disk, superblock: Superblock) -> TableSources:
    """Read checkpoints, journal and index whole.  Raises StoreUnusable for file names that no release writes."""
    identity, clean = superblock.identity, superblock.clean_sequence
    checkpoint, bad_checkpoints, written = _checkpoints(disk, identity)
    files, bad_files = _journal(disk, identity)
    applied, noted, bad_index = _index(disk, identity)
    durable = Sequence(max(clean or 0, written, noted))
    sources = TableSources(
        identity, clean, checkpoint, bad_checkpoints, files, bad_files, applied, bad_index, durable, Sequence(0), None
    )
    if applied is not None and applied < sources.after:
        reason = f"it ends with group {applied}, before the checkpoint's {sources.after}"
        sources = replace(sources, applied=None, bad_index=BadFile(Finding.INDEX_BEHIND, INDEX, reason))
    try:
        return replace(sources, end=_told_end(disk, sources))
    except (CorruptionError, StoreUnusable) as error:
        return replace(sources, problem=error)


def foreign_segments(disk: Disk, store_id: bytes) -> Iterator[BadFile]:
    """Yield segment files whose header is good but is another segment's, or another store's."""
    for name in disk.list_folder(SEGMENTS_FOLDER):
        parsed = parse_segment_name(name)
        if parsed is None:
            continue
        path = f"{SEGMENTS_FOLDER}/{name}"
        try:
            check_segment_header(read_head(disk, path), store_id, *parsed)
        except StoreDamaged as error:
            yield BadFile(error.finding, path, what_is_wrong(error))


def given_up_groups(disk: Disk, files: tuple[JournalFile, ...]) -> Iterator[BadFile]:
    """Yield journal files with groups that the next file makes void, beyond the one that a start copies into it."""
    for file, following in pairwise(files):
        highest = highest_readable(disk, file)
        if highest > following.first_sequence:
            yield BadFile(
                Finding.JOURNAL_GROUPS_VOID,
                file.path,
                f"its groups {following.first_sequence} to {highest} do not count: {following.path} began in their "
                "place; two engines had the store open at once, or a write to the journal had failed",
            )


def leftovers(disk: Disk) -> list[str]:
    """Return the files that a crash left half-written, under the temporary names of a write."""
    found = [
        f"{folder}/{name}"
        for folder in (JOURNAL_FOLDER, CHECKPOINT_FOLDER)
        for name in disk.list_folder(folder)
        if name.endswith(_TEMPORARY_SUFFIX)
    ]
    own = (SUPERBLOCK_PATH + _TEMPORARY_SUFFIX, COPY_PATH + _TEMPORARY_SUFFIX)
    return [*found, *(path for path in own if disk.exists(path))]


def _checkpoints(disk: Disk, identity: StoreIdentity) -> tuple[Checkpoint | None, tuple[BadFile, ...], Sequence]:
    """Return the newest whole checkpoint, the bad ones, and the highest sequence in any checkpoint's name."""
    newest: Checkpoint | None = None
    bad: list[BadFile] = []
    highest = Sequence(0)
    for checkpoint in reversed(list(checkpoints(disk))):
        highest = max(highest, checkpoint.sequence)
        try:
            with closing(read_checkpoint(disk, checkpoint.path, identity.store_id)) as reader:
                for _ in reader.records():
                    pass
            newest = checkpoint
        except (StoreDamaged, StoreUnusable) as error:
            bad.append(BadFile(error.finding, checkpoint.path, what_is_wrong(error)))
    return newest, tuple(bad), highest


def _journal(disk: Disk, identity: StoreIdentity) -> tuple[tuple[JournalFile, ...], tuple[BadFile, ...]]:
    files: list[JournalFile] = []
    bad: list[BadFile] = []
    for path in journal_paths(disk):
        sequence_in(path)
        try:
            files.append(journal_file(disk, path, identity.store_id))
        except (CorruptionError, StoreUnusable) as error:
            bad.append(BadFile(error.finding, path, what_is_wrong(error)))
    return tuple(files), tuple(bad)


def _index(disk: Disk, identity: StoreIdentity) -> tuple[Sequence | None, Sequence, BadFile | None]:
    """Return the index's last group, or None if it is not whole; the group it claims; and its problem."""
    nothing = Sequence(0)
    path = Path(disk.local_path(INDEX_FOLDER))
    if crash_marker.died_in_index(disk):
        return None, nothing, BadFile(Finding.INDEX_READER_DIED, INDEX, "a process died while it read it")
    if not (path / "data.mdb").exists():
        return None, nothing, BadFile(Finding.INDEX_MISSING, INDEX, "it is missing")
    try:
        index = Index(path)
    except IndexDamaged as error:
        return None, nothing, BadFile(error.finding, INDEX, what_is_wrong(error))
    noted = nothing
    with closing(index):
        try:
            if index.is_foreign(identity.store_id):
                return None, nothing, BadFile(Finding.INDEX_FOREIGN, INDEX, "it is another store's")
            noted = index.applied
            with closing(index.snapshot()) as snapshot:
                verification = Verification(snapshot)
                while verification.step(_VERIFIED_AT_ONCE):
                    pass
        except IndexDamaged as error:
            return None, noted, BadFile(error.finding, INDEX, what_is_wrong(error))
    return noted, noted, None


def _told_end(disk: Disk, sources: TableSources) -> Sequence:
    """Return the journal's last group, if no group up to it is missing.  Raises CorruptionError, StoreUnusable."""
    for bad in sources.bad_files:
        if not sources.is_superseded(bad.path, sources.after):
            journal_file(disk, bad.path, sources.identity.store_id)  # raises its problem
    boot = sources.identity.boot_before if sources.clean_sequence is None else b""
    end = checked_end(disk, sources.files, sources.after, sources.durable, boot)
    assert end.sequence >= sources.durable >= sources.after, "the journal ends behind all that was durable"
    return end.sequence
