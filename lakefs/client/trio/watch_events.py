"""`WatchEvents`: the events of one watch, as its client iterates over them.

Used on the loop.
"""

from __future__ import annotations

from collections import deque

import trio

from lakefs.errors import LakeError
from lakefs.limits import WATCH_QUEUE_MAX
from lakefs.wire.messages import WatchEvent


class WatchEvents:
    """Events of one watch, oldest first.  A reader that falls behind gets one `resync` for the dropped events."""

    def __init__(self) -> None:
        self._events: deque[WatchEvent] = deque()
        self._error: LakeError | None = None
        self._over = False
        self._changed = trio.Event()

    def __aiter__(self) -> WatchEvents:
        return self

    async def __anext__(self) -> WatchEvent:
        """Wait for the next event.  Raises the error that ended the watch, or StopAsyncIteration if none did."""
        while not self._events:
            if self._error is not None:
                raise again(self._error)
            if self._over:
                raise StopAsyncIteration
            self._changed = trio.Event()
            await self._changed.wait()
        return self._events.popleft()

    def add(self, event: WatchEvent) -> None:
        """Add an event; if too many wait, replace all by one `resync`."""
        if len(self._events) >= WATCH_QUEUE_MAX:
            self._events.clear()
            event = WatchEvent("resync", event.sequence, event.bucket)
        self._events.append(event)
        self._changed.set()

    def end(self, error: LakeError | None) -> None:
        """End the events; only the first call counts."""
        if not self._over:
            self._error = error
            self._over = True
            self._changed.set()


def again(error: LakeError) -> LakeError:
    """Return a copy of an error: each caller raises its own, with its own traceback."""
    copy = type(error)(error.message, subject=error.subject)
    copy.goes_on = error.goes_on
    return copy
