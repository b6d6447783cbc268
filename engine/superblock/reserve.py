"""The reserve: room on the disk that only the journal and the index may take.

A preallocated file.  Payload never uses it: segments refuse to grow when the disk has less than `headroom_bytes` free.
When the journal or the index meets a full disk all the same (somebody else filled it), `release` gives half of what
is left back to the file system, so that `rm` and gc go on; `restore` fills it up again when there is room.

A disk that does not say how large it is has no room to keep, or to leave: `refuse_unknown_size`.

All block.  Held by the engine; nobody else touches the file.
"""

from __future__ import annotations

import structlog

from engine.host.failpoints import reached
from lakefs.errors import LakeError, StoreFull, StoreUnusable
from lakefs.limits import PAGE_BYTES, RESERVE_BYTES, RESERVE_SHARE
from lakefs.ports import Disk, DiskFile

RESERVE_PATH = "reserve"
_log = structlog.get_logger()


def refuse_unknown_size(disk: Disk) -> None:
    """StoreUnusable for a file system that reports no size: it reports no free room either, so none could be kept."""
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
        self._held_bytes = 0

    @property
    def headroom_bytes(self) -> int:
        """What payload leaves free beside the reserve: one step of the journal and of the index."""
        return self.target_bytes // 4

    @property
    def held_bytes(self) -> int:
        """Room held now."""
        return self._held_bytes

    def open(self) -> None:
        """Open or create the file and fill it up as far as there is room."""
        exists = self._disk.exists(RESERVE_PATH)
        self._file = self._disk.open(RESERVE_PATH, create=not exists)
        # What a power loss has left of it may be a length without room behind it.
        self._held_bytes = min(self._file.size(), self._file.allocated_bytes(), self.target_bytes)
        self.restore()

    def restore(self) -> bool:
        """Fill the reserve up; false when there is no room for that now."""
        assert self._file is not None
        missing = self.target_bytes - self._held_bytes
        if missing <= 0:
            return True
        if self._disk.free_bytes() < missing + self.headroom_bytes:
            return False
        try:
            self._file.allocate(self._held_bytes, missing)
            reached("reserve.allocated")
        except StoreFull:
            self._file.truncate(self._held_bytes)
            return False
        self._held_bytes = self.target_bytes
        return True

    def release(self) -> bool:
        """Give half of the reserve back to the file system; false when nothing is left of it."""
        if self._file is None or self._held_bytes < 2 * PAGE_BYTES:
            return False
        self._held_bytes = self._held_bytes // 2 // PAGE_BYTES * PAGE_BYTES
        try:
            self._file.truncate(self._held_bytes)
        except LakeError as error:
            _log.error("the reserve cannot be released", error=error.message)
            return False
        _log.warning("the disk is full: part of the reserve was released", reserve_bytes=self._held_bytes)
        return True

    def close(self) -> None:
        """Close the file; the room stays reserved."""
        if self._file is not None:
            self._file.close()
            self._file = None
