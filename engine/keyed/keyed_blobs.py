"""Keyed blobs of one open store, as the engine keeps them in memory beside the table: counts, use, room under quotas.

Rules kept here:
- What a space's values, and puts that were admitted and are under way, count (`charge`: their bytes, and a fixed cost
  for each of their parts) is together at most its quota.  A put that finds no room waits for eviction,
  KEYED_ROOM_WAIT_S at most, and is refused then.
- One sketch counts how often the keys of all spaces were used lately.
- Counts are of this process, and for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import trio
from blake3 import blake3

from engine.chunks.quarantine import Quarantine
from engine.format.keyed import SpaceRecord, value_key
from engine.keyed.spaces import EVICT_ABOVE, charge_of_space, find_space, list_spaces
from engine.keyed.values import Values
from engine.metadata.metadata_store import Metadata
from engine.tables._frequency import Sketch
from lakefs.limits import KEYED_KEY_BYTES_MAX, KEYED_ROOM_WAIT_S, MIB
from lakefs.ports import Clock

SKETCH_WIDTH: Final = MIB
"""Counters of a row: 4 MiB in all, made with the first use of a key."""
SKETCH_STEP: Final = 2
"""Added to a count of 15 at most by one use; a value that is found and then read is used twice."""
USES_PER_ENTRY: Final = 10
"""Counts are halved when each value was used about so often: a value that is not used again is forgotten after three
halvings.  With 6, spaces of three traces had 0.1 to 0.9 points fewer hits; with 20, the same as with 10."""
USES_MIN: Final = 1024
EVICT_TO: Final = 0.98
GARBAGE_SHARE: Final = 8
"""A cycle of gc is due when a space has lost 1/8 of its quota to eviction since the last."""


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
    evicted: int = 0
    evicted_bytes: int = 0
    expired: int = 0
    purged: int = 0
    """Values of removed spaces that were removed with them."""


class KeyedBlobs:
    """State of the keyed blobs of one store.  Used on the loop."""

    def __init__(self, metadata: Metadata, quarantine: Quarantine, clock: Clock) -> None:
        self._metadata = metadata
        self._quarantine = quarantine
        self._clock = clock
        self.counts = KeyedCounts()
        self.used = trio.Event()
        """Set when the store has, or gets, a space."""
        self.lake_version = 0
        """Version of the lake's spaces that this member has; 0 before it is given them, and at other engines."""
        self.round_wanted = trio.Event()
        """Set when upkeep should begin its next round at once."""
        self._room_made = trio.Event()
        self._needs: dict[int, int] = {}
        """Charge of what waiting puts need, by number of their space."""
        self._under_way: dict[int, int] = {}
        """Charge of admitted puts that are not decided yet, by number of their space."""
        self._sketch: Sketch | None = None
        self._halve_after = USES_MIN
        self.garbage = trio.Event()
        """Set when a cycle of gc is due."""
        self._evicted: dict[int, int] = {}
        """Charge of what was evicted since the last cycle of gc, by number of their space."""

    def values(self) -> Values:
        """Return the rules by which values are found now."""
        return Values(self._quarantine.__contains__, self._clock.wall_ns())

    @property
    def has_damage(self) -> bool:
        """True if some chunk is known to be damaged, and with it the values that have it are absent."""
        return bool(self._quarantine)

    # --- use -----------------------------------------------------------------------------------------

    def note_used(self, number: int, keys: Iterable[bytes]) -> None:
        """Count a use of each key of a space that exists; keys that are none are left out."""
        names = [blake3(value_key(number, key)).digest() for key in keys if 0 < len(key) <= KEYED_KEY_BYTES_MAX]
        if names:
            if self._sketch is None:
                self._sketch = Sketch(SKETCH_WIDTH, self._halve_after, SKETCH_STEP)
            self._sketch.note_many(names)

    def note_entries(self, count: int) -> None:
        """Note how many values all spaces have: uses are forgotten the faster the fewer they are."""
        self._halve_after = max(USES_MIN, USES_PER_ENTRY * count)
        if self._sketch is not None:
            self._sketch.halve_after(self._halve_after)

    @property
    def halvings(self) -> int:
        """Number of times that all counts of uses were halved."""
        return 0 if self._sketch is None else self._sketch.halvings

    def uses(self, place: bytes) -> int:
        """Return how much the value at this key of the table was used lately, 0 to 15: recent uses count for more."""
        return 0 if self._sketch is None else self._sketch.estimate(blake3(place).digest())

    # --- quotas ----------------------------------------------------------------------------------------

    def room(self, number: int, space: SpaceRecord) -> int | None:
        """Return the charge that may be put into a space now; None if it has no quota."""
        if not space.quota_bytes:
            return None
        return space.quota_bytes - charge_of_space(space) - self._under_way.get(number, 0)

    def excess(self, number: int, space: SpaceRecord, above: float = EVICT_ABOVE) -> int:
        """Return the charge that a space should lose to eviction; 0 while it is not over a share of its quota.

        `above`: the share; EVICT_TO once eviction has begun, so that it goes on to there.
        """
        if not space.quota_bytes:
            return 0
        taken = charge_of_space(space) + self._under_way.get(number, 0) + self._needs.get(number, 0)
        is_over = taken > space.quota_bytes * above
        return max(0, int(taken - space.quota_bytes * EVICT_TO)) if is_over else 0

    async def room_for(self, number: int, charged: int, most_charged: int) -> SpaceRecord:
        """Wait until a space has room for this charge, or for half of its quota if that is enough for the largest of
        the values, a moment at most; returns the space.

        SpaceNotFound.  The room is still there when this returns, if the caller takes it (`admitted`) in that step.
        """
        with trio.move_on_after(KEYED_ROOM_WAIT_S):
            while True:
                space = self._space(number)
                need = min(charged, max(space.quota_bytes // 2, most_charged))
                room = self.room(number, space)
                if not charged or room is None or need <= room:
                    if self.excess(number, space):
                        self.round_wanted.set()  # before a put has to wait for it
                    break
                self._needs[number] = max(need, self._needs.get(number, 0))
                self.round_wanted.set()
                await self._room_made.wait()
        return self._space(number)

    def _space(self, number: int) -> SpaceRecord:
        with self._metadata.view() as view:
            return find_space(view, number)

    @contextmanager
    def admitted(self, number: int, charged: int) -> Iterator[Callable[[], None]]:
        """Count a charge as under way until the block ends, or until the call that is yielded: at the decision, which
        counts them in the space's usage."""
        left = charged

        def decided() -> None:
            nonlocal left
            under_way = self._under_way.pop(number, 0) - left
            left = 0
            assert under_way >= 0, "a charge ends once"
            if under_way:
                self._under_way[number] = under_way

        self._under_way[number] = self._under_way.get(number, 0) + charged
        try:
            yield decided
        finally:
            decided()

    def waited_for(self) -> list[int]:
        """Return the numbers of spaces in which a put waits for room."""
        return list(self._needs)

    def wake_puts(self) -> None:
        """Let the puts that wait for room look again; each says anew what it needs if that is not there."""
        self._needs.clear()
        evicted, self._room_made = self._room_made, trio.Event()
        evicted.set()

    # --- garbage ---------------------------------------------------------------------------------------

    def note_evicted(self, number: int, quota_bytes: int, count: int, size_bytes: int, charged: int) -> None:
        """Count evicted values and their charge; their chunks are garbage now, unless something else refers to them."""
        self.counts.evicted += count
        self.counts.evicted_bytes += size_bytes
        self._evicted[number] = self._evicted.get(number, 0) + charged
        if self._evicted[number] > quota_bytes // GARBAGE_SHARE:
            self.garbage.set()

    def begin_collecting(self) -> None:
        """Count evicted bytes from 0 again: a cycle of gc begins.  Who waits for `garbage` goes on waiting."""
        self._evicted.clear()
        if self.garbage.is_set():
            self.garbage = trio.Event()

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
