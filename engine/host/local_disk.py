"""The real disk: one folder of a local file system, through system calls.

Rules kept here:
- Every `OSError` is translated at one place (`_Translating`): no room is StoreFull, a read-only file system is
  StoreReadOnly, no descriptor left is EngineBusy, a client's memory that it has cut is SourceChanged, any other error
  is DiskFailed naming the file.  FileNotFoundError and FileExistsError pass only where a name was asked for: from a
  call on an open descriptor they are a failure of the disk like any other.
- A write is whole or raises; short writes are continued.
- No path leads outside the root: paths are relative, without `.`, `..` and empty parts, and the last part is never
  followed when it is a symlink.
- While the lock is held, no name is created, renamed or removed when folder or lock file are not the locked ones; a
  file that is missing because the folder was moved is not reported as missing.
- A call that the file system refuses is replaced by one that keeps the port's promise: O_DIRECT by buffered writes
  (`direct` is False then), fallocate by a longer file, punching by writing zeros.

It does not retry a failed sync, and it does not know what the files hold.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from engine.host.client_files import MEMORY_FILE_SYSTEMS, file_system
from engine.host.folder_lock import NO_DESCRIPTOR, FolderLock, SpareDescriptors
from engine.host.zeros import zeros
from lakefs.errors import DiskFailed, EngineBusy, LakeError, SourceChanged, StoreFull, StoreReadOnly
from lakefs.host.descriptors import after
from lakefs.host.file_systems import free_inodes, lacks_inode
from lakefs.host.page_cache import is_cached
from lakefs.ids import Buffer
from lakefs.limits import PAGE_BYTES
from lakefs.ports import FileStat

_FALLOC_KEEP_SIZE: Final = 0x01  # linux/falloc.h
_FALLOC_PUNCH_HOLE: Final = 0x02
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})
_NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_BLOCK_BYTES: Final = 512
"""Unit of st_blocks, on every file system."""
_ASKED_FROM_BYTES: Final = 128 << 10
"""Bytes of a read for which the kernel is asked first if they are cached: on a miss it would begin to fetch them."""
_VECTORS_MAX: Final = 1024  # IOV_MAX of Linux
_CLOSED: Final = (1 << 31) - 1  # no process has so many: EBADF, where Python refuses -1 in its own way
_ROOT_NAMES: Final = frozenset({"", "."})

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


def _translated(error: OSError, doing: str, name: str) -> LakeError:
    reason = error.strerror or str(error)
    if error.errno in NO_DESCRIPTOR:
        return EngineBusy(
            f"cannot {doing} {name} now: {reason}; try again, close connections, or raise the limit (LimitNOFILE)",
            subject=name,
        )
    if error.errno in _REFUSED:
        return DiskFailed(f"cannot {doing} {name}: {reason}; see who owns it, and its mode", subject=name)
    if error.errno in _NO_ROOM:
        message = f"no room to {doing} {name} ({reason}); remove objects, then run: lake gc"
        return StoreFull(message, subject=name)
    if error.errno == errno.EFAULT:
        return SourceChanged(f"the client's memory was shrunk, or has no room: it cannot be used to {doing} {name}")
    if error.errno == errno.EROFS:
        return StoreReadOnly(f"cannot {doing} {name}: the file system is read-only; remount it", subject=name)
    return DiskFailed(f"cannot {doing} {name}: {reason}; see the kernel's log for the device", subject=name)


class _Translating:
    """Context that turns an OSError into a LakeError.  A generator would cost three times as much."""

    __slots__ = ("_doing", "_name")
    passing: tuple[type[OSError], ...] = ()
    """Errors that are answers of their own."""

    def __init__(self, doing: str, name: str) -> None:
        self._doing = doing
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, self.passing):
            raise _translated(error, self._doing, self._name) from error


class _TranslatingName(_Translating):
    """For a call that asks for a file by its name: there may be none, or one already."""

    __slots__ = ()
    passing = (FileNotFoundError, FileExistsError)


def _refuse_without_inode(error: OSError, doing: str, name: str, root: str) -> None:
    """Raise StoreFull in other words if a new name was refused because the file system has no inode left."""
    if lacks_inode(error, root):
        raise StoreFull(
            f"no inode left to {doing} {name}: the file system holds as many files as it can; remove some of them, "
            "whosever they are, or use a file system that was made with more inodes",
            subject=name,
        ) from error


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> bool:
    """Call fallocate(2); False if the file system has none.  glibc's posix_fallocate would write every block."""
    while _libc.fallocate(descriptor, mode, offset, length) != 0:
        code = ctypes.get_errno()
        if code in _NOT_SUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class LocalFile:
    """An open file (`lakefs.ports.DiskFile`).  Reads and writes may come from several threads at once."""

    __slots__ = ("_cached_flags", "_descriptor", "_name", "direct")

    def __init__(self, descriptor: int, name: str, direct: bool) -> None:
        self._descriptor = descriptor
        self._name = name
        self.direct = direct
        """True if reads and writes bypass the page cache."""
        self._cached_flags = None if direct else os.RWF_NOWAIT
        """Flags for reading only cached pages; None when the file system supports no such read."""

    @property
    def in_memory(self) -> bool:
        """True if the file is on a file system in memory, such as tmpfs."""
        return file_system(self._descriptor) in MEMORY_FILE_SYSTEMS

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; returns the count read, short only at the file's end."""
        with _Translating("read", self._name):
            done = os.preadv(self._descriptor, [buffer], offset)
            # A read past the cache that ends inside a page has met the file's end.
            while 0 < done < len(buffer) and not (self.direct and done % PAGE_BYTES):
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def preadv_cached_into(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fill the buffers from the page cache; returns True if all of it was cached."""
        length = sum(map(len, buffers))
        if self._cached_flags is None or (
            length >= _ASKED_FROM_BYTES and is_cached(self._descriptor, offset, length) is False
        ):
            return False
        with _Translating("read", self._name):
            try:
                count = os.preadv(self._descriptor, buffers, offset, self._cached_flags)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                # The file system does not support the flag; one in memory need not.
                self._cached_flags = 0 if self.in_memory else None
                return self.preadv_cached_into(buffers, offset)
        return count == length

    def pwrite(self, payload: Buffer, offset: int) -> None:
        """Write all of `payload` at `offset`."""
        self.pwritev([payload], offset)

    def pwritev(self, payloads: Sequence[Buffer], offset: int) -> None:
        """Write the payloads one behind the other, up to 1,024 in one system call."""
        with _Translating("write", self._name):
            missing = payloads if len(payloads) <= _VECTORS_MAX else after(payloads, 0)
            left_bytes = sum(map(len, payloads))
            while left_bytes:
                count = os.pwritev(self._descriptor, missing[:_VECTORS_MAX], offset)
                if count == 0:
                    raise OSError(errno.EIO, "the device takes no more bytes")
                offset += count
                left_bytes -= count
                if left_bytes:
                    missing = after(missing, count)

    def sync_data(self) -> None:
        """Call fdatasync.  After a failure the kernel may have dropped the pages: the caller must not retry."""
        with _Translating("sync", self._name):
            os.fdatasync(self._descriptor)

    def allocate(self, offset: int, length: int) -> None:
        """Reserve blocks for [offset, offset + length), extending the file when it is shorter."""
        with _Translating("extend", self._name):
            if _fallocate(self._descriptor, 0, offset, length):
                return
            if self.size() < offset + length:
                os.ftruncate(self._descriptor, offset + length)

    def punch(self, offset: int, length: int) -> None:
        """Free the whole pages inside [offset, offset + length); all of it reads as zero, the size stays."""
        with _Translating("free a part of", self._name):
            if _fallocate(self._descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, length):
                return
            self.pwritev(zeros(max(0, min(length, self.size() - offset))), offset)

    def truncate(self, size: int) -> None:
        """Set the length; a longer file reads as zero there."""
        with _Translating("change the length of", self._name):
            os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        """Length in bytes."""
        with _Translating("look at", self._name):
            return os.fstat(self._descriptor).st_size

    def allocated_bytes(self) -> int:
        """Bytes of allocated blocks."""
        with _Translating("look at", self._name):
            return os.fstat(self._descriptor).st_blocks * _BLOCK_BYTES

    def fileno(self) -> int:
        """The descriptor; valid until `close`."""
        return self._descriptor

    def close(self) -> None:
        """Release the descriptor.  Closing twice does nothing; any other use after it is DiskFailed."""
        descriptor, self._descriptor = self._descriptor, _CLOSED
        if descriptor != _CLOSED:
            with _Translating("close", self._name):
                os.close(descriptor)


class LocalDisk:
    """The folder of a store on a local file system (`lakefs.ports.Disk`).  `""` and `"."` name the root.

    While its lock is held, writes find a descriptor even when connections have taken all others.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root.absolute())
        self._spares = SpareDescriptors()
        self._lock: FolderLock | None = None

    def open(self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False) -> LocalFile:
        """Open a file, read-write unless `read_only`; with `create` it must be new."""
        flags = os.O_RDONLY if read_only else os.O_RDWR
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        with _TranslatingName("open", path):
            if create:
                self.check_lock()
            opening = os.open if read_only else partial(self._spares.use, os.open)
            try:
                descriptor = opening(self.local_path(path), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                if self._held is not None:
                    self._held.check_folder()
                raise
            except OSError as error:
                _refuse_without_inode(error, "create", path, self._root)
                raise
        try:
            with _Translating("open", path):
                return LocalFile(descriptor, path, direct and _make_direct(descriptor))
        except LakeError:
            os.close(descriptor)
            raise

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, in order of their text; empty when there is no such folder."""
        with _Translating("list", path):
            return self._spares.use(_names_in, self.local_path(path))

    def make_folder(self, path: str) -> None:
        """Create a folder; the root with all the folders above it, their names durable on return."""
        with _Translating("create folder", path):
            self.check_lock()
            try:
                if path in _ROOT_NAMES:
                    make_folders(Path(self._root))
                else:
                    os.mkdir(self.local_path(path), mode=0o700)
            except FileExistsError:
                if not os.path.isdir(self.local_path(path)):
                    raise
            except OSError as error:
                above = os.path.dirname(self.local_path(path))
                _refuse_without_inode(error, "create folder", path or self._root, above)
                raise

    def exists(self, path: str) -> bool:
        """Return True if a file, folder or link has that name."""
        with _Translating("look for", path):
            try:
                os.lstat(self.local_path(path))
            except FileNotFoundError:
                return False
        return True

    def is_folder(self, path: str) -> bool:
        """Return True if a folder has that name; a link to one is none."""
        with _Translating("look for", path):
            try:
                return stat.S_ISDIR(os.lstat(self.local_path(path)).st_mode)
            except FileNotFoundError:
                return False

    def rename(self, source: str, target: str) -> None:
        """Call rename(2): `target` is the old file or the new one at every moment."""
        with _TranslatingName("rename", source):
            self.check_lock()
            os.rename(self.local_path(source), self.local_path(target))

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        with _TranslatingName("remove", path):
            self.check_lock()
            os.unlink(self.local_path(path))

    def sync_folder(self, path: str) -> None:
        """Call fsync on the folder."""
        with _Translating("sync folder", path):
            _sync_folder(self.local_path(path), partial(self._spares.use, os.open))

    def stat(self, path: str) -> FileStat:
        """Call lstat on a file."""
        with _TranslatingName("look at", path):
            found = os.lstat(self.local_path(path))
        return FileStat(found.st_ino, found.st_size, found.st_blocks * _BLOCK_BYTES)

    def free_bytes(self) -> int:
        """Bytes that this user can still take (root's share of the file system is not counted)."""
        state = self._file_system_state()
        return state.f_bavail * state.f_frsize

    def free_inodes(self) -> int | None:
        """Files that this user can still create; None where the file system does not count them."""
        with _Translating("look at", self._root):
            return free_inodes(self._root if self._held is None else self._held.folder)

    def total_bytes(self) -> int:
        """Size of the file system."""
        state = self._file_system_state()
        return state.f_blocks * state.f_frsize

    def lock(self, path: str) -> FolderLock:
        """Lock folder and file by flock(2), exclusive, without waiting.

        The file is never removed, except after a failed first start: its inode is the store's identity.
        """
        with _Translating("lock", path):
            try:
                self._lock = FolderLock(self._root, path, self._spares)
            except OSError as error:
                _refuse_without_inode(error, "create", path, self._root)
                raise
        return self._lock

    def check_lock(self) -> None:
        """Raise StoreReadOnly unless folder and lock file are the locked ones; without a lock does nothing."""
        if self._held is not None:
            with _Translating("look at", self._root):
                self._held.check()

    @property
    def _held(self) -> FolderLock | None:
        return self._lock if self._lock is not None and self._lock.is_held else None

    def _file_system_state(self) -> os.statvfs_result:
        with _Translating("look at", self._root):
            return os.statvfs(self._root) if self._held is None else os.statvfs(self._held.folder)

    def local_path(self, path: str) -> str:
        """Return the absolute path.  DiskFailed for one that is not inside the store."""
        if path in _ROOT_NAMES:
            return self._root
        parts = path.split("/")
        if "\0" in path or any(part in ("", ".", "..") for part in parts):
            raise DiskFailed(f"{path!r} is not a path inside the store", subject=path)
        return f"{self._root}/{path}"


def make_folders(path: Path) -> list[Path]:
    """Create a folder, mode 0700, and those above it; the name of each new one is durable on return.  OSError.

    Returns the new ones, the outermost first.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(str(folder.parent))
    return missing


def _names_in(path: str) -> list[str]:
    # With one descriptor, which listdir of an open folder doubles, and closed on return: the spare is back at once.
    try:
        found = os.scandir(path)
    except FileNotFoundError:
        return []
    with found as entries:
        return sorted(entry.name for entry in entries)


def _sync_folder(path: str, opening: Callable[[str, int], int] = os.open) -> None:
    descriptor = opening(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_direct(descriptor: int) -> bool:
    """Switch O_DIRECT on; returns False if the file system refuses.

    Set after opening, because an open with O_CREAT and a refused O_DIRECT leaves the new file behind.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
