"""Leftovers: staged files that a killed mount did not store; found, copied to plain files for the user, and removed.

A running mount may have the folder at the same time: each of its own files is locked (flock) while it has it, and a
command that restores or removes a leftover takes the same lock (`claimed`).  All calls block.  Storing a leftover
is in `fuse.staging.restore`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fuse.staging.byte_ranges import RangeSet
from fuse.staging.room import Room, Slot
from fuse.staging.sidecar import (
    BYTES_SUFFIX,
    SIDECAR_BYTES_MAX,
    SIDECAR_SUFFIX,
    Base,
    SidecarFile,
    SidecarState,
    replay,
)
from fuse.staging.staged_file import StagedFile, sync_folder
from lakefs.errors import AlreadyExists, LocalFileError, StoreLocked

_COPY_BYTES: Final = 1 << 20
FOLDERS_MAX: Final = 16
"""Most processes of one mount point that have a staging folder at once: all but one go on without the place."""


@dataclass(frozen=True)
class Leftover:
    """A file that was written and not stored; `ranges`, [begin, end) each, are the new bytes."""

    name: str
    """`BUCKET/KEY`; empty if it is not known any more."""
    path: Path
    """The staged bytes, sparse, at their offsets."""
    size_bytes: int
    time_ns: int
    """Time of the last write, in ns since 1970."""
    ranges: tuple[tuple[int, int], ...]
    base: Base | None
    """The stored content of the other bytes below `base_bytes`; those from there on are zeros."""
    base_bytes: int
    is_complete: bool
    """True if the whole content is staged, and nothing of the base is needed."""

    @property
    def id(self) -> str:
        """Unique id, also among leftovers of the same name."""
        return self.path.stem

    @property
    def new_bytes(self) -> int:
        """Number of new bytes."""
        return sum(end - begin for begin, end in self.ranges)


def staging_folders(path: Path) -> list[Path]:
    """Return the folders that mounts at one place may have staged files in: `path`, and those in it that exist.

    A mount has one of the latter where an earlier process of its place goes on (`fuse.staging.folder.open_staging`).
    """
    return [path, *(folder for folder in folders_beside(path) if folder.is_dir())]


def folders_beside(path: Path) -> list[Path]:
    """Return the folders in `path` that may be used while another process has `path` itself; they may not exist."""
    return [path / str(number) for number in range(2, FOLDERS_MAX + 1)]


def find_leftovers(folder: Path, leave_out: frozenset[str] = frozenset()) -> list[Leftover]:
    """Return everything in the folder that was not stored, in the order of the last writes.  LocalFileError."""
    try:
        names = [path.name for path in folder.iterdir()]
        stems = [name.removesuffix(SIDECAR_SUFFIX) for name in names if name.endswith(SIDECAR_SUFFIX)]
        found = [_leftover(folder, stem) for stem in stems if stem not in leave_out]
    except OSError as error:
        raise LocalFileError(f"{folder}: {error.strerror}", subject=str(folder)) from error
    # Times are those of the file system's clock, which ticks slowly; a later file has a higher number.
    return sorted(filter(None, found), key=lambda leftover: (leftover.time_ns, len(leftover.id), leftover.id))


@contextmanager
def claimed(leftover: Leftover) -> Iterator[None]:
    """Keep other commands from restoring or removing it in the block.  StoreLocked if a mount or a command has it.

    LocalFileError if it cannot be opened, or is gone.
    """
    try:
        # For writing, as a lock over NFS needs.
        descriptor = os.open(leftover.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise LocalFileError(f"{leftover.path}: {error.strerror}", subject=leftover.name) from error
    try:
        _lock(descriptor, leftover)
        yield
    finally:
        os.close(descriptor)


def is_in_use(leftover: Leftover) -> bool:
    """Return True if a running mount has it open, or a command is at work on it, or did so until just now."""
    try:
        with claimed(leftover):
            return False
    except StoreLocked:
        return True
    except LocalFileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return True  # its mount has stored it since it was found
        raise


@contextmanager
def reopened(leftover: Leftover, *, with_base: bool) -> Iterator[StagedFile]:
    """Open its content as a mount has it, to read and store it; base bytes are zeros unless `with_base`."""
    try:
        descriptor = os.open(leftover.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        sidecar = SidecarFile(str(leftover.path.with_suffix(SIDECAR_SUFFIX)))
    except OSError as error:
        raise LocalFileError(f"{leftover.path}: {error.strerror}", subject=leftover.name) from error
    try:
        state = SidecarState(
            leftover.name,
            leftover.time_ns,
            leftover.size_bytes,
            leftover.base if with_base else None,
            leftover.base_bytes if with_base else 0,
            RangeSet(leftover.ranges),
        )
        room = Room(leftover.path.parent, leftover.size_bytes)
        yield StagedFile.found(room, Slot(leftover.id, descriptor, sidecar), state, _Kept())
    finally:
        sidecar.close()
        os.close(descriptor)


class _Kept:
    """Slots of leftovers: each stays as it is."""

    def another(self, slot: Slot) -> Slot | None:
        return None

    def release(self, slot: Slot, *, keep: bool) -> None:
        return None


def restore(leftover: Leftover, target: Path, read_base: Callable[[int, int], bytes] | None = None) -> None:
    """Make the leftover a plain file at `target`, durable on return; the leftover stays.

    `read_base(offset, length)` returns bytes of the stored content that it was written over; without it those are
    zeros (holes).  AlreadyExists, LocalFileError; then `target` is not made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(target, flags, 0o600)
    except FileExistsError as error:
        raise AlreadyExists(f"{target} exists already; give another place", subject=str(target)) from error
    except OSError as error:
        raise LocalFileError(f"{target}: {error.strerror}", subject=str(target)) from error
    try:
        _fill(descriptor, leftover, read_base)
        sync_folder(target.parent)
    except OSError as error:
        os.unlink(target)
        raise LocalFileError(f"{target}: {error.strerror}", subject=str(target)) from error
    except BaseException:
        os.unlink(target)
        raise
    finally:
        os.close(descriptor)


def forget(leftover: Leftover) -> None:
    """Remove the leftover for good.  LocalFileError."""
    try:
        leftover.path.with_suffix(SIDECAR_SUFFIX).unlink(missing_ok=True)
        leftover.path.unlink(missing_ok=True)
    except OSError as error:
        raise LocalFileError(f"{leftover.path}: {error.strerror}", subject=leftover.name) from error


def remove_unowned(folder: Path) -> None:
    """Remove files of the folder that hold nothing to restore.  OSError."""
    needed = {leftover.path.stem for leftover in find_leftovers(folder)}
    for path in list(folder.iterdir()):
        stem, suffix = os.path.splitext(path.name)
        if suffix in (BYTES_SUFFIX, SIDECAR_SUFFIX) and stem not in needed:
            path.unlink()
        elif suffix == ".new":
            path.unlink()  # a sidecar that was not in place yet


def _lock(descriptor: int, leftover: Leftover) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise LocalFileError(f"{leftover.path}: {error.strerror}", subject=leftover.name) from error
        raise StoreLocked(
            f"{leftover.name or leftover.id} is open in a running mount, or another command is at work on it",
            subject=leftover.name,
        ) from error


def _leftover(folder: Path, stem: str) -> Leftover | None:
    path, sidecar = folder / f"{stem}{BYTES_SUFFIX}", folder / f"{stem}{SIDECAR_SUFFIX}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        try:
            with sidecar.open("rb") as file:
                text = file.read(SIDECAR_BYTES_MAX)
        except FileNotFoundError:
            return None  # the running mount that it belongs to has removed it
        state = replay(text, found.st_size) if text else None
        if state is None and (not text or not found.st_size):
            return None
        state = state or _unreadable(descriptor, found.st_size)
    finally:
        os.close(descriptor)
    if not state.is_changed:
        return None
    return Leftover(
        state.name,
        path,
        state.size,
        max(state.time_ns, found.st_mtime_ns),
        tuple(state.ranges),
        state.base,
        state.base_bytes,
        bool(state.name) and state.is_complete,
    )


def _unreadable(descriptor: int, length: int) -> SidecarState:
    """Return the state that is known without the sidecar: the pages that were written."""
    return SidecarState("", 0, length, None, length, RangeSet(_data_extents(descriptor, length)))


def _data_extents(descriptor: int, length: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < length:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:
            return  # no data behind `end`
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def _fill(descriptor: int, leftover: Leftover, read_base: Callable[[int, int], bytes] | None) -> None:
    os.ftruncate(descriptor, leftover.size_bytes)
    source = os.open(leftover.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for begin, end in leftover.ranges:
            _copy(descriptor, lambda offset, length: os.pread(source, length, offset), begin, end)
    finally:
        os.close(source)
    if read_base is not None:
        for begin, end in RangeSet(leftover.ranges).gaps(0, leftover.base_bytes):
            _copy(descriptor, read_base, begin, end)
    os.fsync(descriptor)


def _copy(descriptor: int, read: Callable[[int, int], bytes], begin: int, end: int) -> None:
    while begin < end:
        piece = read(begin, min(_COPY_BYTES, end - begin))
        if not piece:
            raise LocalFileError(f"there are no bytes at {begin}, where there must be some")
        view = memoryview(piece)
        while view:
            written = os.pwrite(descriptor, view, begin)
            view = view[written:]
            begin += written
