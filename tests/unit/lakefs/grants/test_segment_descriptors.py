"""Descriptors of segments: each is closed just once."""

from __future__ import annotations

import os

import pytest

from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.ids import SegmentId


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
