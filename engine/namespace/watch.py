"""Watches of buckets: the changes of a bucket's names, in order, after they are durable.

Each watcher has a bounded queue.  When it is full, everything in it is replaced by one `resync`, which asks the
watcher to look at everything again; later events are queued again.  No history is promised: a watch gets the changes
that become durable after `subscribe` returned.

Only a watcher waits here, for its next event; `publish` never blocks the committer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import trio

from engine.host.user_shares import OWN, Shares
from engine.namespace.tree import ChangedBy, NameEvent
from lakefs.ids import Sequence
from lakefs.limits import WATCH_QUEUE_MAX, WATCHERS_MAX
from lakefs.wire.messages import WatchEvent

ALL: Final = ""
"""In place of a bucket: all buckets, those made later too."""


Publish = Callable[[Sequence, list[object]], None]


class Watch:
    """The events of one bucket, or of all, for one task.  Iterate it; close it, or leave its `with`, when done."""

    def __init__(self, watchers: Watchers, bucket: str, queue_max: int, left_out: object | None, user: str) -> None:
        self.bucket = bucket
        self.user = user
        self.left_out = left_out
        """The client whose own changes are left out."""
        self._watchers = watchers
        self._queue: deque[WatchEvent] = deque()
        self._queue_max = queue_max
        self._changed = trio.Event()
        self._closed = False

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WatchEvent:
        """Return the next event; always a checkpoint.  A cancelled call takes none."""
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._changed = trio.Event()
            await self._changed.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """Stop: drops events not taken yet, and ends a waiting iteration.  May be called again."""
        self._closed = True
        self._queue.clear()
        self._changed.set()
        self._watchers.forget(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, event: WatchEvent) -> None:
        """Queue an event, or replace all with one `resync` if the queue is full."""
        if len(self._queue) >= self._queue_max:
            self._queue.clear()
            event = WatchEvent(kind="resync", sequence=event.sequence, bucket=self.bucket)
        assert not self._closed, "a closed watch gets no events"
        self._queue.append(event)
        assert len(self._queue) <= self._queue_max, "the queue is bounded"
        self._changed.set()


class Watchers:
    """All open watches of an engine."""

    def __init__(
        self,
        begin: Callable[[Publish], Callable[[], None]] = lambda publish: lambda: None,
        queue_max: int = WATCH_QUEUE_MAX,
        watchers_max: int = WATCHERS_MAX,
    ) -> None:
        """`begin` is called with `publish` when the first watch begins, and what it returns when the last has ended."""
        self._begin = begin
        self._end: Callable[[], None] = lambda: None
        self._by_bucket: dict[str, dict[Watch, None]] = {}
        self._shares = Shares(watchers_max, "watches", own_quarters=3)
        self._queue_max = queue_max

    def __len__(self) -> int:
        return len(self._shares)

    def subscribe(self, bucket: str, left_out: object | None = None, user: str = OWN) -> Watch:
        """Watch a bucket, or all ("") from now on, except for changes made by the client `left_out`.

        Raises EngineBusy if the user, or all users together, have too many watches.  The caller checks that the bucket
        exists; its removal is reported as `delete` of the empty key.
        """
        self._shares.take(user)
        watch = Watch(self, bucket, self._queue_max, left_out, user)
        if not self._by_bucket:
            self._end = self._begin(self.publish)
        self._by_bucket.setdefault(bucket, {})[watch] = None
        return watch

    def forget(self, watch: Watch) -> None:
        """Drop a closed watch; does nothing if it was dropped before."""
        watches = self._by_bucket.get(watch.bucket, {})
        if watch not in watches:
            return
        assert watch._closed, "only a closed watch is dropped"
        del watches[watch]
        self._shares.give_back(watch.user)
        if not watches:
            del self._by_bucket[watch.bucket]
        if not self._by_bucket:
            self._end()

    def publish(self, sequence: Sequence, notes: Iterable[object]) -> None:
        """Queue the names' notes of a group that is durable now, in order, to their watchers; skips other notes.

        Called once for each group, in the order of sequences.  A move between buckets is sent to the watchers of both.
        """
        client: object | None = None
        for note in notes:
            if isinstance(note, NameEvent):
                self._tell(sequence, note, client)
            elif isinstance(note, ChangedBy):
                client = note.client

    def _tell(self, sequence: Sequence, note: NameEvent, client: object | None) -> None:
        buckets = {ALL, note.bucket, note.to_bucket} if note.to_bucket else {ALL, note.bucket}
        event: WatchEvent | None = None
        for bucket in buckets & self._by_bucket.keys():
            for watch in self._by_bucket[bucket]:
                if client is None or watch.left_out is not client:
                    event = event or WatchEvent(
                        note.kind, sequence, note.bucket, note.key, note.to_bucket, note.to_key, note.node
                    )
                    watch.offer(event)
