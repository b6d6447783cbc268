"""The lock of a mount point: who has it mounts there, serves there, or still stores what was written there.

Rules kept here:
- A mount process takes the lock before its first check of the place.  So two that start at once do not stack, and a new
  one waits for an old one that still stores written files.
- It has the lock until it has ended, or until its mount is at the place no more and goes on without it: unmounted
  lazily with files open, or still mounted in another mount namespace.  It then gives the lock up, and a new mount may
  begin beside it (`fuse.kernel.attach`).
- The file has the id of the process that has the lock, or had it until its end.  It is empty when the lock was given
  up.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fuse.kernel.holders import mounted_elsewhere
from fuse.kernel.mount_point import mount_at, refuse_living
from lakefs.errors import AlreadyExists, DeadlineExceeded, LocalFileError

LOCK_WAIT_S: Final = 90.0
"""Longest wait for a lock.  A mount that ends first stores written files; this is as long as its unit lets it."""
_LOCK_POLL_S: Final = 0.05


class MountLock:
    """The lock of one mount point, on a file that stays; the kernel frees it when its process ends in any way."""

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalFileError(f"{file}: {error.strerror}", subject=str(file)) from error
        self.found_pid = self._pid()
        """The process that the file named when this was opened; None if it named none."""

    def take(self, mount_point: Path) -> None:
        """Wait for the lock and take it.

        AlreadyExists at once if its holder serves, here or in another mount namespace, or at the end of the wait.
        """
        end = time.monotonic() + LOCK_WAIT_S
        while not self._try():
            if (entry := mount_at(mount_point)) is not None:
                refuse_living(entry)
            self._refuse_elsewhere(mount_point)
            if time.monotonic() > end:
                raise AlreadyExists(
                    f"{mount_point} has been mounted or unmounted for {LOCK_WAIT_S:.0f} s by process"
                    f" {self._pid() or '(unknown)'}",
                    subject=str(mount_point),
                )
            time.sleep(_LOCK_POLL_S)
        with suppress(OSError):  # a full disk: others then do not learn which process it is
            os.pwrite(self._descriptor, b"%-19d\n" % os.getpid(), 0)  # over all of the text that another left

    def give_up(self) -> None:
        """Give the lock up for good, while this process goes on without the place."""
        os.truncate(self._descriptor, 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def wait_free(self, mount_point: Path) -> bool:
        """Wait for the end of the process that had the lock when this was opened; then all that it was given is stored.

        False as soon as it is known to go on without the place, or the place has another mount.  DeadlineExceeded.
        """
        end = time.monotonic() + LOCK_WAIT_S
        while not self._try():
            if (pid := self._pid()) != self.found_pid or mount_at(mount_point) is not None:
                return False
            if pid and mounted_elsewhere(pid, mount_point):
                return False
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{mount_point} is unmounted, but its process still stores what was written; it is process {pid}",
                    subject=str(mount_point),
                )
            time.sleep(_LOCK_POLL_S)
        return self._pid() == self.found_pid

    def _refuse_elsewhere(self, mount_point: Path) -> None:
        """Raise AlreadyExists if the holder serves the same path in another mount namespace."""
        pid = self._pid()
        holder = mounted_elsewhere(pid, mount_point) if pid else None
        if holder is not None:
            raise AlreadyExists(
                f"{mount_point} is mounted where it is not seen from here: in {holder}, which has the state folder of"
                f" this mount point; unmount it there, with: nsenter -t {pid} -m lake unmount {mount_point}",
                subject=str(mount_point),
            )

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _pid(self) -> int | None:
        text = os.pread(self._descriptor, 20, 0).strip()
        return int(text) if text.isdigit() else None

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
