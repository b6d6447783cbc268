"""The pace of the walker: bytes a second, and a share of the time.

After each piece of work it pauses until neither is exceeded.  So clients meet a walker that is at work for at most the
given share of the time, and a piece is at most a batch (`engine.walker.walker.BATCH_BYTES`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from lakefs.ports import Clock


class Pace:
    """At most `rate_bytes_per_s` (0: no limit), during at most `share` of the time (1: all of it)."""

    def __init__(self, clock: Clock, *, rate_bytes_per_s: int = 0, share: float = 1.0) -> None:
        assert 0 < share <= 1, "a share of the time"
        assert rate_bytes_per_s >= 0, "a rate"
        self.rate_bytes_per_s = rate_bytes_per_s
        self.share = share
        self._clock = clock

    @asynccontextmanager
    async def paced(self) -> AsyncIterator[Callable[[int], None]]:
        """Run a piece of work, which says how many bytes it moved; then pause for as long as it has to be."""
        moved = 0

        def spent(count: int) -> None:
            nonlocal moved
            moved += count

        began = self._clock.monotonic()
        yield spent
        took_s = self._clock.monotonic() - began
        pause_s = took_s * (1 / self.share - 1)
        if self.rate_bytes_per_s:
            pause_s = max(pause_s, moved / self.rate_bytes_per_s - took_s)
        if pause_s > 0:
            await trio.sleep(pause_s)
