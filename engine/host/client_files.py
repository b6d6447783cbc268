"""Descriptors that clients send for the engine to read from.

The engine reads into memory of its own and hashes that, so a client that changes the file during the read only changes
the content stored under its own name.  Only regular files on local file systems are accepted: reading a pipe, a device,
or a file whose file system is served by a process may block for ever.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lakefs.errors import InvalidArgument, SourceChanged
from lakefs.host.file_systems import LOCAL_FILE_SYSTEMS, file_system_of

_LOCAL_TYPES: Final = {*LOCAL_FILE_SYSTEMS.values(), "ext2", "ext3", ""}
_MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)", re.MULTILINE)

MEMORY_FILE_SYSTEMS: Final = (0x01021994, 0x858458F6)
"""tmpfs and ramfs: files that are memory."""


def check_source(descriptor: int) -> None:
    """Raise InvalidArgument unless the descriptor is a readable regular file on a local file system."""
    # First, because fstat and fstatfs of a file system that a process or another machine serves wait for that server,
    # for ever if it does not answer.
    if _mounted_type(descriptor) not in _LOCAL_TYPES:
        raise InvalidArgument("a source must be on a local file system; send its bytes instead")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise InvalidArgument("a source must be a regular file; send its bytes instead")
    if file_system(descriptor) not in LOCAL_FILE_SYSTEMS:
        raise InvalidArgument("a source must be on a local file system; send its bytes instead")
    try:
        os.pread(descriptor, 1, 0)
    except OSError as error:
        raise InvalidArgument(f"the source cannot be read: {error.strerror}") from error


def filler(descriptor: int, offset: int) -> Callable[[memoryview, int], None]:
    """Return a function that fills a buffer from a place behind `offset`; it blocks.  SourceChanged at an early end."""

    def fill(target: memoryview, begin: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(descriptor, [target[done:]], offset + begin + done)
            except OSError as error:
                raise SourceChanged(f"the source cannot be read: {error.strerror}") from error
            if count == 0:
                raise SourceChanged("the source shrank while it was read; nothing was stored under its name")
            done += count

    return fill


def _mounted_type(descriptor: int) -> str:
    """Return the file system's type in the mount table; "" if it is not mounted here, such as memfds and pipes.

    A file system mounted in another namespace gives "" too; `check_source` then asks the file system itself.
    """
    (mount,) = _MOUNT_ID.findall(Path(f"/proc/self/fdinfo/{descriptor}").read_text())
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        if line.partition(" ")[0] == mount:
            return line.partition(" - ")[2].partition(" ")[0]
    return ""


def file_system(descriptor: int) -> int:
    """Return the magic number of the descriptor's file system; InvalidArgument when it cannot be read."""
    found = file_system_of(descriptor)
    if found is None:
        raise InvalidArgument(f"the descriptor cannot be examined: {os.strerror(ctypes.get_errno())}")
    return found
