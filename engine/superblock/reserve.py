"""The reserve: room on the disk that only the journal and the index may take.

It is a preallocated file.  Payload never uses it: segments leave `headroom_bytes` of the disk free, and the room that
the metadata still needs; compaction may use half of that.  If the journal or the index meets a full disk all the same
(another program filled it), `release` returns half of what is left to the file system, so that `rm` and gc still work;
`restore` fills the reserve up again when the disk has room.

Where the file system counts its inodes, the reserve also holds some: empty files, of which `release` removes two when
no inode is left, so that the superblock, a journal file and a checkpoint can be written, and the store starts and is
read.

`refuse_unknown_size` raises StoreUnusable for a file system that reports no size: no reserve could be kept there.

All calls block.  Only the engine touches the file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import structlog

from engine.host.failpoints import reached
from lakefs.errors import LakeError, StoreFull, StoreUnusable
from lakefs.limits import PAGE_BYTES, RESERVE_BYTES, RESERVE_SHARE
from lakefs.ports import Disk, DiskFile

RESERVE_PATH = "reserve"
SPARES_FOLDER = "spares"
SPARE_FILES: Final = 16
"""A start takes two (a journal file, and the superblock's temporary one), a checkpoint one until it is renamed."""
_RELEASED_FILES: Final = 2
_LEFT_FREE: Final = 64
"""Inodes that are left to others when spare files are made."""
_SPARE_NAMES: Final = [f"{number:02}" for number in range(SPARE_FILES)]
_log = structlog.get_logger()


def refuse_unknown_size(disk: Disk) -> None:
    """Raise StoreUnusable for a file system without a size: it reports no free room either, so none could be kept."""
    if disk.total_bytes():
        return
    path = disk.local_path("")
    raise StoreUnusable(
        f"the file system of {path} does not say how large it is (statfs: 0 blocks), so no room could be kept for "
        "journal and index; put the store on another one, as ext4 or xfs",
        subject=path,
    )


class Reserve:
    """The reserve file of one store."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        share = disk.total_bytes() // RESERVE_SHARE
        self.target_bytes = min(RESERVE_BYTES, share - share % PAGE_BYTES)
        self._file: DiskFile | None = None
        self.held_bytes = 0
        """Bytes held now."""
        self._spares: list[str] = []
        """Names of the spare files."""

    @property
    def headroom_bytes(self) -> int:
        """Bytes that payload leaves free beside the reserve: one step of the journal and of the index."""
        return self.target_bytes // 4

    def open(self) -> None:
        """Open or create the file and fill it up as far as there is room."""
        exists = self._disk.exists(RESERVE_PATH)
        self._file = self._disk.open(RESERVE_PATH, create=not exists)
        # After a power loss the file may have a length without allocated blocks.
        self.held_bytes = min(self._file.size(), self._file.allocated_bytes(), self.target_bytes)
        if self._disk.free_inodes() is not None:
            present = set(self._disk.list_folder(SPARES_FOLDER))
            self._spares = [name for name in _SPARE_NAMES if name in present]
        self.restore()

    def restore(self) -> bool:
        """Fill the reserve up; returns False when there is no room for that now."""
        assert self._file is not None, "the reserve is open"
        self._restore_files()
        missing = self.target_bytes - self.held_bytes
        if missing <= 0:
            return True
        if self._disk.free_bytes() < missing + self.headroom_bytes:
            return False
        try:
            self._file.allocate(self.held_bytes, missing)
            reached("reserve.allocated")
        except StoreFull:
            self._file.truncate(self.held_bytes)
            return False
        self.held_bytes = self.target_bytes
        return True

    def _restore_files(self) -> None:
        """Make the spare files that are missing, if many more can be created."""
        missing = [name for name in _SPARE_NAMES if name not in self._spares]
        free = self._disk.free_inodes()
        if free is None or not missing or free < len(missing) + _LEFT_FREE:
            return
        try:
            self._disk.make_folder(SPARES_FOLDER)
            for name in missing:
                self._disk.open(f"{SPARES_FOLDER}/{name}", create=True).close()
                self._spares.append(name)
        except (StoreFull, FileExistsError):  # others took what was free
            return

    def _release_files(self) -> bool:
        """Remove two spare files if no inode is left; returns False if one is, or no spare file is."""
        if not self._spares or self._disk.free_inodes() != 0:
            return False
        for name in self._spares[-_RELEASED_FILES:]:
            with suppress(FileNotFoundError):
                self._disk.unlink(f"{SPARES_FOLDER}/{name}")
            self._spares.remove(name)
        _log.warning("no inode is left: spare files were removed", spare_files=len(self._spares))
        return True

    def release(self) -> bool:
        """Return half of the reserve to the file system, or inodes where those are used up; False when nothing is left
        of it."""
        if self._release_files():
            return True
        if self._file is None or self.held_bytes < 2 * PAGE_BYTES:
            return False
        self.held_bytes = self.held_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        assert 0 < self.held_bytes < self.target_bytes, "a release keeps a part of the reserve"
        try:
            self._file.truncate(self.held_bytes)
        except LakeError as error:
            _log.error("the reserve cannot be released", error=error.message)
            return False
        _log.warning("the disk is full: part of the reserve was released", reserve_bytes=self.held_bytes)
        return True

    def close(self) -> None:
        """Close the file; the room stays reserved."""
        if self._file is not None:
            self._file.close()
            self._file = None
