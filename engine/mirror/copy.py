"""One copy of a mirrored disk: a folder on a device, and what this process knows about it."""

from __future__ import annotations

from lakefs.ids import CopyId
from lakefs.ports import Disk, DiskLock


class Copy:
    """A copy whose folder is locked.  Compared by identity.

    Only `engine.mirror.good_copies` and `engine.mirror.copy_calls` change it.
    """

    def __init__(self, copy_id: CopyId, name: str, disk: Disk, lock: DiskLock, inode: int) -> None:
        """`name` is the device's, for people; `inode` that of the copy's own file, by which it is not a copy of it."""
        self.id = copy_id
        self.name = name
        self.disk = disk
        self.inode = inode
        self.is_good = True
        """True while it is in the list, so has all that was acknowledged."""
        self.is_silent = False
        """True if a call on it has not returned: it is not used again, not even to close a file."""
        self.suspect = ""
        """The error of a read that another copy answered; empty if there was none.  It is read last."""
        self.distrusted: set[str] = set()
        """Paths whose bytes a reader found wrong."""
        self._lock = lock

    def close(self) -> None:
        """Release the folder's lock."""
        self._lock.close()

    def __str__(self) -> str:
        return f"{self.name} (copy {self.id.hex()})"
