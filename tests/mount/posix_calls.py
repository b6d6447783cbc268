"""System calls by name, made by a process of its own as some user: the far side of `tests.mount.posix`.

A caller process has a current folder and numbered slots for what it has open.  It answers each call with ("ok", value)
or ("error", name of the errno), and lives until the call `stop`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

Outcome = tuple[str, object]
AT_FDCWD: Final = -100
AT_SYMLINK_NOFOLLOW: Final = 0x100
AT_EACCESS: Final = 0x200
UTIME_NOW: Final = (1 << 30) - 1
UTIME_OMIT: Final = (1 << 30) - 2
_NS: Final = 1_000_000_000
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = ctypes.c_void_p
_libc.readdir.restype = ctypes.c_void_p
_libc.telldir.restype = ctypes.c_long
_D_NAME: Final = 19
"""Where glibc's struct dirent has the name."""


class User(NamedTuple):
    """The user of a caller process."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def answer_calls(user: User, calls: Connection) -> None:
    """Become the user, and make the calls that are sent, until the call `stop`."""
    if user.uid:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    os.umask(0o022)
    caller = Caller()
    while True:
        name, arguments = calls.recv()
        if name == "stop":
            return
        calls.send(_outcome(getattr(caller, name, None) or getattr(os, name), arguments))


def _outcome(call: Callable[..., object], arguments: Sequence[object]) -> Outcome:
    try:
        return "ok", _plain(call(*arguments))
    except OSError as error:
        return "error", errno.errorcode.get(error.errno or 0, str(error))
    except (LookupError, OverflowError, ValueError) as error:  # an empty slot, or arguments that Python refuses
        return "error", type(error).__name__


def _plain(value: object) -> object:
    if isinstance(value, os.stat_result):
        return status(value)
    return None if isinstance(value, memoryview) else value


def status(found: os.stat_result) -> tuple[object, ...]:
    """Return type and mode, owner, size and number of names; for a folder neither size nor number of names."""
    is_folder = stat.S_ISDIR(found.st_mode)
    names, size = (None, None) if is_folder else (found.st_nlink, found.st_size)
    return (oct(found.st_mode), found.st_uid, found.st_gid, names, size)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _timespecs(atime_ns: int, mtime_ns: int) -> ctypes.Array[ctypes.c_long]:
    parts: list[int] = []
    for time_ns in (atime_ns, mtime_ns):
        special = time_ns in (UTIME_NOW, UTIME_OMIT)
        parts += (0, time_ns) if special else divmod(time_ns, _NS)
    return (ctypes.c_long * 4)(*parts)


class Caller:
    """The calls that `os` lacks, or has in a shape that cannot be sent."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._folders: dict[str, tuple[int, list[int]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def end(self) -> None:
        """Close everything, and leave the case's folder."""
        for mapped in self._maps.values():
            mapped.close()
        for descriptor in self._files.values():
            try:
                os.close(descriptor)
            except OSError:
                continue
        for folder, _ in self._folders.values():
            _libc.closedir(ctypes.c_void_p(folder))
        for process in self._processes.values():
            process.kill()
            process.wait()
        for held in (self._files, self._maps, self._folders, self._processes):
            held.clear()
        os.chdir("/")
        os.umask(0o022)

    # --- what is open --------------------------------------------------------------------------------

    def open(self, slot: str, path: str, flags: int, mode: int = 0o644) -> None:
        """Open into a slot; what was open there is closed."""
        opened = os.open(path, flags, mode)
        if slot in self._files:
            os.close(self._files[slot])
        self._files[slot] = opened

    def close(self, slot: str) -> None:
        """Close a slot."""
        os.close(self._files.pop(slot))

    def make(self, path: str, content: bytes = b"", mode: int = 0o644) -> None:
        """Make a new file with content."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            if content:
                os.write(descriptor, content)
        finally:
            os.close(descriptor)

    def content(self, path: str) -> bytes:
        """Return all bytes of a file."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, 1 << 20)
        finally:
            os.close(descriptor)

    def copy_in(self, path: str, source: str) -> None:
        """Copy a program into the folder."""
        shutil.copy(source, path)

    def fstat(self, slot: str) -> os.stat_result:
        """Return the status of a slot's file."""
        return os.fstat(self._files[slot])

    def read(self, slot: str, size: int) -> bytes:
        """Read at the position."""
        return os.read(self._files[slot], size)

    def write(self, slot: str, content: bytes) -> int:
        """Write at the position."""
        return os.write(self._files[slot], content)

    def pread(self, slot: str, size: int, offset: int) -> bytes:
        """Read at an offset."""
        return os.pread(self._files[slot], size, offset)

    def pwrite(self, slot: str, content: bytes, offset: int) -> int:
        """Write at an offset."""
        return os.pwrite(self._files[slot], content, offset)

    def readv(self, slot: str, *sizes: int) -> list[bytes]:
        """Read into several buffers."""
        buffers = [bytearray(size) for size in sizes]
        got = os.readv(self._files[slot], buffers)
        return [str(got).encode(), *(bytes(buffer) for buffer in buffers)]

    def writev(self, slot: str, *parts: bytes) -> int:
        """Write from several buffers."""
        return os.writev(self._files[slot], parts)

    def lseek(self, slot: str, offset: int, whence: int) -> int:
        """Move the position; return it."""
        return os.lseek(self._files[slot], offset, whence)

    def ftruncate(self, slot: str, size: int) -> None:
        """Set the length."""
        os.ftruncate(self._files[slot], size)

    def fallocate(self, slot: str, mode: int, offset: int, size: int) -> None:
        """Make the system call itself."""
        _checked(
            _libc.fallocate(self._files[slot], mode, ctypes.c_long(offset), ctypes.c_long(size))
        )  # fmt: skip

    def fsync(self, slot: str) -> None:
        """Store the file."""
        os.fsync(self._files[slot])

    def fdatasync(self, slot: str) -> None:
        """Store the file's content."""
        os.fdatasync(self._files[slot])

    def syncfs(self, slot: str) -> None:
        """Store all of the file system."""
        _checked(_libc.syncfs(self._files[slot]))

    def copy_range(self, source: str, target: str, size: int, *offsets: int) -> int:
        """Call copy_file_range."""
        return os.copy_file_range(self._files[source], self._files[target], size, *offsets)

    def flock(self, slot: str, operation: int) -> None:
        """Lock the whole file."""
        fcntl.flock(self._files[slot], operation)

    def set_lock(self, slot: str, kind: int, start: int, length: int) -> None:
        """Call fcntl(F_SETLK)."""
        fcntl.fcntl(self._files[slot], fcntl.F_SETLK, struct.pack("hhqqi4x", kind, 0, start, length, 0))

    def get_lock(self, slot: str, kind: int, start: int, length: int) -> tuple[int, ...]:
        """Call fcntl(F_GETLK); return its answer without the process's number."""
        packed = struct.pack("hhqqi4x", kind, 0, start, length, 0)
        found = struct.unpack("hhqqi4x", fcntl.fcntl(self._files[slot], fcntl.F_GETLK, packed))
        return tuple(found[:4])

    # --- mappings ------------------------------------------------------------------------------------

    def map(self, slot: str, size: int, writable: bool, shared: bool = True) -> None:
        """Map the first bytes of a slot."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self._maps[slot] = mmap.mmap(self._files[slot], size, flags, protection)

    def map_read(self, slot: str, begin: int, end: int) -> bytes:
        """Read bytes of a mapping."""
        return self._maps[slot][begin:end]

    def map_write(self, slot: str, begin: int, content: bytes) -> None:
        """Change bytes of a mapping."""
        self._maps[slot][begin : begin + len(content)] = content

    def map_sync(self, slot: str) -> None:
        """Call msync."""
        self._maps[slot].flush()

    def map_end(self, slot: str) -> None:
        """Call munmap."""
        self._maps.pop(slot).close()

    # --- names ---------------------------------------------------------------------------------------

    def rename2(self, old: str, new: str, flags: int) -> None:
        """Call renameat2 with flags."""
        _checked(_libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))

    def linkat(self, old: str, new: str, flags: int) -> None:
        """Make a hard link."""
        _checked(_libc.linkat(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags))

    def listdir(self, path: str) -> list[str]:
        """Return names, sorted."""
        return sorted(os.listdir(path))

    def bind(self, path: str) -> None:
        """Bind a Unix socket to a name."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)

    def name_max(self, path: str) -> tuple[int, int]:
        """Return the longest name that statvfs and pathconf report."""
        return (os.statvfs(path).f_namemax, os.pathconf(path, "PC_NAME_MAX"))

    # --- attributes ----------------------------------------------------------------------------------

    def fchmod(self, slot: str, mode: int) -> None:
        """Set the mode, by handle."""
        os.fchmod(self._files[slot], mode)

    def fchown(self, slot: str, uid: int, gid: int) -> None:
        """Set owner and group, by handle."""
        os.fchown(self._files[slot], uid, gid)

    def utimens(self, path: str, atime_ns: int, mtime_ns: int, flags: int = 0) -> None:
        """Call utimensat."""
        times = _timespecs(atime_ns, mtime_ns)
        _checked(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, flags))

    def utimens_now(self, path: str) -> None:
        """Call utimensat without times."""
        _checked(_libc.utimensat(AT_FDCWD, os.fsencode(path), None, 0))

    def futimens(self, slot: str, atime_ns: int, mtime_ns: int) -> None:
        """Set the times, by handle."""
        _checked(_libc.futimens(self._files[slot], _timespecs(atime_ns, mtime_ns)))

    def times(self, path: str) -> tuple[int, int]:
        """Return access and modification time, which a call has just set."""
        found = os.lstat(path)
        return (found.st_atime_ns, found.st_mtime_ns)

    def access(self, path: str, mode: int) -> None:
        """Call access; raise its errno."""
        _checked(_libc.access(os.fsencode(path), mode))

    def eaccess(self, path: str, mode: int, flags: int = AT_EACCESS) -> None:
        """Call faccessat."""
        _checked(_libc.faccessat(AT_FDCWD, os.fsencode(path), mode, flags))

    def getxattr(self, path: str, name: str, size: int = 65536) -> tuple[int, bytes]:
        """Return the length, and the value."""
        buffer = ctypes.create_string_buffer(size or 1)
        got = _checked(_libc.getxattr(os.fsencode(path), name.encode(), buffer, size))
        return got, buffer.raw[:got] if size else b""

    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0) -> None:
        """Make the system call itself."""
        _checked(_libc.setxattr(os.fsencode(path), name.encode(), value, len(value), flags))

    def listxattr(self, path: str) -> list[str]:
        """Return names, sorted."""
        return sorted(os.listxattr(path))

    def listxattr_into(self, path: str, size: int) -> int:
        """Make the system call itself."""
        buffer = ctypes.create_string_buffer(size or 1)
        return _checked(_libc.listxattr(os.fsencode(path), buffer, size))

    # --- reading a folder ----------------------------------------------------------------------------

    def opendir(self, slot: str, path: str) -> None:
        """Begin to read a folder."""
        found = _libc.opendir(os.fsencode(path))
        _checked(-1 if found is None else 0)
        self._folders[slot] = (found, [])

    def next_names(self, slot: str, count: int) -> list[str]:
        """Return the next entries, sorted, without `.` and `..`, which are not counted; fewer at the end."""
        folder, _ = self._folders[slot]
        names: list[str] = []
        while len(names) < count:
            found = _libc.readdir(ctypes.c_void_p(folder))
            if found is None:
                break
            name = os.fsdecode(ctypes.string_at(found + _D_NAME))
            names += () if name in (".", "..") else (name,)
        return sorted(names)

    def count_names(self, slot: str, count: int) -> int:
        """Return how many of the next `count` entries exist."""
        return len(self.next_names(slot, count))

    def telldir(self, slot: str) -> None:
        """Remember the position."""
        folder, positions = self._folders[slot]
        positions.append(_libc.telldir(ctypes.c_void_p(folder)))

    def seekdir(self, slot: str, index: int) -> None:
        """Go back to a remembered position."""
        folder, positions = self._folders[slot]
        _libc.seekdir(ctypes.c_void_p(folder), ctypes.c_long(positions[index]))

    def rewinddir(self, slot: str) -> None:
        """Begin again at the first entry."""
        _libc.rewinddir(ctypes.c_void_p(self._folders[slot][0]))

    def make_many(self, folder: str, count: int) -> None:
        """Make the files 0000, 0001, ..."""
        for number in range(count):
            self.make(f"{folder}/{number:04}")

    def remove_while_reading(self, folder: str) -> int:
        """Read a folder once, and remove each name when it is read; return how many names were read."""
        self.opendir("removing", folder)
        count = 0
        while names := self.next_names("removing", 1):
            os.unlink(f"{folder}/{names[0]}")
            count += 1
        return count

    # --- programs and notices ------------------------------------------------------------------------

    def start(self, slot: str, path: str, *arguments: str) -> None:
        """Run a program until the end of the case."""
        self._processes[slot] = subprocess.Popen([path, *arguments], stdin=subprocess.DEVNULL)

    def run(self, path: str, *arguments: str) -> int:
        """Run a program to its end; return its exit code."""
        return subprocess.run([path, *arguments], check=False, timeout=20).returncode

    def watch(self, slot: str, path: str, mask: int = 0xFFF) -> None:
        """Begin to watch with inotify."""
        if slot not in self._files:
            self._files[slot] = _checked(_libc.inotify_init1(os.O_NONBLOCK))
        _checked(_libc.inotify_add_watch(self._files[slot], os.fsencode(path), mask))

    def notices(self, slot: str) -> list[tuple[str, str]]:
        """Return the inotify events since the last call: event bits and name, in order."""
        found: list[tuple[str, str]] = []
        while select.select([self._files[slot]], [], [], 0)[0]:
            data = os.read(self._files[slot], 65536)
            while data:
                _, mask, _, length = struct.unpack_from("iIII", data)
                found.append((hex(mask), data[16 : 16 + length].rstrip(b"\0").decode()))
                data = data[16 + length :]
        return found
