"""Pins: places in segments that stay unchanged because a client reads them through a mapping of its own.

A lease keeps content; a pin keeps a place.  While a chunk is pinned its bytes stay where they were when it was pinned,
even if compaction has moved the chunk or gc has freed it: `Segments` does not punch the place and does not remove the
segment.  Once unpinned, such a place is garbage that the next cycle of gc frees.

Rules kept here:
- A place is pinned in the step in which its record was read; a chunk without a record is never newly pinned.
- A client has one place for each chunk: pinning it again counts for that place, even if the chunk has moved since.
- Pins are counted, bounded for each connection and in all, and end with their connection.
- A punch looks up only the pins that it touches, by their offsets, which are kept ascending: a hundred thousand pins
  in a segment cost it next to nothing.

All methods are synchronous and called on the loop.  Nothing is durable: a restart ends all pins.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.format.extents import Span, page_up
from engine.format.layouts import ChunkRecord
from lakefs.errors import EngineBusy
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import PINS_MAX, PINS_PER_CONNECTION_MAX


@dataclass(slots=True)
class Pin:
    """A chunk's record as it was when first pinned, and the number of pins."""

    record: ChunkRecord
    count: int = 1


ClientPins = dict[ChunkId, Pin]
"""The pins of one connection."""

_INSORT_OFFSETS_MAX: Final = 64
"""Most new offsets that are inserted into the order one by one; more are sorted in."""
_FRESH_OFFSETS_MAX: Final = 4096
"""Most new offsets that wait to be put in order: among a hundred thousand, sorting takes a millisecond or two."""


class PinnedPlaces:
    """The pinned places of one segment.  They do not overlap: an offset is written once.

    Pinning and unpinning search nothing.  An unpinned offset stays in the order until more are unpinned than pinned.  A
    new offset is put in order when the order is needed, or when many wait.
    """

    __slots__ = ("_ascending", "_counts", "_fresh", "_left", "_lengths")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """Connections that have the place pinned, by offset."""
        self._lengths: dict[int, int] = {}
        self._ascending: list[int] = []
        self._fresh: list[int] = []
        """New offsets.  With `_ascending`: every pinned offset and every one in `_left`, each once."""
        self._left: set[int] = set()

    def __bool__(self) -> bool:
        """True if a place is pinned."""
        return bool(self._counts)

    def enter(self, offset: int, length: int) -> None:
        """Count one more connection that has the place pinned."""
        count = self._counts.get(offset, 0)
        self._counts[offset] = count + 1
        if count:
            return
        self._lengths[offset] = length
        if offset in self._left:
            self._left.remove(offset)
            return
        self._fresh.append(offset)
        if len(self._fresh) >= _FRESH_OFFSETS_MAX:
            self._in_order()

    def leave(self, offset: int) -> None:
        """Count one connection less; the place is unpinned after the last."""
        self._counts[offset] -= 1
        if self._counts[offset]:
            return
        assert offset not in self._left, "an unpinned place has no connection"
        del self._counts[offset], self._lengths[offset]
        self._left.add(offset)
        if len(self._left) > len(self._counts):
            self._ascending = [each for each in self._ascending if each not in self._left]
            self._fresh = [each for each in self._fresh if each not in self._left]
            self._left.clear()

    def touching(self, spans: Iterable[Span]) -> list[Span]:
        """Return pinned places with a page in one of the spans, ascending.  Spans ascend without overlaps."""
        ascending = self._in_order()
        found: list[Span] = []
        at = 0
        for offset, length in spans:
            # The last place that begins before the span may reach into it; earlier ones end before that place begins.
            at = max(at, bisect_right(ascending, offset, at) - 1)
            while at < len(ascending) and ascending[at] < offset + length:
                place = ascending[at]
                if place in self._lengths and page_up(place + self._lengths[place]) > offset:
                    found.append((place, self._lengths[place]))
                at += 1
        return found

    def _in_order(self) -> list[int]:
        if len(self._fresh) > _INSORT_OFFSETS_MAX:
            self._ascending += self._fresh
            self._ascending.sort()
        else:
            for offset in self._fresh:
                insort(self._ascending, offset)
        self._fresh.clear()
        return self._ascending


class Pins:
    """All pins of one engine."""

    def __init__(self) -> None:
        self._places: dict[SegmentId, PinnedPlaces] = {}
        self._count = 0
        self._bytes = 0

    def pin(self, pins: ClientPins, found: Sequence[tuple[ChunkId, ChunkRecord | None]]) -> None:
        """Pin chunks at the places of their records, or again at the places where the client has them pinned.

        Raises EngineBusy when there would be too many; then nothing is pinned.
        """
        new = len({chunk for chunk, record in found if record is not None and chunk not in pins})
        if len(pins) + new > PINS_PER_CONNECTION_MAX:
            raise EngineBusy(f"{PINS_PER_CONNECTION_MAX} chunks may be pinned on one connection; unpin some")
        if self._count + new > PINS_MAX:
            raise EngineBusy(f"{PINS_MAX} chunks are pinned on all connections together; try again later")
        for chunk, record in found:
            own = pins.get(chunk)
            if own is not None:
                own.count += 1
            elif record is not None:
                pins[chunk] = Pin(record)
                self._enter(record)

    def unpin(self, pins: ClientPins, chunks: Iterable[ChunkId]) -> None:
        """Remove one pin of each chunk; chunks that are not pinned are ignored."""
        for chunk in chunks:
            own = pins.get(chunk)
            if own is None:
                continue
            own.count -= 1
            if not own.count:
                del pins[chunk]
                self._leave(own.record)

    def end_all(self, pins: ClientPins) -> None:
        """Remove all pins of a connection that has ended."""
        for pin in pins.values():
            self._leave(pin.record)
        pins.clear()

    def has(self, segment: SegmentId) -> bool:
        """Return True if a place in the segment is pinned."""
        return segment in self._places

    def touching(self, segment: SegmentId, spans: Iterable[Span]) -> list[Span]:
        """Return the segment's pinned places with a page in one of the spans; both ascend, without overlaps."""
        places = self._places.get(segment)
        return [] if places is None else places.touching(spans)

    def statistics(self) -> dict[str, int]:
        """Counts for `lake status`: pinned chunks (once for each connection), their bytes, and segments."""
        return {"chunks": self._count, "bytes": self._bytes, "segments": len(self._places)}

    def _enter(self, record: ChunkRecord) -> None:
        places = self._places.get(record.segment)
        if places is None:
            places = self._places[record.segment] = PinnedPlaces()
        places.enter(record.offset, record.extent_bytes)
        self._count += 1
        self._bytes += record.extent_bytes

    def _leave(self, record: ChunkRecord) -> None:
        places = self._places[record.segment]
        places.leave(record.offset)
        if not places:
            del self._places[record.segment]
        self._count -= 1
        self._bytes -= record.extent_bytes
        assert bool(self._places) == (self._count > 0), "the count is that of the places"
        assert self._bytes >= 0
