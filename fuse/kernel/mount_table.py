"""The kernel's table of mounts as this process sees it, and taking a mount out of it.

Rules kept here:
- The table is read from `/proc/self/mountinfo`, never by asking a file system: a mount that does not answer must
  not hang whoever looks at it.
- Only `answers` touches a mount, from a thread of its own that nobody waits for longer than the limit.
- Unmounting never kills the connection: who has files open keeps them until the process behind the mount ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lakefs.errors import EngineBusy, LocalFileError, PermissionDenied

LAKE_TYPE: Final = "fuse.lake"
MOUNT_TABLE: Final = Path("/proc/self/mountinfo")
ANSWER_TIMEOUT_S: Final = 5.0
UNMOUNT_TIMEOUT_S: Final = 30.0
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")
_NOT_CONNECTED: Final = (errno.ENOTCONN, errno.ECONNABORTED)


@dataclass(frozen=True)
class MountEntry:
    """One mount: the device number as `MAJOR:MINOR`, where it is, its type and its source."""

    device: str
    mount_point: Path
    type: str
    source: str


def mount_at(path: Path) -> MountEntry | None:
    """The uppermost mount at exactly that path (a real one, see `real_path`), or None."""
    found = [entry for entry in all_mounts() if entry.mount_point == path]
    return found[-1] if found else None


def all_mounts() -> list[MountEntry]:
    """Every mount that this process sees, in the order in which they were made."""
    try:
        lines = MOUNT_TABLE.read_bytes().splitlines()
    except OSError as error:
        raise LocalFileError(f"{MOUNT_TABLE}: {error.strerror}", subject=str(MOUNT_TABLE)) from error
    return [_parsed(line) for line in lines]


def _parsed(line: bytes) -> MountEntry:
    # proc(5): id parent major:minor root mount-point options optional... - type source super-options
    before, _, after = line.partition(b" - ")
    fields, (kind, source) = before.split(b" "), after.split(b" ")[:2]
    return MountEntry(fields[2].decode(), Path(_plain(fields[4])), kind.decode(), _plain(source))


def _plain(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def real_path(path: Path) -> Path:
    """The path without links.  What lies at it is not asked when it is a mount: that may be one that hangs."""
    absolute = Path(os.path.abspath(path))
    likely = Path(os.path.realpath(absolute.parent)) / absolute.name
    return likely if mount_at(likely) else Path(os.path.realpath(likely))


def answers(path: Path) -> bool | None:
    """Whether what is mounted at the path has a living process behind it; None: it said nothing for a while."""
    found: list[bool] = []

    def ask() -> None:
        try:
            os.statvfs(path)  # never answered from what the kernel remembers
        except OSError as error:
            found.append(error.errno not in _NOT_CONNECTED)
        else:
            found.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_TIMEOUT_S)
    return found[0] if found else None


def unmount(path: Path, *, lazy: bool) -> None:
    """Take the uppermost mount at `path` out of the tree.  Blocking: may wait for the process behind the mount.

    `lazy`: at once, even when files in it are open.  EngineBusy when it is in use (never when lazy),
    PermissionDenied, LocalFileError.
    """
    number = _umount2(path, _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0))
    if number == errno.EPERM:
        number = _fusermount(path, lazy)
    if number == errno.EBUSY:
        raise EngineBusy(
            f"{path} is in use: a process has a file open in it or works in it (fuser -vm {path} shows which);"
            f" end it, or take the mount away under it with: lake unmount --lazy {path}",
            subject=str(path),
        )
    if number == errno.EPERM:
        raise PermissionDenied(f"{path}: this user may not unmount it", subject=str(path))
    if number:
        raise LocalFileError(f"{path} cannot be unmounted: {os.strerror(number)}", subject=str(path))


def _umount2(path: Path, flags: int) -> int:
    """The system call; its errno, 0 when it is done."""
    call = ctypes.CDLL(None, use_errno=True).umount2
    call.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return ctypes.get_errno() if call(os.fsencode(path), flags) else 0


def _fusermount(path: Path, lazy: bool) -> int:
    """What those who are not root unmount their own mounts with; an errno, as well as its words allow."""
    if shutil.which("fusermount3") is None:
        raise LocalFileError("fusermount3 is missing: install the package fuse3", subject="fusermount3")
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=UNMOUNT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return errno.EBUSY
    if done.returncode == 0:
        return 0
    return errno.EBUSY if "busy" in done.stderr else errno.EPERM
