"""Programs that opened handles: which program a request is from, and if it still has a descriptor of what it opened.

Each close of a descriptor is a flush: also of a duplicate, and of a child's copy.  What the kernel says of an open file
is in `/proc/PROCESS/fdinfo`, one file for each descriptor: the inode's number, how it was opened, and by which mount.

Rules kept here:
- A program is a process, whichever of its threads opens or closes.  It is found at the open: by its flush the thread
  may have ended.
- What cannot be seen is "no descriptor": a program that has ended, is in another namespace of processes, or may not be
  looked at by this user; a kernel before 5.14, which gives no inode; a program with more than `DESCRIPTORS_MAX`.
- A process that began after the open has only the number of the one that opened.
- Nothing here asks a file system but `/proc`: a request to the mount itself would wait for this very process.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple

from fuse.kernel.mount_point import devices_of_mounts
from lakefs.ports import Offload

DESCRIPTORS_MAX: Final = 1024
"""Most descriptors of a program that are looked at: 7 us each."""
_LOOP_MAX: Final = 64
"""Most that are looked at in the loop; more in a thread."""
_THREADS_MAX: Final = 64
_TEXT_BYTES: Final = 4096
_PATH_ONLY: Final = 0o10000000
"""O_PATH: such a descriptor neither reads nor writes."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


_LEADER_S: Final = 1.0
"""Time that a thread's process is remembered: no number of a thread is used again so soon."""
_LEADERS_MAX: Final = 256
_leaders: dict[int, tuple[int, float]] = {}
"""Processes of the threads that opened files last, and when that has to be asked again."""
_NEVER_OURS: Final = ("/dev/", "/proc/", "/sys/")


class Program(NamedTuple):
    """The process that opened a handle, and when, in s since the machine's start."""

    process: int
    opened_s: float


class OpenedFile(NamedTuple):
    """An open file as its descriptors show it: its inode's numbers, how it may be used (O_ACCMODE), and its device."""

    numbers: frozenset[int]
    access: int
    device: str


def program_of(thread: int) -> Program | None:
    """Return the program of the thread that sent the request under way; None if it cannot be seen."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    process, until_s = _leaders.get(thread, (0, 0.0))
    if now_s >= until_s:
        process = 0 if thread <= 0 or not _has_own_proc() else _leader(thread)
        if len(_leaders) >= _LEADERS_MAX:
            _leaders.clear()
        _leaders[thread] = process, now_s + _LEADER_S
    return Program(process, now_s) if process else None


async def descriptor_count(program: Program, file: OpenedFile, offload: Offload) -> int:
    """Return how many descriptors of such an open file a program has; 0 if that cannot be seen."""
    try:
        folder = os.open(f"/proc/{program.process}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        open_count = os.fstat(folder).st_size
        if open_count > DESCRIPTORS_MAX:
            return 0
        if 0 < open_count <= _LOOP_MAX:
            return _count_in(folder, f"/proc/{program.process}", program, file)
    except OSError:  # it has just ended
        return 0
    finally:
        os.close(folder)
    return await offload.run(_count, program, file)  # before Linux 6.2 the number is not known


@cache
def _has_own_proc() -> bool:
    """Return True if `/proc` is of this process's own namespace, as the numbers of requests are."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _leader(thread: int) -> int:
    """Return the number of the thread's process; 0 if it cannot be seen."""
    try:
        os.close(os.pidfd_open(thread))
    except OSError:  # not the first thread of its process
        return _number_in(_text(f"/proc/{thread}/status"), b"\nTgid:")
    return thread


def _count(program: Program, file: OpenedFile) -> int:
    """Like `descriptor_count`: of the process, or of its threads, if the first one has ended and so has none."""
    process = f"/proc/{program.process}"
    for place in (process, *(f"{process}/task/{thread}" for thread in _names(f"{process}/task")[:_THREADS_MAX])):
        with suppress(OSError):
            folder = os.open(f"{place}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if os.listdir(folder):
                    return _count_in(folder, place, program, file)
            finally:
                os.close(folder)
    return 0


def _count_in(folder: int, place: str, program: Program, file: OpenedFile) -> int:
    """Count in the opened folder `fd` of a place in `/proc`."""
    names = os.listdir(folder)
    if len(names) > DESCRIPTORS_MAX:
        return 0
    texts = [_text(f"{place}/fdinfo/{name}") for name in names if _has_path(name, folder)]
    mounts = [mount for text in texts if (mount := _mount_of(text, file)) is not None]
    if not mounts or not _began_before(program):
        return 0
    devices = devices_of_mounts(program.process)
    # A mount that was taken away, this one or another, is in no table any more: then the close is taken for the last.
    # A process whose first thread has ended has no table to look at.
    unknown = "" if devices else file.device
    return sum(1 for mount in mounts if devices.get(mount, unknown) == file.device)


def _has_path(name: str, folder: int) -> bool:
    """Return True unless a descriptor is a pipe, a socket, a device: to see that is cheaper than to read about it."""
    try:
        path = os.readlink(name, dir_fd=folder)
    except OSError:
        return False
    return path.startswith("/") and not path.startswith(_NEVER_OURS)


def _mount_of(descriptor: bytes, file: OpenedFile) -> int | None:
    """Return the id of a descriptor's mount, if it may be one of this open file; else None."""
    if _number_in(descriptor, b"\nino:") not in file.numbers:
        return None
    flags = _number_in(descriptor, b"\nflags:", base=8)
    if flags & _PATH_ONLY or flags & os.O_ACCMODE != file.access:
        return None
    return _number_in(descriptor, b"\nmnt_id:")


def _began_before(program: Program) -> bool:
    # proc(5): the 22nd field of `stat`; the second is a name in brackets, which may have any character.
    fields = _text(f"/proc/{program.process}/stat").rpartition(b")")[2].split()
    return len(fields) > 19 and int(fields[19]) / _TICKS_PER_S <= program.opened_s


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> bytes:
    """Return the beginning of a file; empty if it cannot be read."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _TEXT_BYTES)
        finally:
            os.close(descriptor)
    return b""


def _number_in(text: bytes, label: bytes, base: int = 10) -> int:
    """Return the number behind a label; 0 if there is none."""
    value = text.partition(label)[2].partition(b"\n")[0].strip()
    return int(value, base) if value.isdigit() else 0
