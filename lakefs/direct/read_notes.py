"""Notes of chunks that a client read by itself, for the engine to learn which ones are read often.

A sample: about one read in `READ_NOTES_EVERY`, at random, so that no order of reading hides a chunk, and fewer once
there are many.  What is noted is told in one request, at most ten times a second, and once a second when it is little.

Rules kept here:
- A note costs a read less than a look in the shared index; nothing is waited for, nothing sent.
- At most `READ_NOTES_MAX` are kept: each further one takes the place of another at random.
- What could not be told is dropped: it is advice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from lakefs.limits import READ_NOTES_EVERY, READ_NOTES_MAX

TELL_FULL_S: Final = 0.1
"""Between two requests with `READ_NOTES_MAX` chunks: each takes about 0.3 ms of the engine's time."""
_SELDOM: Final = 8
"""So many times fewer reads are noted when `READ_NOTES_MAX` are."""
TELL_S: Final = 1.0
"""Between two requests with fewer."""


class ReadNotes:
    """What one client has read lately.  Used from any of its threads: a note may get lost between two."""

    def __init__(self, now: Callable[[], float] = time.monotonic, rng: random.Random | None = None) -> None:
        self._now = now
        self._rng = rng or random.Random()
        self._noted: list[bytes] = []
        self._told_at = now()
        self._skip = 0
        """Reads that are not noted before the next one is."""

    def note(self, chunk: bytes) -> bool:
        """A chunk was read; whether it is time to tell."""
        self._skip -= 1
        if self._skip >= 0:
            return False
        self._add(chunk)
        return self._is_due()

    def note_many(self, chunks: Sequence[bytes]) -> bool:
        """As `note` for each."""
        if self._skip >= len(chunks):
            self._skip -= len(chunks)
            return False
        at = max(self._skip, 0)
        while at < len(chunks):
            self._add(chunks[at])
            at += self._skip + 1
        self._skip = at - len(chunks)
        return self._is_due()

    def take(self) -> list[bytes]:
        """What is to be told now; forgotten here."""
        noted, self._noted = self._noted, []
        self._told_at = self._now()
        return noted

    def _add(self, chunk: bytes) -> None:
        noted, every = self._noted, READ_NOTES_EVERY
        if len(noted) < READ_NOTES_MAX:
            noted.append(chunk)
        else:
            every *= _SELDOM
            noted[int(self._rng.random() * READ_NOTES_MAX)] = chunk
        self._skip = int(self._rng.random() * (2 * every - 1))

    def _is_due(self) -> bool:
        waited = self._now() - self._told_at
        return waited >= TELL_S or (waited >= TELL_FULL_S and len(self._noted) >= READ_NOTES_MAX)
