"""Read-ahead: places of segments are brought into the page cache before their reader needs them.

`ReadAhead` brings in the wanted places in order, in a thread of its own that lives as long as places are waiting; the
reader copies and checks at the same time.  `ReadAheadWindow` predicts the places for one reader: none while it reads
at random, and a window that doubles while it reads sequentially.

Rules kept here:
- Read-ahead is a hint: nothing fails because of it, and a place whose descriptor is no longer held is left out.
- At most `READ_AHEAD_BYTES_MAX` wait to be brought in; the rest is left to the reader.
- A place that the page cache has already starts no thread.
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
from lakefs.limits import GRANULE_BYTES, READ_AHEAD_BYTES_MAX, READ_AHEAD_WINDOW_BYTES_MAX, READ_AHEAD_WINDOW_BYTES_MIN

_Place = tuple[SegmentId, int, int]
SKIPPED_BYTES_MAX: Final = GRANULE_BYTES
"""Most bytes that a sequential reader may skip, such as padding between tensors."""


class ReadAhead:
    """Brings places of segments into the page cache.  Safe in any thread.

    `use` is a context manager that yields a segment's descriptor, or raises StaleGrant.
    """

    def __init__(self, use: Callable[[SegmentId], AbstractContextManager[int]]) -> None:
        self._use = use
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None

    def want(self, segment: SegmentId, offset: int, length: int) -> bool:
        """Queue a place to be brought in; False if it is cached, has no descriptor, or too much is queued already."""
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
        """Drop the places that are still queued."""
        with self._lock:
            self._places.clear()
            self._waiting_bytes = 0

    def wait_done(self) -> None:
        """Wait until no place is left to bring in."""
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
    """Prediction of the next bytes of one reader of one file.  Not for use by two threads at once."""

    def __init__(self) -> None:
        self._end = -1
        """Offset after the last byte that was read."""
        self._predicted_to = 0
        """Offset after the last byte that was predicted."""
        self._window_bytes = 0

    def after(self, offset: int, length: int, size_bytes: int) -> tuple[int, int]:
        """Note that this range is read; return begin and length of the bytes to bring in, length 0 for none.

        Each step is at least half a window, so that small pieces are not requested often.
        """
        end = min(offset + length, size_bytes)
        reads_on = self._end >= 0 and 0 <= offset - self._end <= SKIPPED_BYTES_MAX
        self._end = end
        if not reads_on:
            self._predicted_to = end
            self._window_bytes = 0
            return end, 0
        begin = max(end, self._predicted_to)
        target = min(end + max(self._window_bytes, READ_AHEAD_WINDOW_BYTES_MIN), size_bytes)
        wanted = target - begin
        if wanted <= 0 or (wanted < self._window_bytes // 2 and target < size_bytes):
            return end, 0
        self._predicted_to = target
        self._window_bytes = min(max(2 * self._window_bytes, READ_AHEAD_WINDOW_BYTES_MIN), READ_AHEAD_WINDOW_BYTES_MAX)
        return begin, wanted
