"""The standard streams of every command: descriptors 0, 1 and 2 are open, and text is UTF-8 whatever the locale.

Rules kept here:
- `prepare` is the first thing that an entry point calls, before anything is opened.
- A descriptor that was closed when the process began is /dev/null from then on.  Otherwise the next file or socket
  would take its number, and output would be written into it.
- File names are bytes, and names in the lake are UTF-8.  A process whose locale has another encoding would read the
  same argument as another name, so it replaces itself by itself in Python's UTF-8 mode.
- Content is read from or written to a standard stream only if the process was given one.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import BinaryIO, Final

from lakefs.errors import LocalFileError

_NAMES: Final = ("stdin", "stdout", "stderr")
_closed: Final[set[int]] = set()
"""Standard descriptors that were closed when this process began."""


def prepare() -> None:
    """Make the standard streams usable.  Does not return in a locale that is not UTF-8: the process begins anew."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        with suppress(OSError):  # then names of ASCII characters are still right
            os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for descriptor, name in enumerate(_NAMES):
        if _is_closed(descriptor):
            _open_null(descriptor, name)
    encode_in_utf8()


def encode_in_utf8() -> None:
    """Write text in UTF-8, and a character that it lacks (a byte of a file's name) as an escape."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]


def stdin_content() -> BinaryIO:
    """Return stdin, to read content from.  LocalFileError if this process has none."""
    if 0 in _closed:
        raise LocalFileError("stdin is closed, so there is no content to put; give a file, or: lake put - < FILE")
    return sys.stdin.buffer


def stdout_descriptor() -> int:
    """Return the descriptor of stdout, to write content to, behind all text so far.  LocalFileError: there is none."""
    if 1 in _closed:
        raise LocalFileError("stdout is closed, so the content can be written nowhere; give a file, with: lake get")
    sys.stdout.flush()
    return sys.stdout.fileno()


def _is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def _open_null(descriptor: int, name: str) -> None:
    """Open /dev/null under the number of a closed descriptor; those below it are open, so it is the next one."""
    opened = os.open(os.devnull, os.O_RDWR)
    assert opened == descriptor, "descriptors are opened in order"
    os.set_inheritable(descriptor, True)
    _closed.add(descriptor)
    setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False))
