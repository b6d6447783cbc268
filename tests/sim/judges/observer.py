"""A watcher of a bucket: it must get an event for each change there, in order, and not before the change is durable."""

from __future__ import annotations

from engine.store.store import Store
from lakefs.wire.messages import WatchEvent
from tests.sim.judges.history import History, SimFailure
from tests.sim.judges.model import Keys


class Observer:
    """Watches one bucket for one life."""

    def __init__(self, store: Store, history: History, bucket: str) -> None:
        self._store = store
        self._history = history
        self._bucket = bucket
        self._before = self._keys()
        self._watch = store.watchers.subscribe(bucket)
        self._events: list[WatchEvent] = []

    async def run(self) -> None:
        """Collect events until cancelled."""
        with self._watch as events:
            async for event in events:
                if self._events and event.sequence < self._events[-1].sequence:
                    raise SimFailure(f"events out of order: {event} after {self._events[-1]}")
                if event.sequence > self._store.metadata.durable_sequence:
                    raise SimFailure(f"an event came before it was durable: {event}")
                self._events.append(event)

    def compare(self) -> None:
        """Check, while no request is under way, that each name that has changed has had an event."""
        after = self._keys()
        changed = [key for key in {*self._before, *after} if self._before.get(key) != after.get(key)]
        for key in sorted(changed):
            if not any(self._tells(event, key) for event in self._events):
                raise SimFailure(f"{self._bucket}/{key} changed, and no event told so: {self._events}")

    def _keys(self) -> Keys:
        return self._history.state.get(self._bucket, {})

    def _tells(self, event: WatchEvent, key: str) -> bool:
        """Return whether an event is about the key, or about a folder above it that was moved."""
        if event.kind == "resync":
            return True
        named = [event.key] if event.bucket == self._bucket else []
        named += [event.to_key] if event.to_bucket == self._bucket else []
        below = event.kind == "rename"  # a folder that is made or removed with its names: each name has an event, too
        return any(key == name or (below and name.endswith("/") and key.startswith(name)) for name in named)
