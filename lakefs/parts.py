"""Part files: how an object lands in a local file, whole or not at all.

The bytes go to `.NAME.lake-part` beside the target, which takes the target's name when they are complete.  A part
that a killed process left behind is kept where it holds the right bytes (`PartFile.holds`).

Rules kept here:
- The part is locked while it is written: a second reader of the same target is refused, never mixed in.
- Only the file that was written gets the target's name: a part that was replaced meanwhile is an error.
- A descriptor is closed by whoever uses it last: fetches that still run in other threads after a failure write
  into this file or nowhere.

Everything here blocks, but for `discard`; operations call it as `Work`.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from typing import Protocol

from lakefs.errors import AlreadyExists, LocalFileError, PermissionDenied
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES
from lakefs.opened import Piece
from lakefs.verify import matches_id

PART_SUFFIX = ".lake-part"
NAME_BYTES_MAX = 255
"""Longest file name of Linux file systems."""
MODE_MASK = 0o777
"""Permission bits that are restored; set-uid and the like are not taken from a store."""


class FileAttributes(Protocol):
    """What of an object's stat a local file takes over."""

    @property
    def mode(self) -> int: ...

    @property
    def mtime_ns(self) -> int: ...


def part_path(target: str) -> str:
    """The part of a target: `.NAME.lake-part` beside it; a name too long for that is hashed."""
    folder, name = os.path.split(target)
    if len(os.fsencode(name)) + len(PART_SUFFIX) + 1 > NAME_BYTES_MAX:
        name = data_chunk_id(os.fsencode(name))[1:17].hex()
    return os.path.join(folder, f".{name}{PART_SUFFIX}")


class PartFile:
    """A target being written; the sink of its object's chunks.

    Nothing exists before `open`, so whoever made it can end it from then on, whatever interrupts the opening: what
    `open` finds ended when it has the part, it removes.
    """

    in_place = False

    def __init__(self, target: str) -> None:
        self.target = target
        self.path = part_path(target)
        self.found_bytes = 0
        """Length of what an earlier, killed process had left; known when opened."""
        self._lock = threading.Lock()
        self._users = 0
        self._descriptor = -1
        self._ended = False
        self._local = threading.local()

    def open(self) -> None:
        """Create or take over the part.  LocalFileError, AlreadyExists (the target is being written elsewhere)."""
        if os.path.isdir(self.target):
            raise LocalFileError(f"{self.target}: is a folder", subject=self.target)
        descriptor = _open_locked(self.path, self.target)
        with self._lock:
            self._descriptor = descriptor
            self.found_bytes = os.fstat(descriptor).st_size
            if self._ended:
                self._remove()
                os.close(descriptor)

    def set_length(self, size_bytes: int) -> None:
        """Make the part as long as the object; nothing happens after it has ended."""
        if not self._enter():
            return
        try:
            os.ftruncate(self._descriptor, size_bytes)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def holds(self, piece: Piece) -> bool:
        """Whether the part has the piece's bytes already."""
        if piece.offset + piece.length > self.found_bytes or not self._enter():
            return False
        memory = self.memory_for(piece)
        try:
            count = os.preadv(self._descriptor, [memory], piece.offset)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._leave()
        return count == piece.length and matches_id(piece.chunk, memory)

    def memory_for(self, piece: Piece) -> memoryview:
        """One buffer of 4 MiB for each thread."""
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = bytearray(CHUNK_BYTES)
        return memoryview(buffer)[: piece.length]

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        """Write the piece; nothing happens after the part has ended."""
        if not self._enter():
            return
        done = 0
        try:
            while done < len(payload):
                done += os.pwrite(self._descriptor, payload[done:], piece.offset + done)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def finish(self, attributes: FileAttributes, *, replace: bool = True) -> None:
        """Give the part its mode, time and the target's name.  AlreadyExists with `replace` false.  Not synced."""
        with self._lock:
            if self._ended:
                return  # given up meanwhile: the target stays as it is
            try:
                os.fchmod(self._descriptor, attributes.mode & MODE_MASK)
                os.utime(self._descriptor, ns=(attributes.mtime_ns, attributes.mtime_ns))
                self._check_identity()
                if replace:
                    os.replace(self.path, self.target)
                else:
                    os.link(self.path, self.target)
                    os.unlink(self.path)
            except FileExistsError as error:
                raise AlreadyExists(f"{self.target} exists already", subject=self.target) from error
            except OSError as error:
                raise self._failure(error) from error
            self._end()

    def discard(self) -> None:
        """Remove the part; harmless after `finish`."""
        with self._lock:
            if not self._ended:
                if self._descriptor >= 0:
                    self._remove()
                self._end()

    def keep(self) -> None:
        """Leave the part where it is, for a later try; harmless after `finish`."""
        with self._lock:
            if not self._ended:
                self._end()

    def _remove(self) -> None:
        try:
            self._check_identity()
            os.unlink(self.path)
        except (OSError, LocalFileError):
            pass  # it is gone, or another's by now; there is nothing to remove

    def _check_identity(self) -> None:
        ours = os.fstat(self._descriptor)
        there = os.stat(self.path, follow_symlinks=False)
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
            raise LocalFileError(
                f"{self.path} was replaced while it was written; try again", subject=self.target
            )

    def _enter(self) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._users += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._ended and not self._users:
                os.close(self._descriptor)

    def _end(self) -> None:
        """With the lock held."""
        self._ended = True
        if not self._users and self._descriptor >= 0:
            os.close(self._descriptor)

    def _failure(self, error: OSError) -> LocalFileError:
        return LocalFileError(f"{self.target}: {error.strerror}", subject=self.target)


def write_whole(
    target: str, payload: memoryview | bytes, attributes: FileAttributes, *, replace: bool = True
) -> None:
    """A small file in one go.  LocalFileError, AlreadyExists."""
    part = PartFile(target)
    try:
        part.open()
        part.set_length(len(payload))
        part.deliver(Piece(data_chunk_id(b""), 0, len(payload)), memoryview(payload))
        part.finish(attributes, replace=replace)
    finally:
        part.discard()


def restore_attributes(target: str, attributes: FileAttributes) -> None:
    """Mode and modification time of a file whose content is right already.  LocalFileError."""
    try:
        found = os.stat(target)
        if stat.S_IMODE(found.st_mode) != attributes.mode & MODE_MASK:
            os.chmod(target, attributes.mode & MODE_MASK)
        if found.st_mtime_ns != attributes.mtime_ns:
            os.utime(target, ns=(found.st_atime_ns, attributes.mtime_ns))
    except OSError as error:
        raise LocalFileError(f"{target}: {error.strerror}", subject=target) from error


def _open_locked(path: str, target: str) -> int:
    """The part's descriptor with its exclusive lock; the lock counts only while the name is still that file's."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise LocalFileError(f"{target}: {error.strerror}", subject=target) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(path, follow_symlinks=False)
            ours = os.fstat(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AlreadyExists(
                f"{target} is being written by another process; wait for it to end", subject=target
            ) from error
        except FileNotFoundError:
            os.close(descriptor)
            continue
        except OSError as error:
            os.close(descriptor)
            raise PermissionDenied(f"{path} cannot be locked: {error.strerror}", subject=target) from error
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return descriptor
        os.close(descriptor)
