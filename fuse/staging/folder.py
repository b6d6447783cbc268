"""The staging folder of a mount: thousands of staging files, leftovers of earlier mounts, and the lock.

One file's content is in `fuse.staging.staged_file`, its place and the bounds of all in `fuse.staging.room`, the
leftovers of a killed mount in `fuse.staging.leftovers`.  A file that is not stored when its mount ends stays in the
folder until a user restores or forgets it.

The lock has the mount point of the mount that has the folder.  A process whose mount has left its place, and goes on
elsewhere, keeps its folder; the next mount of that place then takes a folder in it (`open_staging`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from fuse.staging.leftovers import FOLDERS_MAX, Leftover, find_leftovers, folders_beside, remove_unowned
from fuse.staging.room import Emptying, Room, Slot
from fuse.staging.sidecar import BYTES_SUFFIX, SIDECAR_SUFFIX, Base, SidecarFile
from fuse.staging.staged_file import Kind, Span, StagedFile
from lakefs.errors import LakeError, LocalFileError, PermissionDenied, StoreLocked

__all__ = ["Base", "Kind", "Leftover", "Span", "StagedFile", "StagingFolder"]

SPARE_MAX: Final = 64
"""Most emptied staging files kept open for reuse: making and removing two costs more than writing a small file."""
DESCRIPTORS_KEPT: Final = 64
"""Descriptors that staging files leave for the rest of the mount: segments, reading the mount table, unmounting."""
EMPTIED_BESIDE_BYTES: Final = 32 << 20
"""Staging files of this length and more are emptied beside the loop: it would stand still for 10 ms or more."""
EMPTYING_MAX: Final = 8
"""Most files that are emptied at once, with two descriptors each; more are emptied at once by who gives them up."""
LOCK_NAME: Final = "lock"


def open_staging(path: Path, limit_bytes: int, mount_point: Path) -> StagingFolder:
    """Open the staging folder of the mount at `mount_point`, or one in it where an earlier process of the place has it.

    The caller has the lock of the place, so such a process goes on without the place.  StoreLocked if the mount of
    another place has the folder, or if too many processes go on; the errors of `StagingFolder`.
    """
    for folder in (path, *folders_beside(path)):
        try:
            return StagingFolder(folder, limit_bytes, mount_point)
        except StoreLocked:
            if _mount_point_of(folder) != os.fsencode(mount_point):
                raise
    raise StoreLocked(
        f"{FOLDERS_MAX} processes of earlier mounts at {mount_point} still use the staging folder {path}, because their"
        " mounts are in use elsewhere; end those, or give another folder with --staging",
        subject=str(path),
    )


class StagingFolder:
    """One mount's folder, of mode 0700, locked while the mount lives.

    Each of its files holds two descriptors, and is locked as long as this mount has it (`fuse.staging.leftovers`).
    """

    def __init__(self, path: Path, limit_bytes: int, mount_point: Path = Path()) -> None:
        """Make or open the folder.  StoreLocked if a mount has it, PermissionDenied, LocalFileError."""
        self.path = path
        self._room = Room(path, limit_bytes)
        self._files: dict[str, StagedFile] = {}
        self._spare: list[Slot] = []
        self.empty_beside: Callable[[Emptying], None] | None = None
        """Has `Emptying.run` called in a thread, then `emptied` in this one; None: files are emptied at once."""
        self._made = 0
        self._run = f"{time.time_ns():016x}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(path)
            self._lock = _locked(path, mount_point)
        except OSError as error:
            raise LocalFileError(f"staging folder {path}: {error.strerror}", subject=str(path)) from error
        try:
            remove_unowned(path)
        except OSError as error:
            os.close(self._lock)
            raise LocalFileError(f"staging folder {path}: {error.strerror}", subject=str(path)) from error

    @property
    def used_bytes(self) -> int:
        """Number of staged bytes over all files; leftovers of earlier mounts are not counted."""
        return self._room.used_bytes

    def append_from(self, byte_count: int) -> None:
        """Set the length from which on native threads append to files, at least 1."""
        self._room.append_from_bytes = byte_count

    def take_over(self) -> None:
        """Note what native threads have appended by now to any file."""
        for file in self._room.appended:
            file.take_over()

    def new(self, name: str, base: Base | None) -> StagedFile:
        """Return a file with the content of `base`, or an empty one; `name` is BUCKET/KEY, for recovery.

        StoreFull if the disk of the folder is full, LocalFileError.
        """
        try:
            return self._room.with_room(partial(self._new, name, base))
        except OSError as error:
            raise self._room.failure(error, name) from error

    def _new(self, name: str, base: Base | None) -> StagedFile:
        slot = self._empty_slot()
        try:
            file = StagedFile(self._room, slot, name, base, self)
        except OSError:
            self._give_back(slot)
            raise
        self._files[slot.stem] = file
        return file

    def leftovers(self) -> list[Leftover]:
        """Return files that earlier mounts wrote and did not store, oldest first."""
        return find_leftovers(self.path, frozenset(self._files))

    def close(self) -> None:
        """Keep files that are not stored for recovery, remove the rest, and release the lock.

        LocalFileError if something could not be synced; it is kept all the same.
        """
        failure: LakeError | None = None
        for file in list(self._files.values()):
            try:
                if file.changed:
                    file.keep_for_recovery()
                else:
                    file.discard()
            except LakeError as error:
                failure = error
        for emptying in list(self._room.emptying):
            emptying.run()
            self.emptied(emptying)
        for slot in self._spare:
            self._remove(slot)
        self._spare.clear()
        os.close(self._lock)
        if failure is not None:
            raise failure

    def another(self, slot: Slot) -> Slot | None:
        """Return an empty slot for the file of a long one, which is then to be released; None if it has to stay."""
        if not self._is_emptied_beside(slot):
            return None
        try:
            new = self._empty_slot()
        except OSError:
            return None
        self._files[new.stem] = self._files[slot.stem]
        return new

    def emptied(self, emptying: Emptying) -> None:
        """Use a slot again that was emptied beside the loop, or remove it.  Harmless when called twice."""
        if emptying not in self._room.emptying:
            return
        self._room.emptying.remove(emptying)
        if emptying.is_empty:
            self._keep_spare(emptying.slot)
        else:
            self._remove(emptying.slot)

    def release(self, slot: Slot, *, keep: bool) -> None:
        """End a file's use of its slot; keep the slot as it is, or use it again."""
        del self._files[slot.stem]
        if keep:
            slot.sidecar.close()
            # Unlocked, not only closed: the engine may still have the descriptor.
            fcntl.flock(slot.descriptor, fcntl.LOCK_UN)
            os.close(slot.descriptor)
        else:
            self._give_back(slot)

    def _is_emptied_beside(self, slot: Slot) -> bool:
        return (
            self.empty_beside is not None
            and len(self._room.emptying) < EMPTYING_MAX
            and os.fstat(slot.descriptor).st_size >= EMPTIED_BESIDE_BYTES
        )

    def _empty_slot(self) -> Slot:
        return self._spare.pop() if self._spare else self._make_slot()

    def _make_slot(self) -> Slot:
        self._made += 1
        stem = f"{self._run}-{self._made}"
        path = self.path / f"{stem}{BYTES_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            _verify_descriptors_left(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return Slot(stem, descriptor, SidecarFile(str(self.path / f"{stem}{SIDECAR_SUFFIX}")))
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise

    def _give_back(self, slot: Slot) -> None:
        try:
            slot.sidecar.empty()  # first: bytes without a sidecar belong to no file
            if self.empty_beside is not None and self._is_emptied_beside(slot):
                self._room.emptying.append(emptying := Emptying(slot))
                self.empty_beside(emptying)
                return
            os.ftruncate(slot.descriptor, 0)
        except OSError:
            self._remove(slot)
            return
        self._keep_spare(slot)

    def _keep_spare(self, slot: Slot) -> None:
        if len(self._spare) < SPARE_MAX:
            self._spare.append(slot)
        else:
            self._remove(slot)

    def _remove(self, slot: Slot) -> None:
        """Remove a slot.  Where the disk refuses that, it stays behind without a lock; nobody can take the error."""
        for suffix in (SIDECAR_SUFFIX, BYTES_SUFFIX):
            with suppress(OSError):
                (self.path / f"{slot.stem}{suffix}").unlink()
        slot.sidecar.close()
        with suppress(OSError):
            fcntl.flock(slot.descriptor, fcntl.LOCK_UN)
        os.close(slot.descriptor)


def _verify_descriptors_left(descriptor: int) -> None:
    """Raise OSError EMFILE if few descriptors are left above `descriptor`, the newest, the lowest that was free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and descriptor >= limit - DESCRIPTORS_KEPT:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _make_private(path: Path) -> None:
    found = os.stat(path)
    if found.st_uid != os.geteuid():
        raise PermissionDenied(
            f"staging folder {path} belongs to user {found.st_uid}; give a folder of your own", subject=str(path)
        )
    if stat.S_IMODE(found.st_mode) != 0o700:
        os.chmod(path, 0o700)


def _locked(path: Path, mount_point: Path) -> int:
    descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreLocked(
            f"the staging folder {path} is another mount's; give each mount its own", subject=str(path)
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    with suppress(OSError):  # a full disk: a later mount of the place is then refused while this one has the folder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, os.fsencode(mount_point), 0)
    return descriptor


def _mount_point_of(path: Path) -> bytes:
    """Return the mount point of the process that has the folder; empty if it says none."""
    try:
        return (path / LOCK_NAME).read_bytes()
    except OSError:
        return b""
