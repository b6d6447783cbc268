"""Asks before each write to lent memory if its client is still connected.

A client that has waited too long leaves, and uses its memory for something else.  The engine may have been stopped
meanwhile, at any point of a load: so it asks again before each system call that writes, in whatever thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lakefs.ports import Clock, FileToRead

ASK_EVERY_S: Final = 0.001
"""An answer holds this long: a system call, and far less time than any client waits."""


def always() -> None:
    """Do nothing: memory of the engine's own may always be written."""


class WhileLent:
    """The question for one load.  Calling it raises SessionLost once the client has left; from any thread."""

    def __init__(self, ask: Callable[[], None], clock: Clock) -> None:
        """`ask` raises SessionLost."""
        self._ask = ask
        self._clock = clock
        self._asked_at: float | None = None

    def __call__(self) -> None:
        """Ask, unless that was done just now."""
        now = self._clock.monotonic()
        if self._asked_at is None or now - self._asked_at > ASK_EVERY_S:
            self._ask()
            self._asked_at = now


class AskingFile:
    """A file whose bytes are read into lent memory: each read asks first."""

    def __init__(self, file: FileToRead, ask: Callable[[], None]) -> None:
        self._file = file
        self._ask = ask
        self.direct = file.direct

    def fileno(self) -> int:
        """Ask, and return the descriptor, for a ring."""
        self._ask()
        return self._file.fileno()

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Ask, and read; see `DiskFile.pread_into`."""
        self._ask()
        return self._file.pread_into(buffer, offset)
