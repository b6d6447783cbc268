"""Files in memory: a tmpfs that is mounted nowhere, its nameless files, and how they are used beside this process.

The tmpfs is made with huge pages where the kernel has them (a memfd has single pages on most machines), without swap,
and with a bound of its own.  No path leads to it: its files are reached by descriptors, and end with the last of them
and the last mapping.

`is_used` and `is_writable_elsewhere` ask the kernel by way of a lease, which it grants only if no other open file
description, and so no mapping, is in the way.  A lease that is held while another opens the file would signal this
process and make the other wait, so:
- each lease is given back in the next call, and its signal is one that is ignored by default;
- callers ask only when no open of the file can be under way.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
from typing import Final

_FSOPEN: Final = 430  # the same on every architecture, as are the next
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_CLOEXEC: Final = 1
_SET_FLAG: Final = 0
_SET_STRING: Final = 1
_CREATE: Final = 6
_FALLOC_KEEP_SIZE: Final = 1
_HUGE: Final = (b"always", b"within_size", b"")
"""Kinds of huge pages in the order of preference; the last: none, for kernels that have none."""

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class MemoryFiles:
    """One detached tmpfs of at most `size_bytes`.  OSError if this user or kernel may not make one."""

    def __init__(self, size_bytes: int) -> None:
        self._folder = _detached_tmpfs(size_bytes)

    def new(self) -> int:
        """Return a descriptor, for reading and writing, of a new empty file without a name.  OSError."""
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._folder)

    def close(self) -> None:
        """Give the tmpfs up; files that are still open or mapped live on until they are not."""
        os.close(self._folder)


def reopened(descriptor: int, flags: int) -> int:
    """Return a new descriptor of the same file, opened anew with these flags."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Have the file system keep room for these bytes, without changing the file's length.  OSError ENOSPC: for none."""
    if _libc.fallocate(descriptor, _FALLOC_KEEP_SIZE, offset, length) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def is_used(descriptor: int) -> bool:
    """Return True if the file is open or mapped beside this descriptor, which was opened for reading only."""
    return not _would_lease(descriptor, fcntl.F_WRLCK)


def is_writable_elsewhere(descriptor: int) -> bool:
    """Return True if the file is open for writing, or mapped by such an opening; the descriptor only reads."""
    return not _would_lease(descriptor, fcntl.F_RDLCK)


def used_bytes(descriptor: int) -> int:
    """Return the memory that the file takes."""
    return os.fstat(descriptor).st_blocks * 512


def _would_lease(descriptor: int, kind: int) -> bool:
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
    except BlockingIOError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _detached_tmpfs(size_bytes: int) -> int:
    for huge in _HUGE:
        context = _checked(_syscall(_FSOPEN, b"tmpfs", _CLOEXEC))
        try:
            if huge and _syscall(_FSCONFIG, context, _SET_STRING, b"huge", huge, 0) != 0:
                continue
            _checked(_syscall(_FSCONFIG, context, _SET_STRING, b"size", b"%d" % size_bytes, 0))
            _syscall(_FSCONFIG, context, _SET_FLAG, b"noswap", None, 0)  # unknown before Linux 6.4: then it may swap
            _checked(_syscall(_FSCONFIG, context, _CREATE, None, None, 0))
            return _checked(_syscall(_FSMOUNT, context, _CLOEXEC, 0))
        finally:
            os.close(context)
    raise AssertionError("the last kind is tried without an option that can be refused")


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
