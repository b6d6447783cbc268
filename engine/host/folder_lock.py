"""The lock of a store on a local disk: flock(2) of its folder, and of a file in it.

Rules kept here:
- The folder's own lock counts.  It cannot be removed, and it holds for every path to the folder and wherever that was
  moved.  The file's lock keeps out releases that know only that one; the file's inode is the store's identity.
- The folder is locked first: a process that is refused creates no file.
- The holder calls `check` before it creates or removes a name: folder and file may have been replaced.

Spare descriptors are held as long as the lock.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack

from engine.host.spare_descriptors import SpareDescriptors
from lakefs.errors import StoreLocked, StoreReadOnly


class FolderLock:
    """A lock that is held until `close`."""

    def __init__(self, root: str, name: str, spares: SpareDescriptors) -> None:
        """Lock a folder and the file of that name in it, created if needed; does not wait.  StoreLocked, OSError."""
        self._root = root
        self._name = name
        self._spares = spares
        with ExitStack() as opened:
            self._folder = _locked(root, root, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, self._folder)
            file = _locked(root, f"{root}/{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            opened.callback(os.close, file)
            self._held = os.fstat(self._folder), os.fstat(file)
            self._opened = opened.pop_all()
        self.is_held = True
        spares.fill()

    def check_folder(self) -> None:
        """Raise StoreReadOnly unless the folder still has the path at which it was locked.  OSError."""
        if not _is_same(self._held[0], self._root):
            raise StoreReadOnly(
                f"the folder {self._root} was moved, removed or replaced under the engine, which writes nothing more: "
                "stop it, and put the folder back, or start it where the folder is",
                subject=self._root,
            )

    def check(self) -> None:
        """Raise StoreReadOnly unless folder and file are the locked ones.  OSError."""
        self.check_folder()
        if not _is_same(self._held[1], f"{self._root}/{self._name}"):
            raise StoreReadOnly(
                f"{self._root}/{self._name} was removed or replaced under the engine, which writes nothing more: "
                "restart it, and leave that file alone",
                subject=self._name,
            )

    def file_system_state(self) -> os.statvfs_result:
        """Return statvfs of the locked folder, even if it was moved."""
        return os.statvfs(self._folder)

    def close(self) -> None:
        """Release lock and spare descriptors; idempotent."""
        self.is_held = False
        self._spares.close()
        self._opened.close()


def _locked(root: str, path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreLocked(
            f"the store in {root} is open in another process; stop it, or use --server", subject=root
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_same(held: os.stat_result, path: str) -> bool:
    try:
        return os.path.samestat(held, os.stat(path))
    except FileNotFoundError:
        return False
