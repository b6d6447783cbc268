"""Filling in pages: what was asked for is in the page cache afterwards, and no file can cause a signal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs.host.memory_advice import populate
from lakefs.host.page_cache import is_cached

MIB = 1 << 20


def cold_file(path: Path, size: int) -> int:
    """Return a descriptor of a file whose pages were dropped; skip where they cannot be."""
    path.write_bytes(bytes(size))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(descriptor, 0, size) is not False:
        os.close(descriptor)
        pytest.skip("this file system keeps its pages")
    return descriptor


@pytest.mark.parametrize(("offset", "length"), [(0, 6 * MIB), (3 * MIB + 5, 2 * MIB), (5 * MIB + 4095, MIB - 4095)])
def test_what_was_asked_for_is_in_the_page_cache(tmp_path: Path, offset: int, length: int) -> None:
    descriptor = cold_file(tmp_path / "file", 6 * MIB)
    try:
        assert populate(descriptor, offset, length)
        assert is_cached(descriptor, offset, length) is True
    finally:
        os.close(descriptor)


def test_a_file_that_ends_before_the_place_is_no_signal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert not populate(descriptor, 4 * MIB, MIB)
        assert not populate(descriptor, 0, 4 * MIB)
    finally:
        os.close(descriptor)


def test_what_cannot_be_mapped_is_said() -> None:
    reading, writing = os.pipe()
    try:
        assert not populate(reading, 0, MIB)
        assert not populate(-1, 0, MIB)
    finally:
        os.close(reading)
        os.close(writing)
