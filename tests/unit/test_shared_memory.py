"""Shared memory: its room is given out once, its length is fixed, and views outlive it."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import pytest

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.limits import PAGE_BYTES
from lakefs.shared_memory import SharedMemory, Slot
from tests.descriptors import descriptor_count


def test_room_is_given_out_once_and_all_of_it_comes_back() -> None:
    rng = random.Random(7)
    memory = SharedMemory(64 * PAGE_BYTES)
    held: list[Slot] = []
    refused = 0
    for step in range(2000):
        if held and rng.random() < 0.45:
            slot = held.pop(rng.randrange(len(held)))
            assert bytes(slot.buffer) == bytes([slot.length % 251]) * slot.length, "another wrote there"
            slot.release()
            slot.release()
            continue
        try:
            slot = memory.allocate(rng.choice((0, 1, PAGE_BYTES, 3 * PAGE_BYTES, 10 * PAGE_BYTES + step % 9)))
        except InvalidArgument:
            refused += 1
            continue
        assert slot.offset % PAGE_BYTES == 0
        slot.buffer[:] = bytes([slot.length % 251]) * slot.length
        held.append(slot)
    assert refused
    for slot in held:
        slot.release()
    with memory.allocate(64 * PAGE_BYTES) as whole:
        assert len(whole) == 64 * PAGE_BYTES
    memory.close()


def test_memory_neither_shrinks_nor_grows_and_has_its_pages() -> None:
    memory = SharedMemory(10 * PAGE_BYTES + 1)
    assert memory.size_bytes == len(memory.buffer) == 11 * PAGE_BYTES
    assert os.fstat(memory.descriptor).st_blocks * 512 == 11 * PAGE_BYTES
    for size in (0, PAGE_BYTES, 12 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
    memory.close()
    memory.close()


def test_slots_are_filled_by_arrays_and_arrays_outlive_the_memory() -> None:
    memory = SharedMemory(PAGE_BYTES)
    slot = memory.slot(8, 80)
    array: Any = numpy.frombuffer(slot.buffer, dtype="float64")
    array[:] = range(10)
    assert bytes(memory.buffer[8:88]) == array.tobytes()
    memory.close()
    assert array.sum() == 45


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, PAGE_BYTES + 1), (PAGE_BYTES, 1), (5, -6)])
def test_a_slot_lies_inside_its_memory(offset: int, length: int) -> None:
    memory = SharedMemory(PAGE_BYTES)
    with pytest.raises(InvalidArgument):
        memory.slot(offset, length)
    memory.close()


@pytest.mark.parametrize("size", [0, -1, 1 << 62])
def test_memory_of_no_length_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgument):
        SharedMemory(size)


def test_memory_that_is_not_to_be_had_is_an_error_and_no_signal() -> None:
    before = descriptor_count()
    with pytest.raises(LocalFileError, match="the machine has less"):
        SharedMemory(1 << 50)
    assert descriptor_count() == before
