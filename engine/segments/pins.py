"""Pins: places in segments that stay as they are because a client reads them through a mapping of its own.

A lease keeps content; a pin keeps a place.  While a chunk is pinned its bytes lie where they lay when it was pinned,
even when compaction has moved the chunk or gc has freed it: `Segments` leaves the place out of whatever it punches, and
does not remove the segment.  What was held back so is garbage that the next cycle of gc gives back.

Rules kept here:
- A place is pinned in the step in which its record was read; a place without a record is never pinned anew.
- A client has one place for each chunk: what it pins again is the place that it has, wherever the chunk is by now.
- Pins are counted, bounded for each connection and in all, and end with their connection.
- A punch asks for the pins that it touches only, and finds them by their offsets, which are kept ascending: a hundred
  thousand pins of a segment cost it next to nothing.

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
    """A chunk's record as it was when it was pinned, and how often it was."""

    record: ChunkRecord
    count: int = 1


ClientPins = dict[ChunkId, Pin]
"""The pins of one connection."""

_INSORT_OFFSETS_MAX: Final = 64
"""So many new offsets are put into the order one by one."""
_FRESH_OFFSETS_MAX: Final = 4096
"""New offsets that wait to be put in order: with a hundred thousand that are, sorting takes a millisecond or two."""


class PinnedPlaces:
    """The pinned places of one segment.  They do not overlap: an offset is written once.

    What comes and goes costs no search: what is not pinned any more stays in the order until half of it is so, and
    what is new is put there when the order is asked for, or when there is much of it.
    """

    __slots__ = ("_ascending", "_counts", "_fresh", "_left", "_lengths")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """Of connections, by offset."""
        self._lengths: dict[int, int] = {}
        self._ascending: list[int] = []
        self._fresh: list[int] = []
        """With `_ascending` all offsets that are pinned, and `_left`; each once."""
        self._left: set[int] = set()

    def __bool__(self) -> bool:
        """Whether anything is pinned."""
        return bool(self._counts)

    def enter(self, offset: int, length: int) -> None:
        """One more connection has the place pinned."""
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
        """One connection less."""
        self._counts[offset] -= 1
        if self._counts[offset]:
            return
        del self._counts[offset], self._lengths[offset]
        self._left.add(offset)
        if len(self._left) > len(self._counts):
            self._ascending = [each for each in self._ascending if each not in self._left]
            self._fresh = [each for each in self._fresh if each not in self._left]
            self._left.clear()

    def touching(self, spans: Iterable[Span]) -> list[Span]:
        """The pinned places that have a page in one of the spans, ascending.  Those ascend, and do not overlap."""
        ascending = self._in_order()
        found: list[Span] = []
        at = 0
        for offset, length in spans:
            # The one that begins before may reach into the span; one further back ends before that one begins.
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
        """Pin chunks at the places of their records, or where the client has them already.

        EngineBusy when these would be too many; then nothing is pinned.
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
        """Take back one pin of each; chunks that are not pinned are ignored."""
        for chunk in chunks:
            own = pins.get(chunk)
            if own is None:
                continue
            own.count -= 1
            if not own.count:
                del pins[chunk]
                self._leave(own.record)

    def end_all(self, pins: ClientPins) -> None:
        """The connection has ended, and its pins with it."""
        for pin in pins.values():
            self._leave(pin.record)
        pins.clear()

    def has(self, segment: SegmentId) -> bool:
        """Whether anything is pinned in the segment."""
        return segment in self._places

    def touching(self, segment: SegmentId, spans: Iterable[Span]) -> list[Span]:
        """The pinned places of the segment that have a page in one of the spans; both ascend, without overlaps."""
        places = self._places.get(segment)
        return [] if places is None else places.touching(spans)

    def statistics(self) -> dict[str, int]:
        """Counts for `lake status`: chunks pinned, once for each connection, their bytes, and segments."""
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
