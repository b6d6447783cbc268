"""Pages of a file that still wait to be written to its disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs.host.page_cache import is_cached, is_in_memory, is_written_out
from lakefs.limits import MIB, PAGE_BYTES


def test_pages_are_written_out_when_they_were_synced_and_not_written_since(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for at in range(4):  # each MiB has pages of its own, however large those are
            os.pwrite(descriptor, bytes(MIB), at * MIB)
        if is_in_memory(descriptor) or is_cached(descriptor, 0, 1) is None:
            pytest.skip("this file system has no disk, or this kernel does not say")
        os.fsync(descriptor)
        assert is_written_out(descriptor, 0, 4 * MIB)
        os.pwrite(descriptor, b"x", 2 * MIB)
        assert is_written_out(descriptor, 0, 2 * MIB)
        assert not is_written_out(descriptor, 0, 2 * MIB + 1)
        assert is_written_out(descriptor, 3 * MIB, MIB)
    finally:
        os.close(descriptor)


def test_what_cannot_be_known_is_not_written_out(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    assert not is_written_out(descriptor, 0, PAGE_BYTES)
