"""CRC32C of granules: the native calls and their twins give the same, of memory and of what is read into it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.format._granules import copy_granules, granule_crcs, granule_crcs_by_tables, read_granules
from engine.format.checksums import vector_of
from lakefs.limits import GRANULE_BYTES, MIB
from tests.oracles.granules import twin_granule_crcs, twin_read_granules

KINDS = [(twin_granule_crcs, twin_read_granules), (granule_crcs, read_granules)]
LENGTHS = [0, 1, 7, 8, 4093, 65_535, 65_536, 65_537, 3 * 65_536, 4 * 65_536, 9 * 65_536 + 5, MIB, 3 * MIB - 1]


@contextmanager
def memory_with(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("granules", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("where", [0, 3])
def test_the_checksums_of_memory_are_the_twins(length: int, where: int) -> None:
    content = random.Random(length).randbytes(where + length)
    wanted = twin_granule_crcs(content[where:])
    assert len(wanted) == 4 * -(-length // GRANULE_BYTES)
    assert granule_crcs(memoryview(content)[where:]) == wanted
    assert granule_crcs_by_tables(memoryview(content)[where:]) == wanted
    assert vector_of(bytearray(content)[where:]) == wanted


def test_checksums_are_the_twins_at_every_length_at_which_the_way_to_compute_them_changes() -> None:
    content = memoryview(random.Random(2).randbytes(4 * GRANULE_BYTES + 20))
    for parts in (0, 3 * 256, 3 * 2048, 3 * 21840, 3 * (21840 + 2048 + 256), GRANULE_BYTES, 4 * GRANULE_BYTES):
        for length in range(max(0, parts - 20), parts + 20):
            wanted = twin_granule_crcs(content[:length])
            assert granule_crcs(content[:length]) == wanted
            assert granule_crcs_by_tables(content[:length]) == wanted


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("where", [0, 3])
def test_a_copy_is_the_bytes_and_its_checksums_are_the_twins(length: int, where: int) -> None:
    content = random.Random(length).randbytes(where + length)
    target = bytearray(length + 2 * where + 1)
    assert copy_granules(memoryview(content)[where:], memoryview(target)[where:]) == twin_granule_crcs(content[where:])
    assert target[where : where + length] == content[where:]
    assert not any(target[:where])
    assert not any(target[where + length :]), "nothing behind the end is touched"
    if length:
        with pytest.raises(ValueError, match="shorter"):
            copy_granules(content, memoryview(target)[: where + length - 1])


def test_checksums_of_a_copy_are_its_own_whoever_writes_to_the_source_meanwhile() -> None:
    source, target = bytearray(8 * MIB), memoryview(bytearray(8 * MIB))
    noise, is_done = random.Random(4).randbytes(1 << 16), threading.Event()

    def write() -> None:
        at = 0
        while not is_done.is_set():
            at = (at + len(noise) + 8) % (len(source) - len(noise))
            source[at : at + len(noise)] = noise if source[at + 1] != noise[1] else bytes(len(noise))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(200):
            crcs = copy_granules(source, target)
            assert crcs == granule_crcs(target)
            seen.add(crcs)
    finally:
        is_done.set()
        writer.join()
    assert len(seen) > 10, "the source changed"


def test_a_bit_that_turns_over_is_seen_in_its_granule_only() -> None:
    content = bytearray(random.Random(1).randbytes(6 * GRANULE_BYTES + 100))
    before = granule_crcs(content)
    for granule in range(7):
        content[granule * GRANULE_BYTES + 99] ^= 4
        after = granule_crcs(content)
        content[granule * GRANULE_BYTES + 99] ^= 4
        assert [at // 4 for at in range(0, 28, 4) if before[at : at + 4] != after[at : at + 4]] == [granule]


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_read_is_what_lies_there_with_its_checksums(length: int) -> None:
    content = random.Random(length).randbytes(length + 5000)
    with memory_with(content) as descriptor:
        for _, read in KINDS:
            target = memoryview(bytearray(length + 1))
            crcs = read(descriptor, 4999, target[:length])
            assert target[:length] == content[4999 : 4999 + length]
            assert target[length] == 0, "nothing behind the end is touched"
            assert crcs == twin_granule_crcs(target[:length])


def test_a_file_that_ends_before_is_an_error_and_so_is_what_cannot_be_read() -> None:
    with memory_with(b"a" * 300_000) as descriptor:
        for _, read in KINDS:
            with pytest.raises(EOFError):
                read(descriptor, 1, memoryview(bytearray(300_000)))
            with pytest.raises(OSError, match="Invalid argument"):
                read(descriptor, -2, memoryview(bytearray(10)))
            with pytest.raises(OSError, match="Bad file descriptor"):
                read(-1, 0, memoryview(bytearray(10)))


def test_memory_that_is_not_to_be_written_stays_as_it_is() -> None:
    with memory_with(b"a" * 10) as descriptor:
        for _, read in KINDS:
            target = bytes(10)
            with pytest.raises((TypeError, ValueError, BufferError, OSError)):
                read(descriptor, 0, memoryview(target))
            assert target == bytes(10)
