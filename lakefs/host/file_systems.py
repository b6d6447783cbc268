"""File systems: those from which the engine reads files of its clients (local ones, not served by another process), and
whether one still takes files."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

LOCAL_FILE_SYSTEMS: Final = {
    0x0000EF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
}
"""File systems by the magic number that statfs(2) reports; files on others are refused, and their clients send
bytes."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def file_system_of(descriptor: int) -> int | None:
    """Return the magic number of the descriptor's file system; None on failure, with errno set."""
    buffer = (ctypes.c_long * 32)()
    return None if _libc.fstatfs(descriptor, ctypes.byref(buffer)) else int(buffer[0]) & 0xFFFFFFFF


def free_inodes(place: str | int) -> int | None:
    """Return how many files this user can still create on the file system of a path or descriptor; None where it does
    not count them.  OSError."""
    state = os.statvfs(place)
    return state.f_favail if state.f_files else None


def lacks_inode(error: OSError, place: str) -> bool:
    """Return True if a name could not be made because the file system of this path has no inode left."""
    if error.errno != errno.ENOSPC:
        return False
    try:
        return free_inodes(place) == 0
    except OSError:
        return False
