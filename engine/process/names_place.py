"""Opens the names of a lake in folders on devices of this machine, with real disks, threads and clock.

Each folder is, or may become, one of the names' copies.  The folder above it is the device's, and belongs to the lake:
where that is missing, or is not the lake's any more (`is_usable`), its device is taken for lost, and nothing is made
there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from engine.format.group_parts import FIRST_SHARD
from engine.format.sizes import DEFAULT_STORE_SIZES, StoreSizes
from engine.host.clock import SystemClock
from engine.host.crash_marker import noting_crashes
from engine.host.local_disk import LocalDisk
from engine.mirror.copy_calls import AtOnce
from engine.mirror.mirror_bounds import PATIENCE_S
from engine.process.mirrored_names import LocalNames, NamesHost, open_names_in
from engine.store.given_rights import RightsInMemory
from engine.store.metadata_life import Leading, always_leading
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import read_superblock
from engine.tables.index_folder import sync_path
from lakefs.errors import DiskFailed, LakeError, StoreLocked
from lakefs.host.offload import ThreadOffload
from lakefs.ids import CopyId, NamesShard

NAMES_THREADS: Final = 4
"""Threads of the names: journal, index, a long reader of it, and one that is free."""
STALE_SUFFIX: Final = ".stale"
"""A stale copy's folder gets this name when a new one is made in its place; one is kept."""


IsUsable = Callable[[Path], bool]
"""Says if a device's folder may be used: not an empty one, whose disk was taken away.  Blocks."""


def always(_: Path) -> bool:
    """Every folder may be used."""
    return True


class LocalFolder:
    """A folder on a local file system (`engine.mirror.copy_folders.CopyFolder`)."""

    def __init__(self, folder: Path, is_usable: IsUsable = always) -> None:
        self._folder = folder.absolute()
        self._is_usable = is_usable
        self.name = str(self._folder)

    def device(self) -> int | None:
        """Return the number of the file system; None if the folder above does not exist, or must not be used."""
        if not self._is_usable(self._folder.parent):
            return None
        for path in (self._folder, self._folder.parent):
            try:
                return path.stat().st_dev
            except OSError:
                continue
        return None

    def disk(self) -> LocalDisk:
        """Return the folder as a disk."""
        return LocalDisk(self._folder)

    def set_aside(self) -> None:
        """Rename the folder, in place of one that was renamed before; durable on return.  DiskFailed."""
        stale = self._folder.with_name(self._folder.name + STALE_SUFFIX)
        try:
            if stale.exists():
                shutil.rmtree(stale)
            os.rename(self._folder, stale)
            sync_path(stale.parent)
        except OSError as error:
            raise DiskFailed(f"cannot set {self.name} aside: {error.strerror}", subject=self.name) from error


@asynccontextmanager
async def open_local_names(
    folders: Sequence[Path],
    *,
    lake_id: bytes,
    protection_losses: int,
    is_new: bool,
    without: frozenset[CopyId] = frozenset(),
    restored: bool = False,
    patience_s: float | None = PATIENCE_S,
    is_kept: Callable[[], bool] = lambda: True,
    is_usable: IsUsable = always,
    sizes: StoreSizes = DEFAULT_STORE_SIZES,
    shard: NamesShard = FIRST_SHARD,
    leading: Leading = always_leading,
    begin_anew: BeginAnew | None = None,
) -> AsyncIterator[LocalNames]:
    """Open the names of a lake in folders of this machine, given in any order; stop them cleanly at the end.

    `folders`: all in which names of this lake may lie; the folders above them exist.  `protection_losses`: how many
    devices may be lost, m; the names have m + 1 copies, at most 3 and one a folder.  `is_new`: make the names if no
    folder has any.  `without`: copies that the operator gives up for ever.  `restored`: the operator's word that the
    folders were put back from a backup.  `patience_s`: how long a device may be silent after another has answered,
    before its copy is given up; None: for ever.  `is_kept` is called when the opening or the body fails with `is_new`;
    if it returns False, folders that were made here are removed.  `is_usable` is asked for the folder above, each time
    before a copy is made.  `shard`, `leading`, `begin_anew`: see `open_names_store`.
    Errors: StoreLocked, StoreUnusable (another role or lake, too few copies), and those of `open_names_store`.
    """
    with _removing_new(folders, is_new, is_kept):
        async with (
            ThreadOffload(NAMES_THREADS, "names") as offload,
            ThreadOffload(1, "names-copy") as copying,
            open_names_in(
                [LocalFolder(folder, is_usable) for folder in folders],
                NamesHost(
                    SystemClock(),
                    offload,
                    copying,
                    AtOnce(patience_s),
                    while_open=noting_crashes,
                    given_rights=RightsInMemory(),
                ),
                lake_id=lake_id,
                protection_losses=protection_losses,
                is_new=is_new,
                without=without,
                restored=restored,
                sizes=sizes,
                shard=shard,
                leading=leading,
                begin_anew=begin_anew,
            ) as names,
        ):
            yield names


def lake_of_names(folders: Sequence[Path]) -> bytes | None:
    """Return the id of the lake whose names lie in the first of these folders that has any; None if none has.  Blocks.

    For the one who starts a lake, and does not know its id; nothing is locked, and opening decides.
    """
    for folder in folders:
        with suppress(FileNotFoundError, LakeError):
            return read_superblock(LocalDisk(folder)).cluster_id
    return None


@contextmanager
def _removing_new(folders: Sequence[Path], is_new: bool, is_kept: Callable[[], bool]) -> Iterator[None]:
    """Remove the folders that an opening has made if it fails; those that another process makes are left alone."""
    made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except StoreLocked:
        raise
    except BaseException:
        if is_new and not is_kept():
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
        raise
