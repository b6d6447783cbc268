"""Spare descriptors, for the moment at which clients have taken all others.

Writing a journal, a segment or a checkpoint must not fail half-way because a client opened a connection.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
SPARE_DESCRIPTORS: Final = 16
"""A checkpoint, a journal file and a segment of either kind may be begun at once, each with its folder's sync."""


class SpareDescriptors:
    """The spares of one store.  Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._is_closed = True

    def fill(self) -> None:
        """Hold SPARE_DESCRIPTORS of them, or as many as can be opened."""
        with self._lock:
            self._is_closed = False
            self._refill()

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """Call os.open, with a spare when there is no other descriptor."""
        return self._with_one(lambda: os.open(path, flags, mode))

    def list_folder(self, path: str) -> list[str]:
        """Call os.listdir, with a spare when there is no other descriptor."""
        return self._with_one(lambda: os.listdir(path))

    def close(self) -> None:
        """Close all spares."""
        with self._lock:
            self._is_closed = True
            while self._held:
                os.close(self._held.pop())

    def _with_one(self, call: Callable[[], T]) -> T:
        while True:
            try:
                outcome = call()
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR or not self._give_one():
                    raise
            else:
                break
        with self._lock:
            if not self._is_closed and len(self._held) < SPARE_DESCRIPTORS:
                self._refill()
        return outcome

    def _give_one(self) -> bool:
        with self._lock:
            if not self._held:
                return False
            os.close(self._held.pop())
            return True

    def _refill(self) -> None:
        with suppress(OSError):
            while len(self._held) < SPARE_DESCRIPTORS:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
