"""The system calls of the model-based test, done in one folder.

A place is a folder, some slots for open files and mappings, and one method for each kind of call.  The same steps on
two places must give the same results.  A method returns the call's result, as plain values that can be compared and
printed, or raises its error.  A slot that holds nothing gives `None`, so that any part of a sequence is a sequence.

Nothing here knows which kind of file system it works on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = mmap.PAGESIZE
RENAME_NOREPLACE: Final = 1
AT_FDCWD: Final = -100
_libc: Final = ctypes.CDLL(None, use_errno=True)
_PATTERNS: Final[dict[int, bytes]] = {}

Result = bytes | int | str | tuple[object, ...] | None


def pattern(key: int, size: int) -> bytes:
    """Return `size` bytes that belong to `key`, without zeros, and not periodic in pages."""
    if key not in _PATTERNS:
        raw = random.Random(key).randbytes(4099)
        _PATTERNS[key] = raw.replace(b"\0", b"\1")
    block = _PATTERNS[key]
    return (block * (size // len(block) + 1))[:size]


@dataclass
class Mapping:
    """A shared mapping of a file's beginning, and a descriptor that shows how far it may be touched."""

    memory: mmap.mmap
    descriptor: int


class Place:
    """One folder, with its open files and mappings by slot number."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self._files: dict[int, int] = {}
        self._maps: dict[int, Mapping] = {}
        self.same_size_truncated = False

    def _at(self, path: str) -> str:
        return f"{self.folder}/{path}" if path else self.folder

    # Files by handle.

    def open(self, slot: int, path: str, flags: int, mode: int = 0o644) -> Result:
        """Open into a slot; what it held is closed then."""
        descriptor = os.open(self._at(path), flags | os.O_CLOEXEC, mode)
        self.close(slot)
        self._files[slot] = descriptor
        return "opened"

    def dup(self, slot: int, source: int) -> Result:
        """Make a second descriptor of the same open file."""
        if source not in self._files or source == slot:
            return None
        self.close(slot)
        self._files[slot] = os.dup(self._files[source])
        return "opened"

    def close(self, slot: int) -> Result:
        """Close a slot; the error of close is the result that matters."""
        descriptor = self._files.pop(slot, None)
        if descriptor is None:
            return None
        os.close(descriptor)
        return "closed"

    def _with(self, slot: int, call: Callable[[int], Result]) -> Result:
        descriptor = self._files.get(slot)
        return None if descriptor is None else call(descriptor)

    def read(self, slot: int, size: int) -> Result:
        """Read at the file's position."""
        return self._with(slot, lambda file: os.read(file, size))

    def pread(self, slot: int, offset: int, size: int) -> Result:
        """Read at an offset."""
        return self._with(slot, lambda file: os.pread(file, size, offset))

    def write(self, slot: int, key: int, size: int) -> Result:
        """Write at the file's position, or at its end with O_APPEND."""
        return self._with(slot, lambda file: os.write(file, pattern(key, size)))

    def pwrite(self, slot: int, offset: int, key: int, size: int) -> Result:
        """Write at an offset, possibly far after the end."""
        return self._with(slot, lambda file: os.pwrite(file, pattern(key, size), offset))

    def lseek(self, slot: int, offset: int, whence: int) -> Result:
        """Move a file's position; return it.  Folders are left out: their positions mean nothing."""

        def seek(file: int) -> Result:
            plain = stat.S_ISREG(os.fstat(file).st_mode)
            return os.lseek(file, offset, whence) if plain else None

        return self._with(slot, seek)

    def ftruncate(self, slot: int, size: int) -> Result:
        """Set the length, by handle."""
        return self._with(slot, lambda file: self._cut(file, size))

    def fsync(self, slot: int) -> Result:
        """Store content and attributes."""
        return self._with(slot, os.fsync)

    def fdatasync(self, slot: int) -> Result:
        """Store content."""
        return self._with(slot, os.fdatasync)

    def fstat(self, slot: int) -> Result:
        """Return kind, size, mode and number of names, of a file that may have none."""
        return self._with(slot, lambda file: _status(os.fstat(file)))

    def fchmod(self, slot: int, mode: int) -> Result:
        """Set the mode, by handle."""
        return self._with(slot, lambda file: os.fchmod(file, mode))

    def futime(self, slot: int, mtime_ns: int) -> Result:
        """Set the time of modification in nanoseconds, by handle."""
        return self._with(slot, lambda file: os.utime(file, ns=(mtime_ns, mtime_ns)))

    def copy_range(self, source: int, target: int, size: int) -> Result:
        """Call copy_file_range from one open file's position to another's."""
        if source not in self._files or target not in self._files:
            return None
        return os.copy_file_range(self._files[source], self._files[target], size)

    def read_direct(self, path: str, pages: int, count: int) -> Result:
        """Read whole pages past the page cache, through a handle of its own; files only."""
        if not stat.S_ISREG(os.stat(self._at(path)).st_mode):
            return None
        descriptor = os.open(self._at(path), os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, count * PAGE) as aligned:
                got = os.preadv(descriptor, [aligned], pages * PAGE)
                return aligned[:got]
        finally:
            os.close(descriptor)

    # Mappings.

    def map(self, slot: int, source: int, size: int, writable: bool) -> Result:
        """Map a file's first bytes, shared."""
        self.unmap(slot)
        if source not in self._files:
            return None
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # A length beyond the end may be mapped, not touched; Python's own check would refuse it.
        size = min(size, os.fstat(self._files[source]).st_size)
        if size == 0:
            return None
        memory = mmap.mmap(self._files[source], size, mmap.MAP_SHARED, protection)
        self._maps[slot] = Mapping(memory, os.dup(self._files[source]))
        return "mapped"

    def _within(self, slot: int, offset: int, size: int) -> memoryview | None:
        """Return a part of a mapping, cut at the file's end: to touch more would be SIGBUS."""
        found = self._maps.get(slot)
        if found is None:
            return None
        end = min(len(found.memory), os.fstat(found.descriptor).st_size, offset + size)
        return memoryview(found.memory)[offset:end] if offset < end else None

    def map_read(self, slot: int, offset: int, size: int) -> Result:
        """Read bytes of a mapping."""
        view = self._within(slot, offset, size)
        return None if view is None else bytes(view)

    def map_write(self, slot: int, offset: int, key: int, size: int) -> Result:
        """Change bytes of a mapping."""
        view = self._within(slot, offset, size)
        if view is None or view.readonly:
            return None
        view[:] = pattern(key, len(view))
        return len(view)

    def msync(self, slot: int) -> Result:
        """Write changed pages to the file."""
        found = self._maps.get(slot)
        if found is None:
            return None
        found.memory.flush()
        return "synced"

    def unmap(self, slot: int) -> Result:
        """End a mapping; its pages are written to the file without a call for that."""
        found = self._maps.pop(slot, None)
        if found is None:
            return None
        found.memory.close()
        os.close(found.descriptor)
        return "unmapped"

    # Files and folders by name.

    def truncate(self, path: str, size: int) -> None:
        """Set the length, by name."""
        self._cut(self._at(path), size)

    def _cut(self, file: int | str, size: int) -> None:
        before = os.stat(file).st_size
        os.truncate(file, size)
        # Local file systems do not agree on whether this is a change.
        self.same_size_truncated |= before == size

    def mkdir(self, path: str, mode: int) -> None:
        """Make a folder."""
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        """Remove a file or symlink, open or not."""
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        """Move, over whatever may be replaced."""
        os.rename(self._at(old), self._at(new))

    def rename_new(self, old: str, new: str) -> None:
        """Move, only to a name that is free."""
        arguments = (AT_FDCWD, os.fsencode(self._at(old)), AT_FDCWD, os.fsencode(self._at(new)))
        if _libc.renameat2(*arguments, RENAME_NOREPLACE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def symlink(self, target: str, path: str) -> None:
        """Make a symlink."""
        os.symlink(target, self._at(path))

    def readlink(self, path: str) -> Result:
        """Return a symlink's target."""
        return os.readlink(self._at(path))

    def stat(self, path: str) -> Result:
        """Return the status of what a name leads to."""
        return _status(os.stat(self._at(path)))

    def lstat(self, path: str) -> Result:
        """Return the status of a name itself."""
        return _status(os.lstat(self._at(path)))

    def chmod(self, path: str, mode: int) -> None:
        """Set the mode."""
        os.chmod(self._at(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set owner and group; -1 leaves one."""
        os.chown(self._at(path), uid, gid, follow_symlinks=False)

    def utime(self, path: str, mtime_ns: int, follow: bool) -> None:
        """Set the time of modification, in nanoseconds."""
        os.utime(self._at(path), ns=(mtime_ns, mtime_ns), follow_symlinks=follow)

    def setxattr(self, path: str, name: str, key: int, size: int, flags: int) -> None:
        """Set an extended attribute."""
        os.setxattr(self._at(path), f"user.{name}", pattern(key, size), flags)

    def getxattr(self, path: str, name: str) -> Result:
        """Return an extended attribute's value."""
        return os.getxattr(self._at(path), f"user.{name}")

    def listxattr(self, path: str) -> Result:
        """Return the names of extended attributes."""
        return tuple(sorted(os.listxattr(self._at(path))))

    def removexattr(self, path: str, name: str) -> None:
        """Remove an extended attribute."""
        os.removexattr(self._at(path), f"user.{name}")

    def listdir(self, path: str) -> Result:
        """Return names and kinds, sorted."""
        with os.scandir(self._at(path)) as entries:
            return tuple(sorted((found.name, _kind_of_entry(found)) for found in entries))

    def read_file(self, path: str) -> Result:
        """Return a file's whole content."""
        return Path(self._at(path)).read_bytes()

    def write_file(self, path: str, key: int, size: int) -> Result:
        """Write a whole file and close it."""
        return Path(self._at(path)).write_bytes(pattern(key, size))

    def end(self) -> Result:
        """Close all that is open; then raise the first error."""
        errors: list[OSError] = []
        for close, slots in ((self.unmap, sorted(self._maps)), (self.close, sorted(self._files))):
            for slot in slots:
                try:
                    close(slot)
                except OSError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return None


def outcome(call: Callable[[], object]) -> object:
    """Return the result of a call: its value, or OSError and the name of its errno."""
    try:
        return call()
    except OSError as error:
        return OSError, errno.errorcode.get(error.errno or 0, str(error))


def _kind_of_entry(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "folder" if entry.is_dir(follow_symlinks=False) else "file"


def _status(found: os.stat_result) -> Result:
    """Return what must be equal: type and mode, and for a file its size and number of names."""
    kind = found.st_mode >> 12
    plain = kind == 0o10
    return (oct(found.st_mode), found.st_size if kind != 0o4 else 0, found.st_nlink if plain else 1)
