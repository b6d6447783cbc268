"""Reading ahead: pages are fetched for a reader that reads on, not for one that jumps; and all of it is bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, strategies as st

from lakefs.errors import StaleGrant
from lakefs.grants.read_ahead import ReadAhead, ReadAheadWindow
from lakefs.host.page_cache import is_cached
from lakefs.ids import SegmentId
from lakefs.limits import MIB, READ_AHEAD_BYTES_MAX, READ_AHEAD_WINDOW_BYTES_MAX, READ_AHEAD_WINDOW_BYTES_MIN

SEGMENT = SegmentId(1)
SIZE = 1024 * MIB
FAR = 64 * MIB


class ColdFile:
    """A file whose pages were dropped."""

    def __init__(self, path: Path, size: int) -> None:
        path.write_bytes(bytes(size))
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(self.descriptor)
        self.drop()
        if is_cached(self.descriptor, 0, size) is not False:
            os.close(self.descriptor)
            pytest.skip("this file system keeps its pages")

    def drop(self) -> None:
        """Drop the file from memory."""
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def use(self, segment: SegmentId) -> Iterator[int]:
        """Stand in for `SegmentDescriptors.use`."""
        if segment != SEGMENT:
            raise StaleGrant("not held")
        yield self.descriptor

    def has(self, offset: int, length: int) -> bool:
        """Return whether the page cache has these bytes."""
        return is_cached(self.descriptor, offset, length) is True


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ColdFile]:
    made = ColdFile(tmp_path / "segment", 8 * MIB)
    yield made
    os.close(made.descriptor)


def test_what_is_wanted_is_brought_in(file: ColdFile) -> None:
    ahead = ReadAhead(file.use)
    assert ahead.want(SEGMENT, 2 * MIB, MIB)
    assert ahead.want(SEGMENT, 6 * MIB, MIB)
    ahead.wait_done()
    assert file.has(2 * MIB, MIB)
    assert file.has(6 * MIB, MIB)


def test_what_is_there_or_gone_is_not_wanted(file: ColdFile) -> None:
    os.pread(file.descriptor, MIB, 0)
    ahead = ReadAhead(file.use)
    assert not ahead.want(SEGMENT, 0, MIB)
    assert not ahead.want(SegmentId(2), 2 * MIB, MIB)
    ahead.wait_done()


def test_a_place_that_is_gone_when_its_turn_comes_is_left_out(file: ColdFile) -> None:
    uses: list[int] = []

    @contextmanager
    def use(segment: SegmentId) -> Iterator[int]:
        uses.append(1)
        if len(uses) == 2:  # it was still there when `want` asked
            raise StaleGrant("gone")
        with file.use(segment) as descriptor:
            yield descriptor

    ahead = ReadAhead(use)
    assert ahead.want(SEGMENT, 0, MIB)
    ahead.wait_done()
    assert not file.has(0, MIB)
    assert ahead.want(SEGMENT, 4 * MIB, MIB)
    ahead.wait_done()
    assert file.has(4 * MIB, MIB)


def test_no_more_than_the_limit_waits(file: ColdFile) -> None:
    hold = Event()
    asked: list[int] = []

    @contextmanager
    def use(segment: SegmentId) -> Iterator[int]:
        asked.append(1)
        if len(asked) == 2:  # the thread's use, for the first place
            hold.wait()
        yield file.descriptor

    ahead = ReadAhead(use)
    assert ahead.want(SEGMENT, 0, MIB)
    while len(asked) < 2:
        pass
    assert ahead.want(SEGMENT, 2 * MIB, READ_AHEAD_BYTES_MAX - MIB)
    assert ahead.want(SEGMENT, 3 * MIB, MIB)
    assert not ahead.want(SEGMENT, 4 * MIB, MIB)
    ahead.forget()
    assert ahead.want(SEGMENT, 5 * MIB, MIB)
    hold.set()
    ahead.wait_done()
    assert file.has(5 * MIB, MIB)


def read_in_order(window: ReadAheadWindow, count: int, size: int = SIZE) -> list[tuple[int, int]]:
    """Return what `count` reads of 1 MiB, one after the other, want fetched."""
    return [window.after(number * MIB, MIB, size) for number in range(count)]


def test_the_first_read_of_a_file_brings_in_nothing() -> None:
    assert read_in_order(ReadAheadWindow(), 1)[0][1] == 0


def test_a_reader_in_order_is_preceded_by_a_window_that_grows_to_its_limit() -> None:
    wanted = [found for found in read_in_order(ReadAheadWindow(), 200) if found[1]]
    assert wanted[0] == (2 * MIB, READ_AHEAD_WINDOW_BYTES_MIN)
    ends = [begin + length for begin, length in wanted]
    assert [begin for begin, _ in wanted[1:]] == ends[:-1]
    assert max(length for _, length in wanted) <= READ_AHEAD_WINDOW_BYTES_MAX
    assert ends[-1] >= 200 * MIB + READ_AHEAD_WINDOW_BYTES_MAX // 2


def test_nothing_is_wanted_behind_the_end() -> None:
    wanted = [found for found in read_in_order(ReadAheadWindow(), 10, size=10 * MIB) if found[1]]
    assert sum(length for _, length in wanted) == 8 * MIB


@given(
    st.lists(st.integers(0, SIZE // FAR - 1), min_size=2, max_size=50).filter(
        lambda places: all(a != b for a, b in pairwise(places))
    )
)
def test_a_reader_here_and_there_is_not_preceded(places: list[int]) -> None:
    window = ReadAheadWindow()
    assert all(window.after(place * FAR, 4096, SIZE)[1] == 0 for place in places)


def test_a_reader_that_jumps_begins_anew() -> None:
    window = ReadAheadWindow()
    read_in_order(window, 100)
    assert window.after(512 * MIB, MIB, SIZE)[1] == 0
    assert window.after(513 * MIB, MIB, SIZE) == (514 * MIB, READ_AHEAD_WINDOW_BYTES_MIN)


def test_a_reader_that_leaves_out_padding_reads_on_and_one_that_goes_back_does_not() -> None:
    window = ReadAheadWindow()
    padded = [window.after(number * (MIB + 4096), MIB, SIZE) for number in range(8)]
    assert sum(length for _, length in padded) >= 8 * MIB
    assert [window.after((8 - number) * MIB, MIB, SIZE)[1] for number in range(8)] == [0] * 8


def test_what_is_read_behind_the_end_or_before_the_begin_is_no_reason_for_anything() -> None:
    window = ReadAheadWindow()
    for offset, length in ((SIZE + 5, 10), (-1, 4), (SIZE - 1, 100), (SIZE, 0)):
        assert window.after(offset, length, SIZE)[1] == 0
