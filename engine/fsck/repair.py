"""`lake fsck --repair` and `lake fsck --rebuild`, with the store closed and its lock held throughout.

`--rebuild` makes the index anew from checkpoint and journal; payloads are neither read nor changed.  `--repair` does
the certain repairs and reports them; it changes nothing else.

Certain repairs, by the bad file:
- the superblock or its copy: it is written anew from the other one;
- the index: it is rebuilt, if checkpoint and journal have every group;
- a checkpoint, or journal files: if the index is whole, and the index with the readable part of the journal has every
  group that was durable, a checkpoint is written from it and the journal continues in a new file;
- a journal file whose groups are all in the checkpoint, an old checkpoint, a segment's file whose header is another
  segment's or another store's: they are set aside;
- files under temporary names: a crash left them half-written, and they are removed.

Rules kept here:
- A file that may still be wanted is renamed into `set-aside/`, never removed.
- Each step leaves a store that is no worse.  An interrupted repair can be repeated; after a finished one there is
  nothing left to do.
- No acknowledged group is forgotten: if one cannot be read, journal and index stay unchanged, and the report says what
  is missing.  Only `--rebuild --accept-loss` gives groups up; its report says from which on.

Damaged payloads are found by the check of the open store, which quarantines them.  All functions block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from engine.fsck.survey import TableSources, foreign_segments, given_up_groups, leftovers, survey_tables
from engine.host.clock import SystemClock
from engine.host.crash_marker import noting_crashes
from engine.host.failpoints import reached
from engine.host.local_disk import LocalDisk
from engine.journal.reader import JOURNAL_FOLDER, Group, JournalFile, check_groups, find_end, journal_path, read_groups
from engine.journal.salvage import highest_readable, place_behind, refuse_lost_boot
from engine.journal.writer import start_journal
from engine.metadata.checkpoint import write_checkpoint
from engine.metadata.index_building import apply_groups, rebuild_index
from engine.metadata.recovery import INDEX_FOLDER, rebuild_store
from engine.superblock.superblock import (
    COPY_PATH,
    LOCK_PATH,
    ROOT_FOLDER,
    SUPERBLOCK_PATH,
    BadFile,
    Superblock,
    Superblocks,
    open_store,
    survey_superblocks,
    what_is_wrong,
    write_one,
    write_superblock,
)
from engine.tables.index_check import IndexProgress
from engine.tables.lmdb_index import Index
from lakefs.errors import CorruptionError, LakeError, StoreUnusable
from lakefs.findings import Finding
from lakefs.ids import Sequence
from lakefs.ports import Clock, Disk

_log: Final = structlog.get_logger(__name__)
SET_ASIDE_FOLDER: Final = "set-aside"


@dataclass(frozen=True)
class Repair:
    """One repair that was done.  `kept_as` is the new path of the bad file; empty if there was none."""

    code: str
    object: str
    problem: str
    action: str
    kept_as: str = ""


@dataclass
class FilesReport:
    """The bad files of a closed store, and the repairs done."""

    found: list[BadFile] = field(default_factory=list)
    """Without repair: all bad files found.  With it: those left."""
    repairs: list[Repair] = field(default_factory=list)
    can_be_opened: bool = True
    """True if the store may be opened next: the superblock is good, so that opening does not change it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report for scripts; JSON-able."""
        return {
            "findings": [bad.finding.as_json(bad.path, bad.reason) for bad in self.found],
            "repairs": [vars(repair) for repair in self.repairs],
            "can_be_opened": self.can_be_opened,
        }


def check_files(data: Path, *, repair: bool) -> FilesReport:
    """Look at the files of the store in a folder; with `repair`, repair them.

    Raises StoreLocked while an engine has the store; StoreUnusable if there is none, or if it is of a later release;
    StoreFull, DiskFailed: repairs done before stay done.
    """
    disk = LocalDisk(data)
    if not any(disk.exists(path) for path in (SUPERBLOCK_PATH, COPY_PATH, "journal")):
        raise StoreUnusable(f"there is no store in {data}; lake serve --data {data} makes one", subject=str(data))
    with closing(disk.lock(LOCK_PATH)), noting_crashes(disk):
        return (repair_files if repair else find_bad_files)(disk, SystemClock())


def rebuild(data: Path, *, accept_loss: bool = False) -> dict[str, Any]:
    """Rebuild the index of the store in a folder; returns the report, JSON-able.  Blocks.

    Raises StoreLocked while an engine has the store; StoreUnusable if there is none; JournalDamaged with the place.
    With `accept_loss`, everything from the damage on is given up instead, and the report says from where.
    """
    disk, clock = LocalDisk(data), SystemClock()
    opened = open_store(disk, clock, create=False)
    with closing(opened.lock):
        for warning in opened.warnings:
            _log.warning(warning)
        superblock = opened.superblock
        report = rebuild_store(disk, clock, superblock.identity, superblock.clean_sequence, accept_loss=accept_loss)
        if report.lost_from:
            # The journal ends before the clean stop that the superblock notes: that note is no longer true.
            write_superblock(disk, replace(superblock, clean_sequence=None))
    return report.as_dict()


def find_bad_files(disk: Disk, clock: Clock) -> FilesReport:
    """Return all bad files; changes nothing.  The caller holds the lock."""
    report = FilesReport()
    try:
        superblocks = survey_superblocks(disk)
    except CorruptionError as error:
        return FilesReport([BadFile(error.finding, error.subject, error.message)], can_be_opened=False)
    sources = survey_tables(disk, superblocks.good)
    report.found += [*superblocks.bad, *sources.bad_checkpoints, *sources.bad_files]
    report.found += foreign_segments(disk, superblocks.good.store_id)
    if sources.bad_index and sources.durable:
        report.found.append(sources.bad_index)
    if sources.problem is not None:
        _add_problem(report, sources.problem)
    report.found += given_up_groups(disk, sources.files)
    report.can_be_opened = SUPERBLOCK_PATH not in {bad.path for bad in superblocks.bad}
    return report


def repair_files(disk: Disk, clock: Clock, *, index_committed: Callable[[], None] | None = None) -> FilesReport:
    """Do the repairs that are certain; the caller holds the lock.  Raises StoreUnusable, StoreFull, DiskFailed."""
    work = _Repairing(disk, clock, index_committed)
    try:
        superblocks = survey_superblocks(disk)
    except CorruptionError as error:
        return FilesReport([BadFile(error.finding, error.subject, error.message)], can_be_opened=False)
    work.superblocks(superblocks)
    work.remove_leftovers()
    for bad in list(foreign_segments(disk, superblocks.good.store_id)):
        work.set_aside(bad, "set aside: the objects that it should hold are listed as damaged")
    work.tables(superblocks.good)
    return work.report


class _Repairing:
    """The steps of one repair, each durable on return."""

    def __init__(self, disk: Disk, clock: Clock, index_committed: Callable[[], None] | None) -> None:
        self._disk = disk
        self._clock = clock
        self._index_committed = index_committed
        self.report = FilesReport()

    def superblocks(self, found: Superblocks) -> None:
        """Write a bad superblock, or copy of it, anew from the other one."""
        for bad in found.bad:
            kept_as = self._move_away(bad.path)
            write_one(self._disk, bad.path, found.good.pack())
            reached("repair.superblock-restored")
            source = COPY_PATH if bad.path == SUPERBLOCK_PATH else SUPERBLOCK_PATH
            self._done(bad, f"written anew from {source}", kept_as)

    def remove_leftovers(self) -> None:
        """Remove files that a crash left half-written."""
        for path in leftovers(self._disk):
            self._disk.unlink(path)
            self._disk.sync_folder(path.rpartition("/")[0])
            self._done(BadFile(Finding.FILE_HALF_WRITTEN, path, "a crash left it half-written"), "removed")

    def set_aside(self, bad: BadFile, action: str) -> None:
        """Rename a bad file into the folder where nothing is looked up."""
        self._done(bad, action, self._move_away(bad.path))

    def tables(self, superblock: Superblock) -> None:
        """Make checkpoint, journal and index agree again, if it is certain that no group is lost."""
        sources = survey_tables(self._disk, superblock)
        if sources.problem is not None:
            try:
                self._save(sources, sources.problem)
            except (CorruptionError, StoreUnusable) as error:
                self._refuse(sources, error)
                return
            if sources.bad_index:
                self._rebuild(survey_tables(self._disk, superblock), sources.bad_index)
        else:
            for bad in sources.bad_checkpoints:
                self.set_aside(bad, "set aside: an older one and the journal tell the same")
            self._set_aside_superseded(sources.bad_files)
            if sources.bad_index and sources.end:
                self._rebuild(sources, sources.bad_index)

    def _refuse(self, sources: TableSources, problem: LakeError) -> None:
        """Report the problem; groups may be missing, so the files stay as they are."""
        self.report.found += [*sources.bad_checkpoints, *sources.bad_files]
        if sources.bad_index:
            self.report.found.append(sources.bad_index)
        _add_problem(self.report, problem)

    def _rebuild(self, sources: TableSources, bad_index: BadFile) -> None:
        disk = self._disk
        path = Path(disk.local_path(INDEX_FOLDER))
        rebuild_index(disk, sources.identity, sources.files, sources.end, path).close()
        if self._index_committed is not None:
            self._index_committed()
        reached("repair.index-rebuilt")
        self._done(bad_index, "made anew from checkpoint and journal")

    # --- from the index ------------------------------------------------------------------------------

    def _save(self, sources: TableSources, problem: LakeError) -> None:
        """Continue from the index, or from a checkpoint with nothing behind it, in place of the unreadable files.

        Raises CorruptionError if groups may be missing.
        """
        disk, before = self._disk, len(self.report.repairs)
        told = sources.after if sources.applied is None else sources.applied
        end, groups = _behind(disk, sources, told, problem)
        unreadable = [*sources.bad_files, *_unreadable(disk, sources.files, end)]
        assert end >= told, "a repair loses no group"
        if sources.applied is not None:
            self._save_index(sources, groups, end, problem)
        elif end > told or sources.bad_checkpoints:
            raise problem
        # The journal has a file at each moment, unless a bad one has the new one's name; then the stop was clean.
        name = journal_path(Sequence(end + 1))
        self._set_aside_superseded(bad for bad in unreadable if bad.path == name)
        start_journal(disk, sources.identity, self._clock, end_sequence=end, carried=None, files=()).close()
        reached("repair.journal-begun")
        self._set_aside_superseded(bad for bad in unreadable if bad.path != name)
        if len(self.report.repairs) == before:
            done = "goes on in a new file; the checkpoint has everything"
            self._done(BadFile(problem.finding, JOURNAL_FOLDER, what_is_wrong(problem)), done)

    def _set_aside_superseded(self, files: Iterable[BadFile]) -> None:
        for bad in files:
            self.set_aside(bad, "set aside: the checkpoint has all that it held")

    def _save_index(self, sources: TableSources, groups: Iterable[Group], end: Sequence, problem: LakeError) -> None:
        """Bring the index up to `end`, and write a checkpoint of it."""
        with closing(Index(Path(self._disk.local_path(INDEX_FOLDER)))) as index:
            index.owner, index.committed = sources.identity.store_id, self._index_committed
            if index.applied < end:
                apply_groups(index, groups, end, IndexProgress())
            assert index.applied == end, "the index has every group"
            reached("repair.tail-applied")
            for bad in sources.bad_checkpoints:
                self.set_aside(bad, "set aside: a new one was written from the index")
            if sources.after < end:
                self._write_checkpoint(sources, index, problem)

    def _write_checkpoint(self, sources: TableSources, index: Index, problem: LakeError) -> None:
        with closing(index.snapshot()) as snapshot:
            written = write_checkpoint(self._disk, sources.identity, snapshot)
        assert written.sequence == index.applied, "the checkpoint has all that the index has"
        reached("repair.saved")
        bad = BadFile(problem.finding, written.path, what_is_wrong(problem))
        self._done(bad, "written from the index, which has everything")

    # --- files ---------------------------------------------------------------------------------------

    def _move_away(self, path: str) -> str:
        """Set a file aside; returns its new path, or "" if it does not exist."""
        disk = self._disk
        if not disk.exists(path):
            return ""
        disk.make_folder(SET_ASIDE_FOLDER)
        disk.sync_folder(ROOT_FOLDER)
        there = set(disk.list_folder(SET_ASIDE_FOLDER))
        name = path.replace("/", ".")
        number = 1
        while f"{name}.{number}" in there:
            number += 1
        kept_as = f"{SET_ASIDE_FOLDER}/{name}.{number}"
        disk.rename(path, kept_as)
        disk.sync_folder(SET_ASIDE_FOLDER)
        disk.sync_folder(path.rpartition("/")[0])
        assert disk.exists(kept_as), "a bad file is renamed, not removed"
        reached("repair.set-aside")
        return kept_as

    def _done(self, bad: BadFile, action: str, kept_as: str = "") -> None:
        self.report.repairs.append(Repair(bad.finding.code, bad.path, bad.reason, action, kept_as))


def _behind(disk: Disk, sources: TableSources, told: Sequence, problem: LakeError) -> tuple[Sequence, Iterable[Group]]:
    """Return the last durable group, and those behind `told`.  Raises CorruptionError if one may be missing."""
    files = sources.files
    if told == sources.durable == sources.clean_sequence and not any(
        file.first_sequence > told + 1 or highest_readable(disk, file) > told for file in files
    ):
        return told, ()
    if not all(sources.is_superseded(bad.path, told) for bad in sources.bad_files):
        raise problem
    holding = [file for file in files if file.first_sequence <= told + 1]
    if not holding:
        raise problem
    files = tuple(file for file in files if file.first_sequence >= holding[-1].first_sequence)
    begin = place_behind(disk, files[0], told)
    end = find_end(disk, files, sources.durable, begin).sequence
    if sources.clean_sequence is None:
        refuse_lost_boot(sources.files, end, sources.identity.boot_before)
    check_groups(disk, files, told, end, begin)
    return end, read_groups(disk, files, told, end, begin)


def _unreadable(disk: Disk, files: tuple[JournalFile, ...], end: Sequence) -> list[BadFile]:
    """Return the journal files in which a group up to `end` cannot be read."""
    bad: list[BadFile] = []
    if not files:
        return bad
    followers = [Sequence(file.first_sequence - 1) for file in files[1:]]
    for file, last in zip(files, [*followers, end], strict=True):
        try:
            check_groups(disk, (file,), Sequence(file.first_sequence - 1), min(last, end))
        except CorruptionError as error:
            bad.append(BadFile(error.finding, file.path, what_is_wrong(error)))
    return bad


def _add_problem(report: FilesReport, problem: LakeError) -> None:
    if problem.subject not in {bad.path for bad in report.found}:
        report.found.append(BadFile(problem.finding, problem.subject, problem.message))
