"""Changes of the coordinator's keys that are held for watches, and the watches themselves.

    add              a revision became durable: hold its changes, forget the oldest ones, wake the watches of their keys
    HistoryWatch     reads on from where it is; a watch that is behind what is held ends with `ReadAnew`

Rules kept here:
- Revisions are held without gaps: `forgotten` + 1 to `last`.
- Memory is bounded by the history alone: a watch has a position in it and no queue.
- A watch's position is that of the next change of its range, or it waits for one.  So it ends with `ReadAnew` only if
  that very change is forgotten, however many changes of other keys were.
- A change wakes no watch of another range.  Watches of the same range are kept together, because all members watch the
  same few keys.

Everything runs on the loop; only a watch waits.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

import trio

from engine.coordinator.coordinator import Changes, ReadAnew
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import Revision
from lakefs.limits import COORDINATOR_HISTORY_BYTES, COORDINATOR_HISTORY_COUNT, COORDINATOR_WATCHES_MAX

_CHANGE_BYTES: Final = 300
"""Memory of a change beside the bytes of key and value: four objects."""
_Range = tuple[bytes, bytes]


class History:
    """The changes that are held, and the watches of one coordinator."""

    def __init__(
        self,
        last: Revision,
        count_max: int = COORDINATOR_HISTORY_COUNT,
        bytes_max: int = COORDINATOR_HISTORY_BYTES,
        watches_max: int = COORDINATOR_WATCHES_MAX,
    ) -> None:
        """Begin behind the revision `last`."""
        self.last = last
        self.forgotten = last
        """The newest revision that is not held any more."""
        self.failed: LakeError | None = None
        """The error with which watches end; None while they go on."""
        self.watches: dict[HistoryWatch, None] = {}
        """The watches that are open."""
        self.waiting: dict[_Range, dict[HistoryWatch, None]] = {}
        """Watches without a position."""
        self._held: dict[Revision, tuple[Changes, int]] = {}
        self._count = 0
        self._bytes = 0
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._watches_max = watches_max

    def add(self, changes: Changes) -> None:
        """Hold the changes of the next revision, which is durable, and wake the watches that wait for one of them."""
        revision = changes.revision
        assert revision == self.last + 1, "revisions become durable in order"
        assert changes.changes, "a revision changes a key"
        self.last = revision
        size = sum(
            _CHANGE_BYTES + len(change.key) + (0 if change.entry is None else len(change.entry.value))
            for change in changes.changes
        )
        self._held[revision] = changes, size
        self._count += len(changes.changes)
        self._bytes += size
        while (self._count > self._count_max or self._bytes > self._bytes_max) and self.forgotten < revision - 1:
            self._forget_oldest()
        self._wake(changes)

    def changes_between(self, begin: bytes, end: bytes, first: Revision) -> Changes | None:
        """Return the first revision from `first` on that changed the range; None if none of those added did."""
        assert first > self.forgotten, "what is asked for is held"
        for number in range(first, self.last + 1):
            changes = self._held[Revision(number)][0].changes
            inside = tuple(change for change in changes if begin <= change.key < end)
            if inside:
                return Changes(Revision(number), inside)
        return None

    def end(self, error: LakeError) -> None:
        """End all watches, and those to come, with this error; a later call does nothing."""
        if self.failed is None:
            self.failed = error
            for watch in self.watches:
                watch.wake()

    def register(self, watch: HistoryWatch) -> None:
        """Count a watch that begins.  EngineBusy if there are too many."""
        if len(self.watches) >= self._watches_max:
            raise EngineBusy(f"the coordinator has {self._watches_max} watches, the most that it may have")
        self.watches[watch] = None

    def forget(self, watch: HistoryWatch, key_range: _Range) -> None:
        """Drop a watch that has ended."""
        del self.watches[watch]
        self.leave(watch, key_range)

    def wait(self, watch: HistoryWatch, key_range: _Range) -> None:
        """Give the watch a position at the next change of its range."""
        self.waiting.setdefault(key_range, {})[watch] = None

    def leave(self, watch: HistoryWatch, key_range: _Range) -> None:
        """Note that a watch does not wait any more; does nothing if it did not."""
        together = self.waiting.get(key_range)
        if together is not None:
            together.pop(watch, None)
            if not together:
                del self.waiting[key_range]

    def _forget_oldest(self) -> None:
        self.forgotten = Revision(self.forgotten + 1)
        changes, size = self._held.pop(self.forgotten)
        self._count -= len(changes.changes)
        self._bytes -= size

    def _wake(self, changes: Changes) -> None:
        keys = [change.key for change in changes.changes]
        for begin, end in list(self.waiting):
            if any(begin <= key < end for key in keys):
                for watch in self.waiting.pop((begin, end)):
                    watch.continue_at(changes.revision)


class HistoryWatch:
    """A watch of one range (`engine.coordinator.coordinator.Watch`); an asynchronous context manager."""

    def __init__(self, history: History, begin: bytes, end: bytes, from_revision: Revision) -> None:
        self._history = history
        self._range: _Range = begin, end
        self._first = from_revision
        """Changes before it are not wanted; it may be yet to come."""
        self._position: Revision | None = None
        """The first revision that is to be returned and was added; None while it waits for one."""
        self._ended = False
        self._woken = trio.Event()

    async def __aenter__(self) -> HistoryWatch:
        await trio.lowlevel.checkpoint()
        self._history.register(self)
        if self._first <= self._history.forgotten:
            self._position = self._first
        else:
            self._find_from(self._first)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._history.forget(self, self._range)

    @property
    def resumes_at(self) -> Revision:
        """See `Watch`: the next change's revision, or one that is yet to come."""
        return max(self._first, Revision(self._history.last + 1)) if self._position is None else self._position

    def __aiter__(self) -> HistoryWatch:
        return self

    async def __anext__(self) -> Changes | ReadAnew:
        """Return the next event; always a checkpoint.  A cancelled call takes none.  EngineUnreachable."""
        await trio.lowlevel.checkpoint()
        while self._position is None and not self._ended:
            if self._history.failed is not None:
                raise EngineUnreachable(f"the coordinator has ended: {self._history.failed}") from self._history.failed
            self._woken = trio.Event()
            await self._woken.wait()
        if self._ended:
            raise StopAsyncIteration
        assert self._position is not None, "it has not waited in vain"
        if self._position <= self._history.forgotten:
            self._ended = True
            return ReadAnew()
        found = self._history.changes_between(*self._range, self._position)
        assert found is not None, "the position is that of a change of the range"
        self._find_from(Revision(found.revision + 1))
        return found

    def continue_at(self, revision: Revision) -> None:
        """Continue at this revision, which changed the range, unless it is one that is not wanted."""
        if revision < self._first:
            self._history.wait(self, self._range)
            return
        self._position = revision
        self.wake()

    def wake(self) -> None:
        """Let the task look again."""
        self._woken.set()

    def _find_from(self, revision: Revision) -> None:
        """Set the position to the first change of the range from this revision on, or wait for one."""
        found = self._history.changes_between(*self._range, revision)
        self._position = None if found is None else found.revision
        if found is None:
            self._history.wait(self, self._range)
