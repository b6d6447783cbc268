"""Planted bugs of direct reads, which the tests have to notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lakefs.direct.keyed_reads import KeyedReads
from lakefs.grants.batch_plan import CHECKED_BYTES_MAX, ReadPlan
from lakefs.grants.descriptors import Held, SegmentDescriptors
from lakefs.ids import SegmentId


@contextmanager
def any_bytes_are_believed() -> Iterator[None]:
    """Read whatever is at a place, also from the disk."""
    enter = SegmentDescriptors.enter

    def enter_and_wait(self: SegmentDescriptors, segment: SegmentId) -> Held | None:
        held = enter(self, segment)
        if held is not None:
            held.nowait = 0
        return held

    class Believing:
        """A plan that checks nothing."""

        def __init__(
            self,
            chunks: list[bytes],
            targets: list[memoryview],
            places: bytes,
            longest: int,
            is_checked: bool,
            asks: bool,
        ) -> None:
            self._plan = ReadPlan(chunks, targets, places, CHECKED_BYTES_MAX, asks=asks)

        def read_checked(self, descriptors: list[Any], lengths: list[int], helper: object) -> None:
            self._plan.read_lengths(0, self._plan.runs, descriptors, lengths)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._plan, name)

    with (
        mock.patch("lakefs.direct.batch_reads.ReadPlan", Believing),
        mock.patch("lakefs.direct.batch_reads.matches", return_value=True),
        mock.patch("lakefs.direct.chunk_reads.matches", return_value=True),
        mock.patch.object(SegmentDescriptors, "enter", enter_and_wait),
        mock.patch.object(SegmentDescriptors, "may_be_cached", return_value=True),
    ):
        yield


def once(match: Any) -> Any:
    """Return a look-up that remembers its answers."""
    known: dict[tuple[int, bytes], bool | None] = {}

    def remembering(self: KeyedReads, space: int, keys: list[bytes], *sizes: Any) -> list[bool | None]:
        for key, flag in zip(keys, match(self, space, keys, *sizes), strict=True):
            known.setdefault((space, key), flag)
        return [known[space, key] for key in keys]

    return remembering
