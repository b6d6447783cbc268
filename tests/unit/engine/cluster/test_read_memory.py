"""Memory for chunks that are read: used again when its last view is gone, and not before."""

from __future__ import annotations

import ctypes
import threading

import pytest

from engine.members.read_memory import KEPT_FROM_BYTES, ReadMemory
from lakefs.limits import CHUNK_BYTES, MIB


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("size_bytes", [1, KEPT_FROM_BYTES - 1, KEPT_FROM_BYTES, MIB + 1, CHUNK_BYTES])
def test_memory_is_as_long_as_asked_for_and_may_be_written(size_bytes: int) -> None:
    view = ReadMemory().take(size_bytes)
    assert (len(view), view.format, view.readonly, view.c_contiguous) == (size_bytes, "B", False, True)
    assert len(memoryview(view.obj)) == size_bytes, "who keeps it keeps no memory of others"
    view[:] = bytes([7]) * size_bytes
    assert bytes(view[-1:]) == b"\7"


def test_memory_is_used_again_when_its_last_part_is_gone() -> None:
    memory = ReadMemory()
    first = memory.take(MIB)
    at, part = address_of(first), first[10:20]
    del first
    second = memory.take(MIB)
    assert address_of(second) != at, "a part of the first is still used"
    del part
    third = memory.take(MIB - 1)
    assert address_of(third) == at
    assert memory.kept_bytes == 0


def test_no_more_is_kept_than_the_bound() -> None:
    memory = ReadMemory(kept_bytes=3 * MIB)
    views = [memory.take(MIB) for _ in range(5)]
    assert memory.kept_bytes == 0
    views.clear()
    assert memory.kept_bytes == 3 * MIB
    views = [memory.take(MIB) for _ in range(2)]
    assert memory.kept_bytes == MIB


def test_views_that_are_dropped_in_other_threads_are_used_again() -> None:
    memory = ReadMemory(kept_bytes=16 * MIB)
    for _ in range(20):
        views = [memory.take(MIB) for _ in range(8)]
        assert len({address_of(view) for view in views}) == 8
        threads = [threading.Thread(target=views.pop) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert memory.kept_bytes <= 16 * MIB


def test_blocks_past_the_bound_are_used_again_without_their_pages() -> None:
    memory = ReadMemory(kept_bytes=MIB, size_bytes=4 * MIB)
    views = [memory.take(MIB) for _ in range(4)]
    for view in views:
        view[:] = bytes([7]) * MIB
    del view
    assert memory.offsets_of(views) == [0, MIB, 2 * MIB, 3 * MIB]
    views.clear()
    assert memory.kept_bytes == MIB
    views = [memory.take(MIB) for _ in range(4)]
    assert sorted(memory.offsets_of(views) or ()) == [0, MIB, 2 * MIB, 3 * MIB]
    assert sorted(view[0] for view in views) == [0, 0, 0, 7]


def test_without_a_free_block_memory_lies_elsewhere() -> None:
    memory = ReadMemory(size_bytes=MIB)
    inside, outside = memory.take(MIB), memory.take(MIB)
    assert memory.offsets_of([inside[5:9]]) == [5]
    assert memory.offsets_of([outside]) is None
    assert memory.offsets_of([inside, outside]) is None
    assert memory.offsets_of([memory.take(100)]) is None
    outside[:] = bytes(MIB)


def test_retired_memory_is_never_used_again() -> None:
    memory = ReadMemory(size_bytes=2 * MIB)
    view = memory.take(MIB)
    memory.retire([view[100:200], view[300:]])
    del view
    assert memory.kept_bytes == 0
    views = [memory.take(MIB) for _ in range(3)]
    assert [memory.offsets_of([view]) for view in views] == [[MIB], None, None]
