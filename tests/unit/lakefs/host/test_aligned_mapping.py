"""Mappings that begin where a huge page does, and shared memory gathered into huge pages."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from engine.memory.backing import open_backing
from engine.memory.sealed_memory import SealedMemory
from lakefs.host.aligned_mapping import HUGE_BYTES, map_aligned

_MAP_NORESERVE: Final = 0x4000


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("aligned")
    os.ftruncate(descriptor, 3 * HUGE_BYTES + 4096)
    yield descriptor
    os.close(descriptor)


def addresses(name: str) -> list[tuple[int, int]]:
    """Return begin and end of each mapping of a memfd in this process."""
    found = re.findall(rf"(?m)^(\w+)-(\w+) .*memfd:{name}", Path("/proc/self/maps").read_text())
    return [(int(begin, 16), int(end, 16)) for begin, end in found]


def test_a_mapping_of_a_huge_page_or_more_begins_at_one_and_is_gone_when_it_is_closed(file: int) -> None:
    length = 2 * HUGE_BYTES + 4096
    os.pwrite(file, b"first", 0)
    os.pwrite(file, b"last", length - 4)
    memory, begin = map_aligned(file, length)
    view = memoryview(memory).toreadonly()[begin : begin + length]
    assert (bytes(view[:5]), bytes(view[-4:])) == (b"first", b"last")
    [(first, end)] = addresses("aligned")
    assert (first % HUGE_BYTES, end - first) == (0, length)
    view.release()
    memory.close()
    assert addresses("aligned") == []


@pytest.mark.parametrize("length", [4096, HUGE_BYTES, 2 * HUGE_BYTES + 6 * 4096])
def test_of_reserved_huge_pages_whole_ones_are_mapped_and_nothing_else_is_replaced(length: int) -> None:
    try:
        descriptor = os.memfd_create("reserved", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages to reserve: {error}")
    try:
        os.ftruncate(descriptor, 4 * HUGE_BYTES)
        # No huge page has to be set aside for a mapping without a reservation whose pages nobody touches.
        memory, begin = map_aligned(descriptor, length, mmap.MAP_SHARED | _MAP_NORESERVE)
        [(first, end)] = addresses("reserved")
        assert first % HUGE_BYTES == 0
        assert end - first == -(-length // HUGE_BYTES) * HUGE_BYTES
        assert begin + (end - first) <= len(memory)
        memory.close()
        assert addresses("reserved") == []
    finally:
        os.close(descriptor)


def test_a_writable_mapping_changes_the_file(file: int) -> None:
    memory, begin = map_aligned(file, 2 * HUGE_BYTES, protection=mmap.PROT_READ | mmap.PROT_WRITE)
    memory[begin : begin + 5] = b"bytes"
    assert os.pread(file, 5, 0) == b"bytes"
    memory.close()


def test_what_is_longer_than_its_file_is_not_mapped(file: int) -> None:
    for length in (4 * HUGE_BYTES, 1 << 40):
        with pytest.raises(ValueError, match="longer than its file"):
            map_aligned(file, length)
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_aligned(-1, 4096)
    assert addresses("aligned") == []


def test_sealed_memory_is_the_same_after_it_was_gathered() -> None:
    made = SealedMemory("gathered", 3 * HUGE_BYTES + 4096, huge=False)
    try:
        content = os.urandom(4096)
        for begin in range(0, len(made.view), len(content)):
            made.view[begin : begin + len(content)] = content
        is_gathered = made.gather(0, len(made.view))
        assert made.view == content * (len(made.view) // len(content))
        made.view[:5] = b"fresh"
        assert os.pread(made.descriptor, 5, 0) == b"fresh"
        assert not made.gather(3 * HUGE_BYTES, HUGE_BYTES)  # less than a huge page is left
        if is_gathered:
            mapped = re.search(
                r"memfd:gathered.*\n(?:.*\n)*?ShmemPmdMapped: *(\d+)", Path("/proc/self/smaps").read_text()
            )
            assert mapped is not None
            assert int(mapped[1]) == 3 * HUGE_BYTES >> 10
    finally:
        made.close()


def test_a_backing_of_the_shared_index_can_be_gathered() -> None:
    backing = open_backing("memory", 2 * HUGE_BYTES)
    try:
        backing.memory[:5] = b"bytes"
        assert backing.gather(0, HUGE_BYTES) in (True, False)  # as the kernel has pages
        assert bytes(backing.memory[:6]) == b"bytes\0"
    finally:
        backing.close()
