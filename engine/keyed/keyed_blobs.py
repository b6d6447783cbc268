"""Keyed blobs of one open store, as the engine keeps them in memory beside the table: counts, and room under quotas.

Rules kept here:
- The bytes of a space's values, and of puts that were admitted and are under way, are together at most its quota.  A
  put that finds no room waits a moment for eviction, and is refused then.
- Counts are of this process, and for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from engine.chunks.quarantine import Quarantine
from engine.format.keyed import SpaceRecord
from engine.keyed.spaces import list_spaces
from engine.keyed.values import Values
from engine.metadata.metadata_store import Metadata
from lakefs.ports import Clock


@dataclass
class KeyedCounts:
    """Counts of keys, by outcome, since the start."""

    matched: int = 0
    missed: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    present: int = 0
    differed: int = 0
    """Puts to present keys that were seen to bring other bytes."""
    removed: int = 0
    failed: int = 0


class KeyedBlobs:
    """State of the keyed blobs of one store.  Used on the loop."""

    def __init__(self, metadata: Metadata, quarantine: Quarantine, clock: Clock) -> None:
        self._metadata = metadata
        self._quarantine = quarantine
        self._clock = clock
        self.counts = KeyedCounts()
        self._under_way: dict[int, int] = {}
        """Bytes of admitted puts that are not decided yet, by number of their space."""

    def values(self) -> Values:
        """Return the rules by which values are found now."""
        return Values(self._quarantine.__contains__, self._clock.wall_ns())

    def room(self, number: int, space: SpaceRecord) -> int | None:
        """Return the bytes that may be put into a space now; None if it has no quota."""
        if not space.quota_bytes:
            return None
        return space.quota_bytes - space.value_bytes - self._under_way.get(number, 0)

    @contextmanager
    def admitted(self, number: int, size_bytes: int) -> Iterator[None]:
        """Count bytes as under way until the block ends: their put is then in the space's usage, or has failed."""
        self._under_way[number] = self._under_way.get(number, 0) + size_bytes
        try:
            yield
        finally:
            self._under_way[number] -= size_bytes
            if not self._under_way[number]:
                del self._under_way[number]

    def statistics(self) -> dict[str, Any]:
        """Counts for `lake status`."""
        with self._metadata.view() as view:
            spaces = list_spaces(view)
        return {
            "spaces": len(spaces),
            "entries": sum(space.entries for space in spaces),
            "value_bytes": sum(space.value_bytes for space in spaces),
            **asdict(self.counts),
        }
