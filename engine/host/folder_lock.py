"""The lock of a store on a local disk, and the spare descriptors that are held as long as the lock.

The lock is flock(2) of the store's folder, and of a file in it.  The spares are for the moment at which clients have
taken all other descriptors: writing a journal, a segment or a checkpoint must not fail half-way because a client opened
a connection.

Rules kept here:
- The folder's own lock counts.  It cannot be removed, and it holds for every path to the folder and wherever that was
  moved.  The file's lock keeps out releases that know only that one; the file's inode is the store's identity.
- The folder is locked first: a process that is refused creates no file.
- The holder calls `check` before it creates or removes a name: folder and file may have been replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, TypeVar

from lakefs.errors import StoreLocked, StoreReadOnly

T = TypeVar("T")

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
SPARE_DESCRIPTORS: Final = 16
"""A checkpoint, a journal file and a segment of either kind may be begun at once, each with its folder's sync."""


class FolderLock:
    """A lock that is held until `close`."""

    def __init__(self, root: str, name: str, spares: SpareDescriptors) -> None:
        """Lock a folder and the file of that name in it, created if needed; does not wait.  StoreLocked, OSError."""
        self._root = root
        self._name = name
        self._spares = spares
        with ExitStack() as opened:
            self.folder = _locked(root, root, os.O_RDONLY | os.O_DIRECTORY)
            """Descriptor of the locked folder, even if it was moved."""
            opened.callback(os.close, self.folder)
            file = _locked(root, f"{root}/{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            opened.callback(os.close, file)
            self._held = os.fstat(self.folder), os.fstat(file)
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


class SpareDescriptors:
    """The spares of one store.  Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._is_closed = True

    def fill(self) -> None:
        """Hold SPARE_DESCRIPTORS of them, or as many as can be opened."""
        with self._lock:
            self._is_closed = False
            self._refill()

    def close(self) -> None:
        """Close all spares."""
        with self._lock:
            self._is_closed = True
            while self._held:
                os.close(self._held.pop())

    def use(self, call: Callable[..., T], *args: object) -> T:
        """Make a call that opens a descriptor, such as os.open, with a spare when there is no other descriptor."""
        while True:
            try:
                outcome = call(*args)
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR or not self._give_one():
                    raise
            else:
                break
        with self._lock:
            if not self._is_closed and len(self._held) < SPARE_DESCRIPTORS:
                self._refill()
        return outcome

    def _give_one(self) -> bool:
        with self._lock:
            if not self._held:
                return False
            os.close(self._held.pop())
            return True

    def _refill(self) -> None:
        with suppress(OSError):
            while len(self._held) < SPARE_DESCRIPTORS:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
