"""Shared memory: its room is handed out once, its length is fixed, and views outlive it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from lakefs.errors import InvalidArgument, LocalFileError
from lakefs.get.pools import Pool
from lakefs.limits import LENT_MEMORY_BYTES_MAX, PAGE_BYTES
from lakefs.put.shared_memory import SharedMemory, Slot
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


def test_memory_that_is_not_to_be_had_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptor_count()
    monkeypatch.setattr("lakefs.host.new_memory.os.sysconf", lambda name: 1)
    with pytest.raises(LocalFileError, match="the machine has less"):
        SharedMemory(PAGE_BYTES)
    assert descriptor_count() == before


@pytest.mark.parametrize("make", [SharedMemory, lambda size: Pool(size_bytes=size)], ids=["shared", "pool"])
def test_memory_that_no_engine_takes_is_refused_before_it_is_made(make: Callable[[int], object]) -> None:
    before = descriptor_count()
    for size in (300 << 30, LENT_MEMORY_BYTES_MAX + 1, 1 << 60):
        with pytest.raises(InvalidArgument, match=r"can never be lent.*at most 256 GiB"):
            make(size)
    assert descriptor_count() == before


def test_a_pool_of_memory_that_no_engine_takes_whole_takes_a_part_of_it() -> None:
    memory = os.memfd_create("of a client", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, 300 << 30)
        with pytest.raises(InvalidArgument, match="can never be lent"):
            Pool(descriptor=memory)
        pool = Pool(descriptor=memory, size_bytes=1 << 20)
        assert pool.size_bytes == 1 << 20
        pool.close()
    finally:
        os.close(memory)
