"""Targets of `lake get` that no file can take the place of: pipes, devices, and descriptors of this process.

`/dev/stdout`, `/dev/fd/N` and `/proc/PID/fd/N` name an open descriptor, whatever it is open on: a pipe, a deleted file,
a file that a shell appends to.  The content is written to it; nothing is replaced or renamed.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import Final

from cli.terminal.streams import stdout_descriptor
from lakefs.errors import LocalFileError

_DESCRIPTORS: Final = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd")
_LINKS_MAX: Final = 40  # as the kernel's


def is_stream(target: str) -> bool:
    """Return True if the content of an object is written to a target as to a stream."""
    if _descriptor(target) is not None:
        return True
    with suppress(OSError):
        mode = os.stat(target).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def is_stdout(target: str) -> bool:
    """Return True if a target is what stdout is open on, so that nothing but content may be written there."""
    with suppress(OSError):
        return is_stream(target) and os.path.samestat(os.stat(target), os.fstat(1))
    return False


def open_stream(target: str) -> int:
    """Return a new descriptor of a target that is a stream.  LocalFileError.

    It waits until a named pipe has a reader.
    """
    found = _descriptor(target)
    try:
        if found is not None and found[0] == os.getpid():
            if found[1] == 1:
                stdout_descriptor()
            return os.dup(found[1])  # which keeps its position; a socket cannot be opened anew
        return os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LocalFileError(f"{target}: {error.strerror}", subject=target) from error


def _descriptor(target: str) -> tuple[int, int] | None:
    """Return process and number of the descriptor that a path names by links of /proc; None if it names none."""
    for _ in range(_LINKS_MAX):
        folder = os.path.realpath(os.path.dirname(target) or ".")
        name = os.path.basename(target)
        process = _DESCRIPTORS.fullmatch(folder)
        if process is not None and name.isdecimal():
            return int(process.group(1)), int(name)
        try:
            target = os.path.join(folder, os.readlink(os.path.join(folder, name)))
        except OSError:
            return None
    return None
