"""The log of a mount in the background: a file of bounded size.

The file is descriptors 1 and 2 of the process, so output of libraries and the interpreter is in it, too.  A full file
is renamed to `log.1`, replacing the older `log.1`.  Sizes are checked when our own lines are written.

A mount keeps serving if its log cannot be written: the line is lost.  In the foreground logs go to stderr unbounded: to
a terminal, or to the journal, which bounds itself.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from lakefs.errors import LocalFileError

LOG_BYTES_MAX: Final = 8 << 20
"""Size of a full log.  With as much in `log.1` 16 MiB in all, some 100,000 lines."""


def open_log(log: Path) -> int:
    """Open the log to append; returns the descriptor.  A full one is renamed first.  Raises LocalFileError."""
    try:
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_name(f"{log.name}.1"))
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalFileError(f"{log}: {error.strerror}", subject=str(log)) from error


class BoundedLog:
    """File object for a logger.  `path` is open as descriptors 1 and 2."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        """Append; does nothing if that fails."""
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Begin a new file, between two lines, if this one is full."""
        with suppress(OSError, LocalFileError):
            if os.fstat(2).st_size > LOG_BYTES_MAX:
                self._begin_anew()

    def _begin_anew(self) -> None:
        descriptor = open_log(self._path)
        try:
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        finally:
            os.close(descriptor)
