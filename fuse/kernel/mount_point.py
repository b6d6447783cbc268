"""Mount points: the kernel's table of mounts as a process sees it, checks, and unmounting.

Rules kept here:
- The table is read from `/proc/self/mountinfo`, never by asking a file system: a mount that does not answer must
  not hang its observer.
- Only `answers` touches a mount, from a thread of its own that is waited for no longer than the limit.
- Unmounting never kills the connection: open files stay usable until the process behind the mount ends.
- Nothing is mounted over a mount, whatever its type.  The one exception is a dead lake mount (its process was
  killed): it is removed, and the log says so.
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

import structlog

from lakefs.errors import AlreadyExists, EngineBusy, FolderNotEmpty, LocalFileError, NotAFolder, PermissionDenied

LAKE_TYPE: Final = "fuse.lake"
MOUNT_TABLE: Final = Path("/proc/self/mountinfo")
ANSWER_TIMEOUT_S: Final = 5.0
UNMOUNT_TIMEOUT_S: Final = 30.0
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")
_NOT_CONNECTED: Final = (errno.ENOTCONN, errno.ECONNABORTED)
_DEAD_MOUNTS_MAX: Final = 64
"""Most dead mounts removed at one place; each is one restart that went wrong."""
_log: Final = structlog.get_logger()


@dataclass(frozen=True)
class MountEntry:
    """One mount: its device number as `MAJOR:MINOR`, mount point, type and source."""

    device: str
    mount_point: Path
    type: str
    source: str


def mount_at(path: Path) -> MountEntry | None:
    """Return the uppermost mount at exactly that path (a real one, see `real_path`), or None."""
    found = [entry for entry in all_mounts() if entry.mount_point == path]
    return found[-1] if found else None


def all_mounts(device: str = "") -> list[MountEntry]:
    """Return every mount that this process sees, or those of one device, in the order in which they were made."""
    try:
        return entries_of(MOUNT_TABLE, device)
    except OSError as error:
        raise LocalFileError(f"{MOUNT_TABLE}: {error.strerror}", subject=str(MOUNT_TABLE)) from error


def mounts_seen_by(pid: str, device: str = "") -> list[MountEntry]:
    """Return what `all_mounts` returns in another process; nothing if it has ended, or its table is not shown."""
    try:
        return entries_of(Path(f"/proc/{pid}/mountinfo"), device)
    except OSError:
        return []


def entries_of(table: Path, device: str) -> list[MountEntry]:
    """Return the mounts in a table of the kernel's format; of one device, unless that is empty.  OSError."""
    # Most lines of a long table are left out before they are parsed.
    has_device = f" {device} ".encode()
    found = [_parsed(line) for line in table.read_bytes().splitlines() if not device or has_device in line]
    return [entry for entry in found if device in ("", entry.device)]


def devices_of_mounts(process: int) -> dict[int, str]:
    """Return the device of each mount that a process sees, by the mount's id in `/proc`; empty if it has ended."""
    try:
        lines = Path(f"/proc/{process}/mountinfo").read_bytes().splitlines()
    except OSError:
        return {}
    return {int(line.partition(b" ")[0]): _parsed(line).device for line in lines}


def _parsed(line: bytes) -> MountEntry:
    # proc(5): id parent major:minor root mount-point options optional... - type source super-options
    before, _, after = line.partition(b" - ")
    fields, (kind, source) = before.split(b" "), after.split(b" ")[:2]
    return MountEntry(fields[2].decode(), Path(_plain(fields[4])), kind.decode(), _plain(source))


def _plain(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def real_path(path: Path) -> Path:
    """Return the path without links.  A mount at the path itself is not touched: it may hang."""
    absolute = Path(os.path.abspath(path))
    likely = Path(os.path.realpath(absolute.parent)) / absolute.name
    return likely if mount_at(likely) else Path(os.path.realpath(likely))


def answers(path: Path) -> bool | None:
    """Return True if the mount at `path` has a living process behind it; None if it does not answer in time."""
    found: list[bool] = []

    def ask() -> None:
        try:
            os.statvfs(path)  # never answered from the kernel's cache
        except OSError as error:
            found.append(error.errno not in _NOT_CONNECTED)
        else:
            found.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_TIMEOUT_S)
    return found[0] if found else None


def unmount(path: Path, *, lazy: bool) -> None:
    """Remove the uppermost mount at `path`.  Blocks: may wait for the process behind the mount.

    `lazy`: at once, even when files in it are open.  Raises EngineBusy if it is in use (never when lazy),
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
    """Call umount2(2); return its errno, 0 on success."""
    call = ctypes.CDLL(None, use_errno=True).umount2
    call.argtypes = (ctypes.c_char_p, ctypes.c_int)
    return ctypes.get_errno() if call(os.fsencode(path), flags) else 0


def _fusermount(path: Path, lazy: bool) -> int:
    """Unmount with fusermount3, as users who are not root unmount their own mounts.  Returns an errno, guessed from
    its output; 0 on success."""
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


def check_mount_point(path: Path, *, may_hold_files: bool = False) -> None:
    """Raise unless something can be mounted at `path` (a real path).  Blocks, at most some seconds.

    AlreadyExists: a mount exists at `path`.  LocalFileError: `path` does not exist.  NotAFolder.  FolderNotEmpty unless
    `may_hold_files`.  PermissionDenied: `path` may not be read.
    """
    for _ in range(_DEAD_MOUNTS_MAX):
        entry = mount_at(path)
        if entry is None:
            return _check_folder(path, may_hold_files)
        refuse_living(entry)
        unmount(path, lazy=True)
        _log.warning("took away a dead mount: its process had been killed", mount_point=str(path))
    raise AlreadyExists(f"{path} has more than {_DEAD_MOUNTS_MAX} dead mounts; remove them with: umount -l {path}")


def refuse_living(entry: MountEntry) -> None:
    """Raise AlreadyExists unless the mount is a dead lake mount."""
    path = entry.mount_point
    alive = None if entry.type == "autofs" else answers(path)
    ours = entry.type == LAKE_TYPE
    if alive is False and ours:
        return
    if alive is False:
        message = f"{path} is a dead mount of {entry.type}; remove it with: umount -l {path}"
    elif ours and alive is None:
        message = f"{path} is a lake mount that does not answer; remove it with: lake unmount --lazy {path}"
    elif ours:
        message = f"a lake is mounted at {path} already; unmount it with: lake unmount {path}"
    else:
        message = f"{path} is a mount already ({entry.type}, {entry.source}); choose another folder"
    raise AlreadyExists(message, subject=str(path))


def _check_folder(path: Path, may_hold_files: bool) -> None:
    try:
        if not path.is_dir():
            os.stat(path)
            raise NotAFolder(f"mount point {path} is not a folder", subject=str(path))
        first = next(iter(os.scandir(path)), None)
    except FileNotFoundError as error:
        raise LocalFileError(
            f"mount point {path} does not exist; make it with: mkdir -p {path}", subject=str(path)
        ) from error
    except PermissionError as error:
        raise PermissionDenied(f"mount point {path}: {error.strerror}", subject=str(path)) from error
    except OSError as error:
        raise LocalFileError(f"mount point {path}: {error.strerror}", subject=str(path)) from error
    if first is not None and not may_hold_files:
        raise FolderNotEmpty(
            f"mount point {path} is not empty (it holds {first.name!r}), and the mount would hide what is in it;"
            " choose an empty folder, or mount with -o nonempty",
            subject=str(path),
        )
