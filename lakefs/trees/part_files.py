"""Part files: how an object becomes a local file, whole or not at all.

The bytes are written to `.NAME.lake-part` beside the target; the part gets the target's name when it is complete.  A
part that a killed process left is reused where it holds the right bytes (`PartFile.holds`).

Rules kept here:
- A part is recognized by its mark (`lakefs.trees.part_marks`), never by its name.  A file with a part's name and no
  mark is the user's: it is neither written to nor removed, and the part takes the next of `part_names`.
- A part gets its name once it has its mark and its lock, if the file system supports that (O_TMPFILE); otherwise a
  kill between the two leaves an empty file.
- The part is locked while it is written: a second get to the same target is refused, never mixed in.
- Only the file that was written gets the target's name: a part that was replaced while it was written is an error.
- A link that has the target's name is replaced, and the link's target stays unchanged.
- The last user of a descriptor closes it: fetches that still run in other threads after a failure write into this
  file or nowhere.

Everything here blocks except `discard`; operations call it as `Work`.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from typing import Protocol

from lakefs.content.verify import matches_id
from lakefs.errors import AlreadyExists, LocalFileError, PermissionDenied
from lakefs.get.opened import Piece
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES, PART_NAMES_MAX
from lakefs.put.sources import FileSource
from lakefs.trees.local_folders import LocalTarget, has_name
from lakefs.trees.part_marks import is_marked, remove_mark, write_mark

PART_SUFFIX = ".lake-part"
NAME_BYTES_MAX = 255
"""Longest file name on Linux file systems."""
MODE_MASK = 0o777
"""Permission bits that are restored; set-uid and the like are never taken from a store."""
WRITTEN_AT_ONCE_BYTES = 256 << 10
"""Longest write.  While one thread writes, others that write to the same file spin for its lock in the kernel: two
threads with 4 MiB each took up to 6 times the CPU and the time."""
_PART_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UNNAMED = os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE
_ATTEMPTS = 3
"""Attempts to write a small file whose part is replaced each time."""


class FileAttributes(Protocol):
    """The attributes of an object's stat that a local file gets."""

    @property
    def mode(self) -> int: ...

    @property
    def mtime_ns(self) -> int: ...


def part_names(name: str) -> list[str]:
    """Return the names that a target's part may have; the first free one is used.  A name that is too long is
    hashed."""
    if len(os.fsencode(name)) + len(f"..{PART_NAMES_MAX}{PART_SUFFIX}") > NAME_BYTES_MAX:
        name = data_chunk_id(os.fsencode(name))[1:17].hex()
    numbered = [f".{name}.{number}{PART_SUFFIX}" for number in range(2, PART_NAMES_MAX + 1)]
    return [f".{name}{PART_SUFFIX}", *numbered]


def is_part(path: str) -> bool:
    """Return True if a file is the part of a get that did not end, or has not ended yet."""
    name = os.path.basename(path)
    if not (name.startswith(".") and name.endswith(PART_SUFFIX)):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return is_marked(descriptor, name)
    finally:
        os.close(descriptor)


class PartFile:
    """A target being written; the sink of its object's chunks.

    No file exists before `open`.  The owner may end the part from the constructor on, also while `open` is
    interrupted: an `open` that finds the part ended removes its file.
    """

    in_place = False

    def __init__(self, target: LocalTarget) -> None:
        self.target = target.path
        self.part_name = ""
        """Name in the target's folder; known after `open`."""
        self.found_bytes = 0
        """Length of the part that an earlier, killed process left; known after `open`."""
        self.was_replaced = False
        """True if the part could not get the target's name because another file has the part's name."""
        self._place = target
        self._size_bytes = 0
        self._lock = threading.Lock()
        self._users = 0
        self._descriptor = -1
        self._folder = -1
        self._ended = False
        self._local = threading.local()

    def open(self) -> None:
        """Create the part, or take over an existing one.  LocalFileError, AlreadyExists (another get is writing the
        target)."""
        folder = self._place.open_folder()
        try:
            descriptor, part_name = self._open_in(folder)
        except BaseException:
            os.close(folder)
            raise
        with self._lock:
            self._descriptor, self._folder, self.part_name = descriptor, folder, part_name
            self.found_bytes = os.fstat(descriptor).st_size
            if self._ended:
                self._remove()
                self._close()

    def _open_in(self, folder: int) -> tuple[int, str]:
        try:
            if stat.S_ISDIR(os.stat(self._place.name, dir_fd=folder).st_mode):
                raise LocalFileError(f"{self.target}: is a folder", subject=self.target)
        except OSError:
            pass  # it does not exist, or is a dangling link
        try:
            return _open_part(folder, self._place.name, self.target)
        except OSError as error:
            raise self._failure(error) from error

    def set_length(self, size_bytes: int) -> None:
        """Make the part as long as the object, before its pieces are delivered; does nothing after the part has
        ended."""
        if not self._enter():
            return
        try:
            write_mark(self._descriptor, self.part_name, size_bytes)
            self._size_bytes = size_bytes
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def holds(self, piece: Piece) -> bool:
        """Return True if the part already has the piece's bytes."""
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
        """Return this thread's buffer of 4 MiB, cut to the piece."""
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = bytearray(CHUNK_BYTES)
        return memoryview(buffer)[: piece.length]

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        """Write the piece; does nothing after the part has ended."""
        if not self._enter():
            return
        done = 0
        try:
            while done < len(payload):
                done += os.pwrite(self._descriptor, payload[done : done + WRITTEN_AT_ONCE_BYTES], piece.offset + done)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            self._leave()

    def finish(self, attributes: FileAttributes, *, replace: bool = True) -> None:
        """Give the part its mode, time and the target's name.  AlreadyExists if `replace` is False.  Not synced."""
        with self._lock:
            if self._ended:
                return  # given up before this call: the target stays unchanged
            try:
                os.ftruncate(self._descriptor, self._size_bytes)
                _set_attributes(self._descriptor, attributes)
                self._check_identity()
                self._rename(replace)
                remove_mark(self._descriptor)
            except FileExistsError as error:
                raise AlreadyExists(f"{self.target} exists already", subject=self.target) from error
            except OSError as error:
                raise self._failure(error) from error
            self._end()

    def _rename(self, replace: bool) -> None:
        name, folder = self._place.name, self._folder
        if replace:
            os.replace(self.part_name, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            os.link(self.part_name, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            os.unlink(self.part_name, dir_fd=folder)

    def discard(self) -> None:
        """Remove the part; harmless after `finish`."""
        with self._lock:
            if not self._ended:
                if self._descriptor >= 0:
                    self._remove()
                self._end()

    def keep(self) -> None:
        """Leave the part in place, for a later get; harmless after `finish`."""
        with self._lock:
            if not self._ended:
                self._end()

    def _remove(self) -> None:
        try:
            self._check_identity()
            os.unlink(self.part_name, dir_fd=self._folder)
        except (OSError, LocalFileError):
            pass  # already removed, or the name is another file's by now; nothing to remove

    def _check_identity(self) -> None:
        if not _has_name(self._descriptor, self._folder, self.part_name):
            self.was_replaced = True
            path = os.path.join(os.path.dirname(self.target), self.part_name)
            raise LocalFileError(f"{path} was replaced while it was written; try again", subject=self.target)

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
                self._close()

    def _end(self) -> None:
        """Mark the part as ended; the caller holds the lock."""
        self._ended = True
        if not self._users and self._descriptor >= 0:
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        os.close(self._folder)

    def _failure(self, error: OSError) -> LocalFileError:
        return LocalFileError(f"{self.target}: {error.strerror}", subject=self.target)


def write_whole(
    target: LocalTarget, payload: memoryview | bytes, attributes: FileAttributes, *, replace: bool = True
) -> None:
    """Write a small file at once.  LocalFileError, AlreadyExists."""
    if _write_new(target, payload, attributes):
        return
    for attempts_left in reversed(range(_ATTEMPTS)):
        part = PartFile(target)
        try:
            part.open()
            part.set_length(len(payload))
            part.deliver(Piece(data_chunk_id(b""), 0, len(payload)), memoryview(payload))
            part.finish(attributes, replace=replace)
            return
        except LocalFileError:
            # Another object of the same tree may have the part's name as its own, and replaced the part.
            if not part.was_replaced or not attempts_left:
                raise
        finally:
            part.discard()


def restore_attributes(source: FileSource, attributes: FileAttributes) -> None:
    """Set mode and modification time of a file whose content is already right.  LocalFileError."""
    descriptor = source.fileno()
    try:
        if source.mode != attributes.mode & MODE_MASK:
            os.fchmod(descriptor, attributes.mode & MODE_MASK)
        if source.mtime_ns != attributes.mtime_ns:
            os.utime(descriptor, ns=(os.fstat(descriptor).st_atime_ns, attributes.mtime_ns))
    except OSError as error:
        raise LocalFileError(f"{source.path}: {error.strerror}", subject=source.path) from error


def _write_new(target: LocalTarget, payload: memoryview | bytes, attributes: FileAttributes) -> bool:
    """Write a file that has no name until it is complete.  Return False if that is impossible or the name is taken.

    A kill leaves no trace of it.  LocalFileError.
    """
    with target.folder() as folder:
        if has_name(target.name, folder):
            return False
        try:
            descriptor = os.open(".", _UNNAMED, 0o600, dir_fd=folder)
        except OSError:
            return False  # the file system has no such files, or an error that the part meets too
        try:
            view = memoryview(payload)
            while view:
                view = view[os.write(descriptor, view) :]
            _set_attributes(descriptor, attributes)
        except OSError as error:
            os.close(descriptor)
            raise LocalFileError(f"{target.path}: {error.strerror}", subject=target.path) from error
        try:
            _give_name(descriptor, folder, target.name)
        except OSError:
            return False  # the name was taken since, or /proc is not mounted
        finally:
            os.close(descriptor)
    return True


def _set_attributes(descriptor: int, attributes: FileAttributes) -> None:
    os.fchmod(descriptor, attributes.mode & MODE_MASK)
    os.utime(descriptor, ns=(attributes.mtime_ns, attributes.mtime_ns))


def _has_name(descriptor: int, folder: int, name: str) -> bool:
    ours = os.fstat(descriptor)
    there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _give_name(descriptor: int, folder: int, name: str) -> None:
    """Name a file that was opened without a name.  FileExistsError."""
    os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder, follow_symlinks=True)


# --- making and finding parts -------------------------------------------------------------------------


def _open_part(folder: int, name: str, target: str) -> tuple[int, str]:
    """Return the descriptor and name of a target's part, marked and locked.  Raises as `PartFile.open`, and
    OSError."""
    while True:
        free = ""
        for part_name in part_names(name):
            try:
                found = os.stat(part_name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                free = free or part_name
                continue
            if stat.S_ISREG(found.st_mode):
                descriptor = _take_over(folder, part_name, target)
                if descriptor is not None:
                    return descriptor, part_name
        if not free:
            first, *_, last = part_names(name)
            reason = f"other files beside it have the names {first} to {last}, which its part needs; rename one"
            raise LocalFileError(f"{target}: {reason}", subject=target)
        for make in (_make_unnamed, _make_named):
            try:
                return make(folder, free), free
            except FileExistsError:
                break  # another get made it; look again
            except OSError:
                if make is _make_named:
                    raise


def _take_over(folder: int, part_name: str, target: str) -> int | None:
    """Open and lock a part that an earlier get left; None if the file is not a lake part, or no longer exists."""
    try:
        descriptor = os.open(part_name, _PART_FLAGS, dir_fd=folder)
    except OSError:
        return None  # a lake part can always be opened
    is_taken = False
    try:
        if is_marked(descriptor, part_name):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The get that held the lock may have ended since: then the file has the target's name.
            is_taken = _has_name(descriptor, folder, part_name)
    except BlockingIOError as error:
        raise AlreadyExists(
            f"{target} is being written by another process; wait for it to end", subject=target
        ) from error
    except FileNotFoundError:
        pass
    except OSError as error:
        reason = f"{target}: its part {part_name} cannot be locked: {error.strerror}"
        raise PermissionDenied(reason, subject=target) from error
    finally:
        if not is_taken:
            os.close(descriptor)
    return descriptor if is_taken else None


def _make_unnamed(folder: int, part_name: str) -> int:
    """Create a part whose name appears once it is marked and locked.  FileExistsError; OSError if that is
    impossible."""
    descriptor = os.open(".", _UNNAMED, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_mark(descriptor, part_name, 0)
        _give_name(descriptor, folder, part_name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make_named(folder: int, part_name: str) -> int:
    """Create a part whose name appears first.  FileExistsError, OSError."""
    descriptor = os.open(part_name, _PART_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_mark(descriptor, part_name, 0)
    except BaseException:
        os.unlink(part_name, dir_fd=folder)
        os.close(descriptor)
        raise
    return descriptor
