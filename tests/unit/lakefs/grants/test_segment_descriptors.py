"""Descriptors of segments: each is closed just once, and not too many are kept open."""

from __future__ import annotations

import os

import pytest

from lakefs.grants.descriptors import DESCRIPTORS_MAX, HELD_MAX, SegmentDescriptors
from lakefs.ids import SegmentId
from tests.descriptors import descriptor_count


def test_an_interrupt_while_all_are_closed_closes_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = SegmentDescriptors()
    own = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    for number, descriptor in enumerate(own):
        descriptors.add(SegmentId(number), descriptor)
    close = os.close

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        if descriptor in own:  # not one that Python's garbage collector closes at the same time
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr("lakefs.grants.descriptors.os.close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        descriptors.close()
    somebodys = os.open(os.devnull, os.O_RDONLY)  # it gets the number that was closed
    descriptors.close()
    os.fstat(somebodys)
    os.close(somebodys)


def test_many_open_files_do_not_keep_more_segments_open_than_are_to_be() -> None:
    descriptors = SegmentDescriptors()
    segments = [SegmentId(number) for number in range(DESCRIPTORS_MAX + 100)]
    before = descriptor_count()
    held = []
    for segment in segments:
        descriptors.add(segment, os.open(os.devnull, os.O_RDONLY))
        if (found := descriptors.hold(segment)) is not None:
            held.append(found)
    assert len(held) == HELD_MAX
    assert descriptor_count() - before == DESCRIPTORS_MAX
    again = descriptors.hold(segments[0])
    assert again is held[0], "one that is held may be held again"
    descriptors.let_go(again)
    assert descriptors.hold(segments[-1]) is None
    descriptors.let_go(held.pop())
    last = descriptors.hold(segments[-1])
    assert last is not None
    descriptors.close()
    assert descriptor_count() - before == HELD_MAX
    for each in (*held, last):
        descriptors.let_go(each)
    assert descriptor_count() == before
