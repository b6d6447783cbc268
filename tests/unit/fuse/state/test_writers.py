"""Handles that may change a file, which of them has, and names whose failure waits for an open."""

from __future__ import annotations

import os

import pytest

from fuse.state.writers import FAILURES_MAX, Failures, Writers
from lakefs.errors import LakeError, StoreFull

ONE, TWO, READER = 1, 2, 3


def two() -> Writers:
    """Return a file with a handle that writes, and one that reads and writes."""
    writers = Writers()
    writers.opened(ONE, os.O_WRONLY, 0)
    writers.opened(TWO, os.O_RDWR, 0)
    return writers


def test_a_change_is_its_handles_until_it_is_committed() -> None:
    writers = two()
    writers.changed(ONE)
    assert [writers.has_changed(handle) for handle in (ONE, TWO, READER)] == [True, False, False]
    assert writers.is_changed
    writers.committed()
    assert [writers.has_changed(handle) for handle in (ONE, TWO, READER)] == [False, False, False]
    writers.changed(TWO)
    writers.closed(TWO)
    writers.closed(READER)
    assert not writers.is_changed


def test_what_a_mapping_wrote_is_any_handles_that_reads_and_writes() -> None:
    writers = two()
    writers.changed(ONE, is_mapped=True)
    assert [writers.has_changed(handle) for handle in (ONE, TWO, READER)] == [False, True, False]
    writers.committed()
    writers.changed(ONE, is_mapped=None)
    assert [writers.has_changed(handle) for handle in (ONE, TWO, READER)] == [True, True, False]
    writers.committed()
    writers.closed(TWO)
    writers.changed(ONE, is_mapped=None)
    writers.opened(TWO, os.O_RDWR, 0)
    assert not writers.has_changed(TWO), "nothing could be mapped when that was written"


def test_an_error_is_reported_once_for_what_was_changed_before_it() -> None:
    writers = two()
    reported = [writers.is_reported]

    def fail() -> None:
        with writers.reporting():
            raise StoreFull("full")

    writers.changed(ONE)
    reported.append(writers.is_reported)
    with pytest.raises(StoreFull):
        fail()
    reported.append(writers.is_reported)
    writers.changed(ONE)
    reported.append(writers.is_reported)
    assert reported == [True, False, True, False]


def test_a_failure_is_raised_once_and_the_oldest_are_forgotten() -> None:
    failures = Failures()
    for number in range(FAILURES_MAX + 2):
        failures.note(f"b/{number}", StoreFull("full"))
    failures.raise_once("b/0")
    failures.raise_once("other")
    with pytest.raises(LakeError):
        failures.raise_once(f"b/{FAILURES_MAX}")
    failures.raise_once(f"b/{FAILURES_MAX}")
    failures.forget("b/9")
    failures.forget("b/9")
    failures.raise_once("b/9")
