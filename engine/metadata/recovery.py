"""Recovery: makes servable tables from the journal, checkpoint and index on a disk.

    open the index  --  find the journal's end  --  begin a new journal file  --  rebuild the index if it is unfit  --
    replay the rest

Rules kept here:
- The journal decides.  The index is used only when its last group lies between the newest checkpoint and the journal's
  end.  A missing, unreadable or older index is rebuilt in a folder of its own, which then takes its place.  An index
  *ahead* of the journal is not rebuilt: it holds durable groups that the journal lost, and a rebuild would lose them
  silently.  That is JournalDamaged, here and for a rebuild without `accept_loss`.
- No replayed group is used before the journal's new file is durable: the file may hold the copy of the last group.
- Damage in the journal ends the start: JournalDamaged names the place.  `rebuild_store` with `accept_loss` gives up the
  damaged group and all later ones: files that begin behind it are renamed to `.lost`, and a new file begins there.
- Unless the index is rebuilt, an opening walks no records: it reads the page headers of the index, 0.4 s of CPU for a
  million records (`engine.tables.lmdb_pages`), and replays the groups that the index lacks.
- Memory is bounded: groups beyond a batch are applied to the index on the way.

All functions block and run in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from engine.format.layouts import StoreIdentity, Table
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.host import crash_marker as crash_marker
from engine.host.failpoints import reached
from engine.journal.reader import (
    JOURNAL_FOLDER,
    DamagedAt,
    Group,
    JournalDamage,
    JournalEnd,
    JournalFile,
    check_groups,
    decode_records,
    journal_paths,
    list_journal,
    read_groups,
    sequence_in,
)
from engine.journal.salvage import certain_end, checked_end
from engine.journal.writer import Journal, no_reserve, start_journal
from engine.metadata.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from engine.metadata.index_building import build_index, new_path, rebuild_index
from engine.tables.index_check import probe
from engine.tables.index_folder import remove_index, replace_index
from engine.tables.lmdb_index import Index
from engine.tables.overlay import Overlay
from lakefs.errors import IndexDamaged
from lakefs.ids import Sequence
from lakefs.limits import OVERLAY_BYTES_APPLY, OVERLAY_ENTRIES_APPLY
from lakefs.ports import Clock, Disk

_log: Final = structlog.get_logger(__name__)
INDEX_FOLDER: Final = "index"


@dataclass
class Recovered:
    """The result of `recover`.  The caller owns index and journal."""

    index: Index
    overlay: Overlay
    journal: Journal
    end: Sequence
    """Last group of the journal; it and all before it are durable."""
    checkpoint: Checkpoint | None
    journal_bytes: int
    """Length of the journal files that hold groups behind the checkpoint."""
    file_count: int
    """Number of those files."""
    rebuilt_because: str = ""
    """The reason of a rebuild; empty without one, and in a new store."""


@dataclass(frozen=True)
class RebuildReport:
    """The result of a rebuild.  `lost_from` is the first sequence given up, 0 when nothing was lost."""

    checkpoint_sequence: Sequence
    end_sequence: Sequence
    record_count: int
    lost_from: Sequence
    lost_because: str

    def as_dict(self) -> dict[str, Any]:
        """For people and scripts; JSON-able."""
        return {
            "checkpoint_sequence": self.checkpoint_sequence,
            "end_sequence": self.end_sequence,
            "records": self.record_count,
            "lost_from_sequence": self.lost_from,
            "lost_because": self.lost_because,
        }


def recover(
    disk: Disk,
    clock: Clock,
    identity: StoreIdentity,
    clean_sequence: int | None,
    *,
    release_reserve: Callable[[], bool] = no_reserve,
    index_committed: Callable[[], None] | None = None,
    sizes: MetadataSizes = DEFAULT_SIZES,
) -> Recovered:
    """Open index and journal of a store whose lock is held, and replay what the index lacks.

    `clean_sequence` is the superblock's; None after a crash.  Errors: JournalDamaged, StoreDamaged (checkpoint
    needed and not whole), StoreUnusable, StoreFull, DiskFailed.  An error changes no acknowledged group.
    """
    path = Path(disk.local_path(INDEX_FOLDER))
    remove_index(new_path(path))
    remove_index(path.with_name(path.name + ".old"))
    checkpoint = newest_checkpoint(disk)
    with ExitStack() as opened:  # closed again on a failure, so that the opening can be tried anew
        index, reason = _open_index(disk, path, identity.store_id, checkpoint)
        if index is not None:
            opened.callback(index.close)
        end = _find_end(disk, identity, clean_sequence, checkpoint, index)
        is_clean = clean_sequence == end.sequence and not end.torn
        journal = start_journal(
            disk,
            identity,
            clock,
            end_sequence=end.sequence,
            carried=None if is_clean else end.last,
            files=end.files,
            release_reserve=release_reserve,
            sizes=sizes,
        )
        opened.callback(journal.close)
        reached("recovery.journal-begun")
        files = list_journal(disk, identity.store_id)
        if index is None:
            if end.sequence:  # else the store is new
                _log.warning(
                    "the index is rebuilt now from checkpoint and journal; nothing else needs to be done",
                    reason=reason,
                    upto=end.sequence,
                )
            index = rebuild_index(disk, identity, files, end.sequence, path)
            opened.callback(index.close)
            if index_committed is not None:
                index_committed()
        index.committed = index_committed
        overlay = Overlay()
        _replay(index, overlay, read_groups(disk, files, index.applied, end.sequence))
        opened.pop_all()
    behind = [file.size_bytes for file in _files_behind(files, checkpoint)]
    rebuilt_because = reason if end.sequence else ""
    return Recovered(index, overlay, journal, end.sequence, checkpoint, sum(behind), len(behind), rebuilt_because)


def rebuild_store(
    disk: Disk, clock: Clock, identity: StoreIdentity, clean_sequence: int | None, *, accept_loss: bool
) -> RebuildReport:
    """Make a new index in place of the old one, for `lake fsck --rebuild`; the lock must be held.

    With `accept_loss` a damaged journal is given up from the damage on; the caller must then write a superblock
    without a clean sequence before the store is opened again.  Errors as `recover`.
    """
    checkpoint = newest_checkpoint(disk)
    after = Sequence(0) if checkpoint is None else checkpoint.sequence
    lost: JournalDamage | None = None
    path = Path(disk.local_path(INDEX_FOLDER))
    durable = Sequence(max(clean_sequence or 0, after, _applied_in(disk, path, identity.store_id)))
    while True:
        try:
            files = list_journal(disk, identity.store_id)
            end = checked_end(disk, files, after, durable, identity.boot_before if clean_sequence is None else b"")
            break
        except DamagedAt as error:
            place = error.damage
            if not accept_loss or (lost is not None and place.sequence >= lost.sequence):
                raise
            if not _set_aside_superseded(disk, place, after):
                lost = place
                _give_up(disk, clock, identity, Sequence(max(place.sequence, after + 1)))
                durable = after
    index = build_index(disk, identity, new_path(path), end.sequence, end.files)
    with closing(index):
        remove_index(replace_index(new_path(path), path))
        with closing(index.snapshot()) as snapshot:
            count = sum(snapshot.stats(table)[0] for table in Table)
    lost_from = Sequence(0) if lost is None else lost.sequence
    return RebuildReport(after, end.sequence, count, lost_from, "" if lost is None else lost.reason)


def verify_journal(disk: Disk, store_id: bytes, upto: Sequence) -> int:
    """Check the newest checkpoint whole, and the groups behind it up to `upto`; returns the number of their records.

    StoreDamaged, JournalDamaged.  No journal file may be removed during the check.
    """
    checkpoint = newest_checkpoint(disk)
    count = 0
    after = Sequence(0)
    if checkpoint is not None:
        with closing(read_checkpoint(disk, checkpoint.path, store_id)) as reader:
            count = sum(1 for _ in reader.records())
            after = reader.sequence
    return count + check_groups(disk, list_journal(disk, store_id), after, upto)


def _applied_in(disk: Disk, path: Path, store_id: bytes) -> Sequence:
    """Return the applied sequence of the index that a rebuild replaces; 0 when it cannot be read."""
    if crash_marker.died_in_index(disk) or not (path / "data.mdb").exists():
        return Sequence(0)
    with suppress(IndexDamaged), closing(Index(path)) as index:
        if not index.is_foreign(store_id):
            return index.applied
    return Sequence(0)


def _open_index(disk: Disk, path: Path, store_id: bytes, checkpoint: Checkpoint | None) -> tuple[Index | None, str]:
    """Return the index, or None and the reason why it must be rebuilt."""
    if crash_marker.died_in_index(disk):
        return None, "a process died while it read it"
    if not (path / "data.mdb").exists():
        return None, "there is none"
    try:
        index = Index(path)
    except IndexDamaged as error:
        return None, error.message
    with ExitStack() as unfit:
        unfit.callback(index.close)
        try:
            applied = probe(index)
            is_foreign = index.is_foreign(store_id)
        except IndexDamaged as error:
            return None, error.message
        if is_foreign:
            return None, "it is another store's"
        if checkpoint is not None and applied < checkpoint.sequence:
            return None, f"it ends with group {applied}, before the checkpoint's {checkpoint.sequence}"
        unfit.pop_all()
    index.owner = store_id
    return index, ""


def _find_end(
    disk: Disk, identity: StoreIdentity, clean_sequence: int | None, checkpoint: Checkpoint | None, index: Index | None
) -> JournalEnd:
    reached("recovery.index-opened")
    files = list_journal(disk, identity.store_id)
    durable = clean_sequence or 0
    if checkpoint is not None:
        durable = max(durable, checkpoint.sequence)
    if index is not None:
        durable = max(durable, index.applied)
    if not files and clean_sequence is None:
        # A store that was ever opened for writing has a journal file, before its superblock says so.
        durable = max(durable, 1)
    return certain_end(disk, files, Sequence(durable), identity.boot_before if clean_sequence is None else b"")


def _replay(index: Index, overlay: Overlay, groups: Iterable[Group]) -> None:
    """Publish groups in the overlay, applying them when there are many."""
    for group in groups:
        overlay.current.publish(group.sequence, decode_records(group.body, group.record_count))
        layer = overlay.current
        if layer.entry_count >= OVERLAY_ENTRIES_APPLY or layer.nbytes >= OVERLAY_BYTES_APPLY:
            frozen = overlay.freeze()
            index.apply(frozen, frozen.last_sequence)
            index.refresh()
            overlay.drop_applied()
    reached("recovery.replayed")


def _files_behind(files: tuple[JournalFile, ...], checkpoint: Checkpoint | None) -> list[JournalFile]:
    """Return the files that hold groups behind the checkpoint."""
    after = 0 if checkpoint is None else checkpoint.sequence
    followers = [file.first_sequence for file in files[1:]]
    return [
        file
        for file, following in zip(files, [*followers, None], strict=True)
        if following is None or following > after + 1
    ]


def _set_aside_superseded(disk: Disk, place: JournalDamage, after: Sequence) -> bool:
    """Rename a file without a good header if the checkpoint has all its groups; returns True if it did."""
    following = [begins for begins, path in _files_by_name(disk) if begins > place.sequence]
    if place.offset > 0 or place.path == JOURNAL_FOLDER or not following or following[0] > after + 1:
        return False
    disk.rename(place.path, f"{place.path}.lost")
    disk.sync_folder(JOURNAL_FOLDER)
    return True


def _give_up(disk: Disk, clock: Clock, identity: StoreIdentity, first_lost: Sequence) -> None:
    """End the journal before `first_lost`: rename the files behind, and begin a new one there."""
    for begins, path in _files_by_name(disk):
        if begins >= first_lost:
            disk.rename(path, f"{path}.lost")
    disk.sync_folder(JOURNAL_FOLDER)
    end = Sequence(first_lost - 1)
    start_journal(disk, identity, clock, end_sequence=end, carried=None, files=()).close()


def _files_by_name(disk: Disk) -> list[tuple[Sequence, str]]:
    """Return first sequence, from the name, and path of each journal file, in order; headers are not read."""
    return [(sequence_in(path), path) for path in journal_paths(disk)]
