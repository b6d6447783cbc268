"""Checks of a mount point, and a lock: one mount process for one mount point.

Rules kept here:
- Nothing is mounted over a mount, whatever its type.  The one exception is a dead lake mount (its process was
  killed): it is removed, and the log says so.
- A mount process holds the lock of its mount point from before its first check until it has ended.  So two that start
  at once do not stack, and a new one waits for an old one that still stores written files.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import structlog

from fuse.kernel.mount_table import LAKE_TYPE, MountEntry, answers, mount_at, unmount
from lakefs.errors import AlreadyExists, DeadlineExceeded, FolderNotEmpty, LocalFileError, NotAFolder, PermissionDenied

LOCK_WAIT_S: Final = 90.0
"""Longest wait for a lock.  A mount that ends first stores written files; this is as long as its unit lets it."""
_LOCK_POLL_S: Final = 0.05
_DEAD_MOUNTS_MAX: Final = 64
"""Most dead mounts removed at one place; each is one restart that went wrong."""
_log: Final = structlog.get_logger()


def check_mount_point(path: Path, *, may_hold_files: bool = False) -> None:
    """Raise unless something can be mounted at `path` (a real path).  Blocks, at most some seconds.

    AlreadyExists: a mount exists at `path`.  LocalFileError: `path` does not exist.  NotAFolder.  FolderNotEmpty unless
    `may_hold_files`.  PermissionDenied: `path` may not be read.
    """
    for _ in range(_DEAD_MOUNTS_MAX):
        entry = mount_at(path)
        if entry is None:
            return _check_folder(path, may_hold_files)
        _refuse_living(entry)
        unmount(path, lazy=True)
        _log.warning("took away a dead mount: its process had been killed", mount_point=str(path))
    raise AlreadyExists(f"{path} has more than {_DEAD_MOUNTS_MAX} dead mounts; remove them with: umount -l {path}")


def _refuse_living(entry: MountEntry) -> None:
    """Raise AlreadyExists unless the mount is a dead lake mount."""
    path = entry.mount_point
    alive = None if entry.type == "autofs" else answers(path)
    ours = entry.type == LAKE_TYPE
    if alive is False and ours:
        return
    if alive is False:
        message = f"{path} is a dead mount of {entry.type}; remove it with: umount -l {path}"
    elif ours and alive is None:
        message = f"{path} is a lake mount that does not answer; remove it with: lake unmount --lazy {path}"
    elif ours:
        message = f"a lake is mounted at {path} already; unmount it with: lake unmount {path}"
    else:
        message = f"{path} is a mount already ({entry.type}, {entry.source}); choose another folder"
    raise AlreadyExists(message, subject=str(path))


def _check_folder(path: Path, may_hold_files: bool) -> None:
    try:
        if not path.is_dir():
            os.stat(path)
            raise NotAFolder(f"mount point {path} is not a folder", subject=str(path))
        first = next(iter(os.scandir(path)), None)
    except FileNotFoundError as error:
        raise LocalFileError(
            f"mount point {path} does not exist; make it with: mkdir -p {path}", subject=str(path)
        ) from error
    except PermissionError as error:
        raise PermissionDenied(f"mount point {path}: {error.strerror}", subject=str(path)) from error
    except OSError as error:
        raise LocalFileError(f"mount point {path}: {error.strerror}", subject=str(path)) from error
    if first is not None and not may_hold_files:
        raise FolderNotEmpty(
            f"mount point {path} is not empty (it holds {first.name!r}), and the mount would hide what is in it;"
            " choose an empty folder, or mount with -o nonempty",
            subject=str(path),
        )


class MountLock:
    """The lock of one mount point, on a file that stays; the kernel frees it when its process ends in any way."""

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalFileError(f"{file}: {error.strerror}", subject=str(file)) from error

    def take(self, mount_point: Path) -> None:
        """Wait for the lock and take it.  AlreadyExists at once if its holder serves, or at the end of the wait."""

        def check_holder() -> None:
            if (entry := mount_at(mount_point)) is not None:
                _refuse_living(entry)

        if not self._wait(check_holder):
            raise AlreadyExists(
                f"another process has been mounting or unmounting {mount_point} for {LOCK_WAIT_S:.0f} s",
                subject=str(mount_point),
            )
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def wait_free(self, mount_point: Path) -> None:
        """Wait until no process has the lock: all that was written through the mount is stored.  DeadlineExceeded."""
        if not self._wait(lambda: None):
            raise DeadlineExceeded(
                f"{mount_point} is unmounted, but its process still stores what was written;"
                f" it is process {os.pread(self._descriptor, 20, 0).decode().strip()}",
                subject=str(mount_point),
            )

    def _wait(self, between: Callable[[], None]) -> bool:
        end = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                between()
                if time.monotonic() > end:
                    return False
                time.sleep(_LOCK_POLL_S)
            else:
                return True

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
