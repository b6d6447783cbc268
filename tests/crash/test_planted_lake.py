"""Checks that the cycles can fail: an engine with a bug does not get through them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.format.extents import Extent, Span
from engine.format.layouts import SegmentKind
from engine.segments.room import SegmentRoom
from lakefs.ids import SegmentId
from tests.crash.cycles import Cycles
from tests.crash.small_engine import PLANTED_LAKE

pytestmark = pytest.mark.thorough

CYCLES = 25


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["answer-first"])
def test_an_engine_that_answers_before_its_journal_is_caught(bug: str) -> None:
    with TemporaryDirectory(prefix="lake-") as name, Cycles(Path(name), "planted") as cycles:
        cycles.engine.program = [*PLANTED_LAKE, bug]
        with pytest.raises(AssertionError, match=r"^cycle \d+:"):
            cycles.run(CYCLES, look_every=CYCLES)


@pytest.mark.slow
def test_a_gc_that_forgets_large_segments_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug is in the gc that runs when the store is examined after the kills."""
    punch, punch_gaps, remove = SegmentRoom.punch, SegmentRoom.punch_gaps, SegmentRoom.remove

    def is_forgotten(room: SegmentRoom, segment: SegmentId) -> bool:
        return segment in room._register.kinds and room._register.kinds[segment] is SegmentKind.LARGE

    async def some(room: SegmentRoom, extents: Iterable[Extent]) -> None:
        await punch(room, [extent for extent in extents if not is_forgotten(room, extent[0])])

    async def gaps(room: SegmentRoom, segment: SegmentId, live: Sequence[Span]) -> None:
        if not is_forgotten(room, segment):
            await punch_gaps(room, segment, live)

    async def most(room: SegmentRoom, segment: SegmentId) -> bool:
        return not is_forgotten(room, segment) and await remove(room, segment)

    with TemporaryDirectory(prefix="lake-") as name, Cycles(Path(name), "planted") as cycles:
        monkeypatch.setattr(SegmentRoom, "punch", some)
        monkeypatch.setattr(SegmentRoom, "punch_gaps", gaps)
        monkeypatch.setattr(SegmentRoom, "remove", most)
        with pytest.raises(AssertionError, match=r"^cycle \d+:.*Inspection"):
            cycles.run(CYCLES, look_every=1)
        sys.stdout.write(f"caught in cycle {cycles.tally.cycles + 1}\n")
