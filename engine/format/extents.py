"""Places in segments: page arithmetic, the pages of a range that may be freed, and places not yet recorded.

Rules kept here:
- Only whole pages are freed, and never the page of the header.
- An extent of a large segment owns its last page to the end; one of a small segment shares its pages.
- A place is in flight from the moment it is given out until its owner settles it, exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.format.layouts import SEGMENT_DATA_OFFSET, SegmentKind
from lakefs.content.verify import vector_bytes
from lakefs.ids import SegmentId
from lakefs.limits import PAGE_BYTES

Span = tuple[int, int]
"""(offset, length) in one segment, in bytes."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Segment and offset at which a payload begins."""

    segment: SegmentId
    offset: int


Extent = tuple[SegmentId, int, int]
"""(segment, offset, length): a run of bytes of a segment, such as a payload and its vector."""


def page_up(size: int) -> int:
    """Round up to a multiple of a page."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def page_down(size: int) -> int:
    """Round down to a multiple of a page."""
    return size // PAGE_BYTES * PAGE_BYTES


def large_extent_bytes(stored_bytes: int) -> int:
    """Return the bytes of an extent of a large segment: payload, vector and zeros to the page's end."""
    return page_up(stored_bytes + vector_bytes(stored_bytes))


def coalesced(extents: Iterable[Extent]) -> dict[SegmentId, list[Span]]:
    """Return the extents by segment, ascending, adjoining ones merged."""
    spans: dict[SegmentId, list[Span]] = {}
    for segment, offset, length in sorted(extents):
        found = spans.setdefault(segment, [])
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return spans


def owned_spans(kind: SegmentKind, spans: Iterable[Span]) -> list[Span]:
    """Return the spans with all bytes they own: in large segments to the end of the last page, merged."""
    if kind is SegmentKind.SMALL:
        return list(spans)
    owned: list[Span] = []
    for offset, length in spans:
        end = page_up(offset + length)
        if owned and sum(owned[-1]) == offset:
            owned[-1] = (owned[-1][0], end - owned[-1][0])
        else:
            owned.append((offset, end - offset))
    return owned


def whole_pages(spans: Iterable[Span]) -> list[Span]:
    """Return the pages that lie whole inside a span, without the header's page."""
    pages: list[Span] = []
    for offset, length in spans:
        first, end = max(page_up(offset), SEGMENT_DATA_OFFSET), page_down(offset + length)
        if end > first:
            pages.append((first, end - first))
    return pages


def gaps(live: Sequence[Span], end: int) -> list[Span]:
    """Return the spans between the header and `end` that are not live.  `live` ascends and does not overlap."""
    found: list[Span] = []
    position = SEGMENT_DATA_OFFSET
    for offset, length in live:
        assert offset >= position, "live extents overlap or are not sorted"
        if offset > position:
            found.append((position, offset - position))
        position = offset + length
    if end > position:
        found.append((position, end - position))
    return found


def without(spans: Iterable[Span], kept: Sequence[Span]) -> list[Span]:
    """Return the parts of the spans that lie in none of `kept`.  Both ascend; neither overlaps itself."""
    left: list[Span] = []
    index = 0
    for offset, length in spans:
        end = offset + length
        while index < len(kept) and sum(kept[index]) <= offset:
            index += 1
        at = index
        while at < len(kept) and kept[at][0] < end:
            if kept[at][0] > offset:
                left.append((offset, kept[at][0] - offset))
            offset = max(offset, sum(kept[at]))
            at += 1
        if end > offset:
            left.append((offset, end - offset))
    return left


class InFlight:
    """Places given out and not yet settled, by segment."""

    def __init__(self) -> None:
        self._offsets: dict[SegmentId, set[int]] = {}

    def begin(self, place: Place) -> None:
        """Record that the place is given out."""
        offsets = self._offsets.setdefault(place.segment, set())
        assert place.offset not in offsets, f"offset {place.offset} of {place.segment} given out twice"
        offsets.add(place.offset)

    def begin_many(self, segment: SegmentId, begun: set[int]) -> None:
        """Record that places of one segment, by their offsets, are given out."""
        offsets = self._offsets.setdefault(segment, set())
        assert offsets.isdisjoint(begun), f"offsets of {segment} given out twice"
        offsets |= begun

    def settle(self, place: Place) -> None:
        """Record that the place's chunk record is durable, or that the place was given up."""
        offsets = self._offsets.get(place.segment, set())
        assert place.offset in offsets, f"{place} is not in flight: settled twice?"
        offsets.remove(place.offset)
        if not offsets:
            del self._offsets[place.segment]

    def count(self, segment: SegmentId) -> int:
        """Return the number of places of the segment in flight."""
        return len(self._offsets.get(segment, ()))

    def touches(self, segment: SegmentId, offset: int, length: int) -> bool:
        """Return True if a place in flight begins inside the span."""
        return any(offset <= place < offset + length for place in self._offsets.get(segment, ()))
