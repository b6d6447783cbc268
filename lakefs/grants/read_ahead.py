"""Reading ahead: places of segments are brought into the page cache before their reader comes to them.

`ReadAhead` brings in what it is told, in the order told, in a thread of its own that lives for as long as there is
something to do; the reader copies and checks meanwhile.  `ReadAheadWindow` tells what that is for one reader: nothing
while it reads here and there, and a window that doubles while it reads on from where it was.

Rules kept here:
- What is brought in is a hint: nothing fails because of it, and a place that is gone is left out.
- At most `READ_AHEAD_BYTES_MAX` wait to be brought in; what is more is left to the reader.
- What the page cache has already starts no thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from lakefs.errors import StaleGrant
from lakefs.host.memory_advice import populate
from lakefs.host.page_cache import is_cached
from lakefs.ids import SegmentId
from lakefs.limits import (
    GRANULE_BYTES,
    READ_AHEAD_BYTES_MAX,
    READ_AHEAD_WINDOW_BYTES_MAX,
    READ_AHEAD_WINDOW_BYTES_MIN,
)

_Place = tuple[SegmentId, int, int]
SKIPPED_BYTES_MAX: Final = GRANULE_BYTES
"""A reader that leaves out so much, as padding between tensors is, still reads on."""


class ReadAhead:
    """Brings places of segments into the page cache.  Safe in any thread.

    `use` gives the descriptor of a segment for the block, or raises StaleGrant.
    """

    def __init__(self, use: Callable[[SegmentId], AbstractContextManager[int]]) -> None:
        self._use = use
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None

    def want(self, segment: SegmentId, offset: int, length: int) -> bool:
        """Have a place brought in soon; False when nothing is to be done, or there is too much to do already."""
        try:
            with self._use(segment) as descriptor:
                if is_cached(descriptor, offset, length) is not False:
                    return False
        except StaleGrant:
            return False
        with self._lock:
            if self._waiting_bytes + length > READ_AHEAD_BYTES_MAX:
                return False
            self._places.append((segment, offset, length))
            self._waiting_bytes += length
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="lake-read-ahead", daemon=True)
                self._thread.start()
        return True

    def forget(self) -> None:
        """Leave what was not begun."""
        with self._lock:
            self._places.clear()
            self._waiting_bytes = 0

    def wait_done(self) -> None:
        """Wait until nothing is left to do."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._places:
                    self._thread = None
                    return
                segment, offset, length = self._places.popleft()
                self._waiting_bytes -= length
            try:
                with self._use(segment) as descriptor:
                    populate(descriptor, offset, length)
            except StaleGrant:
                continue


class ReadAheadWindow:
    """What one reader of one file is going to read, by what it read.  Not for two threads at once."""

    def __init__(self) -> None:
        self._end = -1
        """Behind the last byte that was read."""
        self._told = 0
        """Behind the last byte that was said to come."""
        self._window_bytes = 0

    def after(self, offset: int, length: int, size_bytes: int) -> tuple[int, int]:
        """Begin and length of what to bring in, now that this range is read; the length is 0 for nothing.

        Said in steps of half a window at least, so that little is asked for often.
        """
        end = min(offset + length, size_bytes)
        if self._end >= 0 and 0 <= offset - self._end <= SKIPPED_BYTES_MAX:
            return self.on_to(end, size_bytes)
        self._end = self._told = end
        self._window_bytes = 0
        return end, 0

    def on_to(self, end: int, size_bytes: int) -> tuple[int, int]:
        """As `after`, for a reader of which it is known that it reads on, and has come to `end`."""
        self._end = end
        begin = max(end, self._told)
        target = min(end + max(self._window_bytes, READ_AHEAD_WINDOW_BYTES_MIN), size_bytes)
        wanted = target - begin
        if wanted <= 0 or (wanted < self._window_bytes // 2 and target < size_bytes):
            return end, 0
        self._told = target
        self._window_bytes = min(
            max(2 * self._window_bytes, READ_AHEAD_WINDOW_BYTES_MIN), READ_AHEAD_WINDOW_BYTES_MAX
        )
        return begin, wanted
