"""Pins: places in segments that stay as they are because a client reads them through a mapping of its own.

A lease keeps content; a pin keeps a place.  While a chunk is pinned its bytes lie where they lay when it was pinned,
even when compaction has moved the chunk or gc has freed it: `Segments` leaves the place out of whatever it punches, and
does not remove the segment.  What was held back so is garbage that the next cycle of gc gives back.

Rules kept here:
- A place is pinned in the step in which its record was read; a place without a record is never pinned anew.
- A client has one place for each chunk: what it pins again is the place that it has, wherever the chunk is by now.
- Pins are counted, bounded for each connection and in all, and end with their connection.

All methods are synchronous and called on the loop.  Nothing is durable: a restart ends all pins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.extents import Span
from engine.format import ChunkRecord
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


class Pins:
    """All pins of one engine."""

    def __init__(self) -> None:
        self._places: dict[SegmentId, dict[int, Pin]] = {}
        """By offset; `count` is of connections here."""
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

    def spans(self, segment: SegmentId) -> list[Span]:
        """The pinned places of the segment, ascending."""
        places = self._places.get(segment, {})
        return [(offset, places[offset].record.extent_bytes) for offset in sorted(places)]

    def statistics(self) -> dict[str, int]:
        """Counts for `lake status`: chunks pinned, once for each connection, their bytes, and segments."""
        return {"chunks": self._count, "bytes": self._bytes, "segments": len(self._places)}

    def _enter(self, record: ChunkRecord) -> None:
        places = self._places.setdefault(record.segment, {})
        place = places.get(record.offset)
        if place is None:
            places[record.offset] = Pin(record)
        else:
            place.count += 1
        self._count += 1
        self._bytes += record.extent_bytes

    def _leave(self, record: ChunkRecord) -> None:
        places = self._places[record.segment]
        place = places[record.offset]
        place.count -= 1
        if not place.count:
            del places[record.offset]
            if not places:
                del self._places[record.segment]
        self._count -= 1
        self._bytes -= record.extent_bytes
