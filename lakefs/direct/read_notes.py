"""Notes of chunks and keys that a client read directly, so that the engine learns which of them are read often.

The notes of chunks are a sample: about one read in `READ_NOTES_EVERY`, at random, so that no order of reading hides a
chunk, and fewer once `READ_NOTES_MAX` are noted.  They are sent in one request, at most ten times a second, and once a
second when there are fewer.  Notes of keys are all that fit, and are sent before each put as well: what a put evicts
depends on them.  (In a trace of conversations at 130 prompts a second, told once a second, a space had 1.4 to 3.8
points fewer hits than plain LRU; told before each put, 3 more.)

Rules kept here:
- A note costs a read less than a lookup in the shared index; noting never waits and sends nothing.
- At most `READ_NOTES_MAX` notes are kept: each further one replaces another at random.
- Notes that could not be sent are dropped: they are advice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from lakefs.limits import KEY_NOTES_MAX, READ_NOTES_EVERY, READ_NOTES_MAX

TELL_FULL_S: Final = 0.1
"""Least seconds between two requests with `READ_NOTES_MAX` chunks: each takes about 0.3 ms of the engine's time."""
_SELDOM: Final = 8
"""Factor by which fewer reads are noted once `READ_NOTES_MAX` are."""
TELL_S: Final = 1.0
"""Least seconds between two requests with fewer chunks."""


class ReadNotes:
    """Notes of one client's recent reads.  Used from any of its threads: a race may lose a note."""

    def __init__(self, now: Callable[[], float] = time.monotonic, rng: random.Random | None = None) -> None:
        self._now = now
        self._rng = rng or random.Random()
        self._noted: list[bytes] = []
        self._taken_at = now()
        self._skip = 0
        """Count of reads to skip before the next note."""

    def note(self, chunk: bytes) -> bool:
        """Note a read chunk, or skip it; return True if it is time to send the notes."""
        self._skip -= 1
        if self._skip >= 0:
            return False
        self._add(chunk)
        return self._is_due()

    def note_many(self, chunks: Sequence[bytes]) -> bool:
        """Do `note` for each chunk; return True if it is time to send the notes."""
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
        """Remove and return the notes, to be sent now."""
        noted, self._noted = self._noted, []
        self._taken_at = self._now()
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
        waited = self._now() - self._taken_at
        return waited >= TELL_S or (waited >= TELL_FULL_S and len(self._noted) >= READ_NOTES_MAX)


class KeyNotes:
    """Notes of the keys of one space that a client used: all, up to `KEY_NOTES_MAX` between two requests.

    If there are more, those behind a random place are noted: so no order of use hides a key.  Used from any thread of
    the client: a race may lose a note.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, rng: random.Random | None = None) -> None:
        self._now = now
        self._rng = rng or random.Random()
        self._noted: list[bytes] = []
        self._taken_at = now()
        self._seen = 0
        """Count of keys since the last request."""
        self._skip = 0
        """Count of keys to skip before the next note."""

    def note(self, keys: Sequence[bytes]) -> bool:
        """Note used keys; return True if it is time to send the notes."""
        self._seen += len(keys)
        room = KEY_NOTES_MAX - len(self._noted)
        if self._skip > 0:
            self._skip -= len(keys)
        elif room > 0:
            self._noted += keys[:room]
        waited = self._now() - self._taken_at
        return waited >= TELL_S or (waited >= TELL_FULL_S and len(self._noted) >= KEY_NOTES_MAX)

    def take(self) -> list[bytes]:
        """Remove and return the notes, to be sent now."""
        noted, self._noted = self._noted, []
        self._skip = int(self._rng.random() * max(0, self._seen - KEY_NOTES_MAX))
        self._seen = 0
        self._taken_at = self._now()
        return noted
