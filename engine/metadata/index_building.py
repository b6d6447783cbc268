"""Rebuilds the index from checkpoint and journal: loads, replays, and puts the result in the old index's place.

Every record is checked on the way.  The new index grows in a folder of its own, so the old one exists until the new one
is whole.  A crash leaves that folder; the next opening removes it.  All functions but `compact` block.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from engine.format.layouts import StoreIdentity, Table
from engine.host import crash_marker as crash_marker
from engine.host.failpoints import reached
from engine.journal.reader import Group, JournalFile, decode_records, list_journal, read_groups
from engine.metadata.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from engine.tables.index_check import IndexProgress
from engine.tables.index_folder import remove_index, replace_index
from engine.tables.lmdb_index import Index
from engine.tables.overlay import Layer
from lakefs.errors import StoreFull
from lakefs.ids import Sequence
from lakefs.limits import OVERLAY_BYTES_MAX, OVERLAY_ENTRIES_MAX
from lakefs.ports import Disk, Offload

_LOAD_RECORDS: Final = 65_536
"""Records loaded into an index in one transaction: about 20 MiB."""


def build_index(
    disk: Disk,
    identity: StoreIdentity,
    path: Path,
    upto: Sequence,
    files: tuple[JournalFile, ...],
    progress: IndexProgress | None = None,
) -> Index:
    """Build an index at `path` with the state after group `upto`, from the newest checkpoint and the journal.

    Replaces `path` and returns the index open.  StoreDamaged, JournalDamaged, StoreFull.
    """
    checkpoint = newest_checkpoint(disk)
    assert checkpoint is None or checkpoint.sequence <= upto, "the journal ends before its checkpoint"
    progress = progress or IndexProgress()
    remove_index(path)
    index = Index(path)
    index.owner = identity.store_id
    try:
        applied = _load_checkpoint(disk, identity, index, checkpoint, progress)
        apply_groups(index, read_groups(disk, files, applied, upto), upto, progress)
        index.is_walked = True  # just written, from checked records
    except BaseException:
        index.close()
        remove_index(path)
        raise
    return index


def build_while_open(disk: Disk, identity: StoreIdentity, path: Path, progress: IndexProgress, upto: Sequence) -> Index:
    """Build an index at `path` as `build_index` does, of a store that serves."""
    disk.check_lock()  # LMDB opens its files by path
    files = list_journal(disk, identity.store_id)
    with progress.of("being rebuilt"):
        return build_index(disk, identity, path, upto, files, progress)


async def compact(disk: Disk, offload: Offload, index: Index) -> None:
    """Copy an index that nobody writes to without its free pages; it stays as it is if there is no room for that."""
    copied = new_path(index.path)
    try:
        await offload.run(disk.check_lock)
        await offload.run(index.copy_to, copied)
        await offload.run(remove_index, replace_index(copied, index.path))
    except StoreFull:
        await offload.run(remove_index, copied)


def apply_groups(index: Index, groups: Iterable[Group], upto: Sequence, progress: IndexProgress) -> None:
    """Bring an index up to group `upto`, which `groups` end with, in batches of bounded size."""
    layer = Layer()
    for group in groups:
        layer.publish(group.sequence, decode_records(group.body, group.record_count))
        if layer.entry_count >= OVERLAY_ENTRIES_MAX or layer.nbytes >= OVERLAY_BYTES_MAX:
            index.apply(layer, group.sequence)
            index.refresh()  # the reader's old snapshot would keep every page from being used again
            progress.replayed(layer.entry_count, group.sequence, upto)
            layer = Layer()
    index.apply(layer, upto)
    index.refresh()
    assert index.applied == upto, "the index holds every group up to `upto`"


def rebuild_index(
    disk: Disk, identity: StoreIdentity, files: tuple[JournalFile, ...], upto: Sequence, path: Path
) -> Index:
    """Rebuild the index and put it in the place of the one at `path`; returns it open."""
    index = build_index(disk, identity, new_path(path), upto, files)
    try:
        reached("recovery.rebuilt")
        remove_index(replace_index(new_path(path), path))
        reached("recovery.index-replaced")
        if crash_marker.died_in_index(disk):
            crash_marker.set_aside(disk)
    except BaseException:
        index.close()
        raise
    index.path = path
    return index


def new_path(path: Path) -> Path:
    """Return the folder in which the replacement of the index at `path` is built."""
    return path.with_name(path.name + ".new")


def _load_checkpoint(
    disk: Disk, identity: StoreIdentity, index: Index, checkpoint: Checkpoint | None, progress: IndexProgress
) -> Sequence:
    """Load a checkpoint into an empty index; returns its sequence, 0 without one."""
    if checkpoint is None:
        return Sequence(0)
    with closing(read_checkpoint(disk, checkpoint.path, identity.store_id)) as reader:
        batch: list[tuple[bytes, bytes]] = []
        loading: Table | None = None
        done = 0
        for table, key, value in reader.records():
            if loading is not None and (table is not loading or len(batch) >= _LOAD_RECORDS):
                index.load(loading, batch)
                index.refresh()
                done += len(batch)
                progress.loaded(done, reader.record_count)
                batch = []
            loading = table
            batch.append((key, value))
        if loading is not None:
            index.load(loading, batch)
    return reader.sequence
