"""Read-only descriptors of segments that the engine sent, and reads of cached bytes by them, which never wait.

Rules kept here:
- A descriptor is never closed while a fetch uses it.
- A new descriptor beyond `DESCRIPTORS_MAX` closes the one that was unused for longest.
- At most `HELD_MAX` are held for as long as a file is open (`hold`): those that fetches need still come and go.
- Descriptors that were not closed are closed when the `SegmentDescriptors` is freed.  In a forked child they are closed
  without waiting for a lock (`leave_all`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from lakefs.errors import StaleGrant
from lakefs.grants.dram_slabs import Slabs
from lakefs.grants.read_ahead import ReadAhead
from lakefs.host.page_cache import is_cached, is_in_memory
from lakefs.ids import Buffer, SegmentId

DESCRIPTORS_MAX: Final = 512
HELD_MAX: Final = DESCRIPTORS_MAX // 2


@dataclass(slots=True)
class Held:
    """A descriptor, the flags to read it without a wait, and the count of fetches that use it."""

    descriptor: int
    nowait: int
    users: int = 0
    holders: int = 0
    """Users that stay long."""
    dropped: bool = False


class SegmentDescriptors:
    """Read-only descriptors of segments by id, at most 512; the least recently used idle one is closed first.

    Used from the client's threads; a descriptor is never closed while a fetch uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[SegmentId, Held] = OrderedDict()
        self._held_count = 0
        self.ahead = ReadAhead(self.use)
        """Brings places of these segments into the page cache before they are read."""
        self.slabs = Slabs()
        """Slabs of the same engine's DRAM tier: grants of `MEDIUM_DRAM` point into them."""
        weakref.finalize(self, _close_all, self._open).atexit = False

    def missing(self, segments: set[SegmentId]) -> list[SegmentId]:
        """Return those of `segments` for which no descriptor is held, sorted."""
        with self._lock:
            return sorted(segment for segment in segments if segment not in self._open)

    def add(self, segment: SegmentId, descriptor: int) -> None:
        """Take over a descriptor; a second one for the same segment is closed at once."""
        with self._lock:
            if segment in self._open:
                os.close(descriptor)
                return
            self._open[segment] = Held(descriptor, 0 if is_in_memory(descriptor) else os.RWF_NOWAIT)
            self._evict()

    @contextmanager
    def use(self, segment: SegmentId) -> Iterator[int]:
        """Yield the segment's descriptor and keep it open for the block.  StaleGrant when it is not held."""
        held = self.enter(segment)
        if held is None:
            raise StaleGrant(f"no descriptor of segment {segment:x} is held", subject=f"{segment:x}")
        try:
            yield held.descriptor
        finally:
            self.leave(held)

    def enter(self, segment: SegmentId) -> Held | None:
        """Return the descriptor, which stays open until `leave`; None when it is not held."""
        with self._lock:
            held = self._open.get(segment)
            if held is not None:
                self._open.move_to_end(segment)
                held.users += 1
            return held

    def leave(self, held: Held) -> None:
        """End the use that `enter` began."""
        with self._lock:
            held.users -= 1
            if held.dropped and not held.users:
                os.close(held.descriptor)

    def hold(self, segment: SegmentId) -> Held | None:
        """Like `enter`, for as long as a file is open; None too when `HELD_MAX` are held.  End it by `let_go`."""
        with self._lock:
            held = self._open.get(segment)
            if held is None or (not held.holders and self._held_count >= HELD_MAX):
                return None
            self._held_count += not held.holders
            held.holders += 1
            held.users += 1
            return held

    def let_go(self, held: Held) -> None:
        """End what `hold` began."""
        with self._lock:
            held.holders -= 1
            self._held_count -= not held.holders
        self.leave(held)

    def read_cached(self, segment: SegmentId, target: memoryview, offset: int) -> bool:
        """Fill `target` from the page cache; return False when it lacks some bytes, or no descriptor is held.

        Never waits for a disk.  The kernel begins to fetch the missing bytes of the range.
        """
        with self._lock:  # held during the copy: cheaper than noting that the descriptor is in use
            held = self._open.get(segment)
            if held is None:
                return False
            self._open.move_to_end(segment)
            return _pread_cached(held, [target], offset) == len(target)

    def read_pieces_cached(self, segment: SegmentId, targets: Sequence[memoryview], offset: int) -> bool:
        """Like `read_cached`, for pieces of memory one after the other; other threads may use the descriptors during
        the read."""
        held = self.enter(segment)
        if held is None:
            return False
        try:
            return _pread_cached(held, targets, offset) == sum(map(len, targets))
        finally:
            self.leave(held)

    def may_be_cached(self, segment: SegmentId, offset: int, length: int) -> bool:
        """Return True if the page cache has the place, or that cannot be known; False if no descriptor is held.

        Call it before `read_cached` of a long place: that would make the kernel fetch it page by page (see
        `lakefs.grants.grant_reads.bring_in`).
        """
        with self._lock:
            held = self._open.get(segment)
            return held is not None and is_cached(held.descriptor, offset, length) is not False

    def close(self) -> None:
        """Close all descriptors, and drop the slabs; a descriptor in use is closed when its last fetch is done."""
        self.slabs.drop()
        self.ahead.forget()
        with self._lock:
            while self._open:
                _, held = self._open.popitem()  # before it is closed: an interrupt must not close it twice
                held.dropped = True
                if not held.users:
                    os.close(held.descriptor)

    def leave_all(self) -> None:
        """Close all descriptors in a child process just forked, where no fetch runs; does not wait for any lock."""
        self._lock = threading.Lock()
        self.slabs = Slabs()
        _close_all(self._open)

    def _evict(self) -> None:
        for segment, held in list(self._open.items()):
            if len(self._open) <= DESCRIPTORS_MAX:
                return
            if not held.users:
                del self._open[segment]
                os.close(held.descriptor)


def _close_all(held: OrderedDict[SegmentId, Held]) -> None:
    while held:
        os.close(held.popitem()[1].descriptor)


def _pread_cached(held: Held, targets: Sequence[Buffer], offset: int) -> int:
    """Fill memory from the page cache without waiting for a disk; return the count of leading bytes filled."""
    try:
        return os.preadv(held.descriptor, targets, offset, held.nowait)
    except OSError:
        return 0  # not cached, or an I/O error: a read that waits will show which
