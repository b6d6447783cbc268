"""A hot file, and what is staged beside it, against one array of bytes; mappings write past both."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings, strategies as st

from fuse.hot import memory_files
from fuse.hot.hot_file import HotFile
from fuse.hot.memory_files import MemoryFiles
from lakefs.limits import GRANULE_BYTES

SIZE: Final = 3 * GRANULE_BYTES + 1000
PLACES: Final = st.one_of(
    st.integers(0, SIZE + GRANULE_BYTES),
    st.sampled_from(
        [0, 1, GRANULE_BYTES - 1, GRANULE_BYTES, 2 * GRANULE_BYTES + 1, SIZE - 1, SIZE, 20 * GRANULE_BYTES]
    ),
)
LENGTHS: Final = st.one_of(st.integers(0, 5000), st.just(GRANULE_BYTES), st.just(2 * GRANULE_BYTES + 3))
STEPS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PLACES, LENGTHS),
        st.tuples(st.just("truncate"), PLACES, st.just(0)),
        st.tuples(st.just("map"), PLACES, LENGTHS),
        st.tuples(st.just("take over"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def files() -> Iterator[MemoryFiles]:
    try:
        made = MemoryFiles(64 << 20)
    except OSError as error:
        pytest.skip(f"this user may not make a file system: {error.strerror}")
    yield made
    made.close()


class Staged:
    """Content as the mount stages it: only what it was given."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write, with zeros between."""
        end = offset + len(data)
        self.content.extend(bytes(max(0, end - len(self.content))))
        self.content[offset:end] = data

    def truncate(self, size: int) -> None:
        """Cut, or append zeros."""
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))


def filled(files: MemoryFiles, content: bytes) -> HotFile:
    """Return a hot file with this content."""
    hot = HotFile(b"blob", files.new())
    hot.begin_filling(len(content))
    for at in range(0, len(content), GRANULE_BYTES):
        hot.add(content[at : at + GRANULE_BYTES])
    hot.end_filling()
    return hot


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, seed=st.integers(1, 255))
def test_what_is_staged_and_what_readers_see_is_the_same(
    files: MemoryFiles, steps: list[tuple[str, int, int]], seed: int
) -> None:
    content = bytes(range(256)) * (SIZE // 256 + 1)
    hot = filled(files, content[:SIZE])
    hot.may_be_mapped = True
    model, staged = Staged(content[:SIZE]), Staged(content[:SIZE])
    try:
        for number, (step, offset, length) in enumerate(steps):
            data = bytes([(seed + number) % 256]) * length
            if step == "write" and length:
                hot.write(offset, data, staged.write)
                model.write(offset, data)
            elif step == "truncate":
                hot.truncate(offset, staged.write, staged.truncate)
                model.truncate(offset)
            elif step == "map":
                end = min(offset + length, len(model.content))
                if offset < end:
                    _write_mapped(hot, offset, data[: end - offset], len(model.content))
                    model.write(offset, data[: end - offset])
            else:
                hot.take_over(hot.differing(), staged.write)
                assert staged.content == model.content
            assert hot.read(0, 30 * GRANULE_BYTES) == model.content
        hot.take_over(hot.differing(), staged.write)
        assert staged.content == model.content
        assert hot.differing() == []
        assert hot.size == len(model.content)
    finally:
        hot.close()


def _write_mapped(hot: HotFile, offset: int, data: bytes, size: int) -> None:
    descriptor = os.open(f"/proc/self/fd/{hot.descriptor}", os.O_RDWR)
    with mmap.mmap(descriptor, size) as memory:
        memory[offset : offset + len(data)] = data
    os.close(descriptor)


def test_a_flipped_byte_and_a_lost_end_are_seen(files: MemoryFiles) -> None:
    hot = filled(files, os.urandom(SIZE))
    assert hot.differing() == []
    _write_mapped(hot, 2 * GRANULE_BYTES + 5, b"?" if hot.read(2 * GRANULE_BYTES + 5, 1) != b"?" else b"!", SIZE)
    assert hot.differing() == [2]
    os.truncate(f"/proc/self/fd/{hot.descriptor}", SIZE - 1)
    assert hot.differing() == [2, 3]
    hot.close()


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"mine"], [b"theirs", b""], [b"theirs", b"mine"]])
def test_an_end_is_replaced_by_parts_of_which_some_may_be_empty(files: MemoryFiles, parts: list[bytes]) -> None:
    content = b"a" * (GRANULE_BYTES + 100)
    hot = filled(files, content)
    try:
        assert hot.replace_end(len(content), parts)
        assert hot.read(0, 2 * GRANULE_BYTES) == content + b"".join(parts)
        assert hot.differing() == []
    finally:
        hot.close()


def test_a_write_without_room_changes_nothing(files: MemoryFiles) -> None:
    hot, staged = filled(files, b"x" * SIZE), Staged(b"x" * SIZE)
    with pytest.raises(OSError, match="No space"):
        hot.write(100, bytes(65 << 20), staged.write)
    assert hot.read(0, 2 * SIZE) == staged.content == b"x" * SIZE
    assert not hot.is_written
    hot.close()


def test_a_refused_stage_leaves_the_hot_file_as_it_was(files: MemoryFiles) -> None:
    hot = filled(files, b"x" * SIZE)

    def refuse(*_: object) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        hot.write(SIZE, b"more", refuse)
    with pytest.raises(OSError, match="full"):
        hot.truncate(5, refuse, refuse)
    assert hot.read(0, 2 * SIZE) == b"x" * SIZE
    assert hot.differing() == []
    hot.close()


@pytest.mark.parametrize(
    ("flags", "access", "is_writable"),
    [(os.O_RDONLY, mmap.PROT_READ, False), (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE, True)],
)
def test_the_kernel_tells_who_else_uses_it_until_the_last_mapping_ends(
    files: MemoryFiles, flags: int, access: int, is_writable: bool
) -> None:
    hot = filled(files, bytes(SIZE))
    hot.may_be_mapped = True
    assert not hot.is_in_use()
    assert not hot.is_mapped_for_writing()
    descriptor = os.open(f"/proc/self/fd/{hot.descriptor}", flags)
    memory = mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, access)
    os.close(descriptor)
    assert hot.is_in_use()
    assert hot.is_mapped_for_writing() is is_writable
    memory.close()
    assert not hot.is_in_use()
    assert not hot.is_mapped_for_writing()
    hot.close()


def test_a_write_does_not_count_as_use_by_others(files: MemoryFiles) -> None:
    hot, staged = filled(files, bytes(SIZE)), Staged(bytes(SIZE))
    hot.write(0, b"own", staged.write)
    assert not hot.is_in_use()
    hot.close()


def test_the_file_system_is_in_no_table_of_mounts_and_ends_with_its_files(files: MemoryFiles) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    more = MemoryFiles(1 << 20)
    descriptor = more.new()
    os.write(descriptor, b"kept")
    more.close()
    assert os.pread(descriptor, 9, 0) == b"kept"
    assert os.fstat(descriptor).st_nlink == 0
    assert Path("/proc/self/mountinfo").read_text() == before
    os.close(descriptor)


def test_its_room_is_bounded_and_reserving_is_all_or_nothing(files: MemoryFiles) -> None:
    small = MemoryFiles(4 << 20)
    descriptor = small.new()
    reserve: Callable[[int, int, int], None] = memory_files.reserve
    reserve(descriptor, 0, 1 << 20)
    assert os.fstat(descriptor).st_size == 0
    with pytest.raises(OSError, match="No space"):
        reserve(descriptor, 0, 64 << 20)
    reserve(descriptor, 0, 2 << 20)
    os.close(descriptor)
    small.close()
