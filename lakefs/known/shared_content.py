"""Segments and slabs by which a `KnownTable` reads content: requested from the engine when a known name needs them.

Rules kept here:
- A descriptor is borrowed from the client's `SegmentDescriptors`, which keeps it open until it is given back here.
- Memory is mapped only if it is sealed against shrinking (`lakefs.grants.dram_slabs`); segments are read, not mapped.
- What cannot be brought is no error: its content is asked for as ever, and learning its name asks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lakefs.errors import LakeError
from lakefs.get.fetch import need_segments, need_slabs
from lakefs.grants.descriptors import Held, SegmentDescriptors
from lakefs.ids import SegmentId
from lakefs.limits import KNOWN_SEGMENTS_MAX, KNOWN_WANTED_MAX
from lakefs.steps.steps import Steps
from lakefs.wire.grants import MEDIUM_SEGMENT

if TYPE_CHECKING:
    from lakefs.known._known import KnownTable


class SharedContent:
    """Segments and slabs of one connection.  Its owner holds a lock around every call but `bring`."""

    def __init__(self, table: KnownTable, descriptors: SegmentDescriptors) -> None:
        self._table = table
        self._descriptors = descriptors
        self._borrowed: dict[int, Held] = {}
        self._wanted: set[tuple[int, int]] = set()
        self._asked: set[tuple[int, int]] = set()
        """Requested on this connection: once is enough for what the engine does not give."""

    @property
    def is_wanted(self) -> bool:
        """True if something is to be brought."""
        return bool(self._wanted)

    def want(self, places: Iterable[tuple[int, int]]) -> None:
        """Have segments and slabs brought, those that were not requested in vain."""
        for place in places:
            if place not in self._asked and len(self._wanted) < KNOWN_WANTED_MAX:
                self._wanted.add(place)

    def bring(self) -> Steps[list[tuple[int, int]]]:
        """Ask for what is wanted and not at hand; return what was wanted, for `use`."""
        wanted, self._wanted = sorted(self._wanted), set()
        segments = {SegmentId(number) for tier, number in wanted if tier == MEDIUM_SEGMENT}
        slabs = {number for tier, number in wanted if tier != MEDIUM_SEGMENT}
        try:
            yield from need_segments(self._descriptors, self._descriptors.missing(segments))
            yield from need_slabs(self._descriptors.slabs, self._descriptors.slabs.missing(slabs))
        except LakeError:
            return []
        return wanted

    def use(self, wanted: list[tuple[int, int]]) -> None:
        """Use what was brought."""
        if len(self._asked) + len(wanted) > KNOWN_SEGMENTS_MAX:
            self._asked.clear()
        for tier, number in wanted:
            if tier == MEDIUM_SEGMENT:
                self._use_segment(number)
        if any(tier != MEDIUM_SEGMENT for tier, _ in wanted):
            arena = self._descriptors.slabs.arena
            if arena is not None:
                self._table.use_slabs(arena.generations.cast("B"), arena.slab_bytes, arena.slabs)
        self._asked.update(wanted)

    def _use_segment(self, number: int) -> None:
        if number in self._borrowed:
            return
        if len(self._borrowed) >= KNOWN_SEGMENTS_MAX:
            self._give_back()
        held = self._descriptors.enter(SegmentId(number))
        if held is None:
            return
        self._borrowed[number] = held
        dropped = self._table.use_segment(number, held.descriptor, held.nowait)
        if dropped is not None and (before := self._borrowed.pop(dropped, None)) is not None:
            self._descriptors.leave(before)

    def forget(self, descriptors: SegmentDescriptors, *, is_forked: bool) -> None:
        """Begin anew, with these descriptors; `is_forked`: what was borrowed is the parent's, and is left alone."""
        if is_forked:
            self._borrowed.clear()
        self._give_back()
        self._wanted.clear()
        self._asked.clear()
        self._descriptors = descriptors

    def _give_back(self) -> None:
        self._table.drop_segments()
        borrowed, self._borrowed = self._borrowed, {}
        for held in borrowed.values():
            self._descriptors.leave(held)
        self._asked.clear()
