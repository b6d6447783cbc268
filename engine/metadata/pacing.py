"""Pacing: upkeep runs at full speed while no names change, and rests between its steps while they do.

Upkeep on the loop is cut into steps, of half a millisecond while names change.  A request crosses the loop several
times.  If upkeep never rests, the request meets a step at each crossing; if it rests three times as long as it worked,
it rarely does, and then waits for a short step.  Time that a step waited counts as work: its writes and syncs delay
those of requests, too.
"""

from __future__ import annotations

from typing import Final

import trio

from engine.metadata.metadata_store import Metadata
from lakefs.limits import GC_BATCH_BESIDE_WRITERS

REST_AFTER_LOOKING: Final = 3.0
"""Seconds of rest for each second of walking records."""
REST_AFTER_WRITING: Final = 2.0
"""Seconds of rest for each second of copying payload."""
REST_S_MAX: Final = 1.0
QUIET_S: Final = 0.25
"""Without a change of names for this long, no client is writing."""


class Pacing:
    """The pace of one piece of upkeep, from its beginning on."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._worked_since = trio.current_time()

    @property
    def somebody_writes(self) -> bool:
        """True if names were changed within the last `QUIET_S`."""
        return trio.current_time() - self._metadata.noted_at() < QUIET_S

    def step(self, most: int) -> int:
        """Return how many records to walk before the next rest: `most`, or fewer while names are being changed."""
        return min(most, GC_BATCH_BESIDE_WRITERS) if self.somebody_writes else most

    async def rest(self, times: float = REST_AFTER_LOOKING) -> None:
        """Sleep between two steps, if names are being changed; always a checkpoint."""
        worked_s = trio.current_time() - self._worked_since
        await trio.sleep(min(times * worked_s, REST_S_MAX) if self.somebody_writes else 0.0)
        self._worked_since = trio.current_time()
