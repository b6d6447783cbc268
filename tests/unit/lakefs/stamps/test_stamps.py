"""Stamps: what stands, what turns, and which memory is refused."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given, strategies as st

from engine.format.layouts import Op, Table
from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.limits import STAMPS_PER_ANSWER_MAX
from lakefs.stamps.stamps import HEADER_BYTES, STAMP, StampMemory, StampReader, memory_bytes

COUNT: Final = 1 << 12
TABLES: Final = (Table.NAMES, Table.NODES)


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    made = SealedMemory("stamps", memory_bytes(COUNT))
    yield made
    made.close()


@pytest.fixture
def stamps(memory: SealedMemory) -> Iterator[StampMemory]:
    made = StampMemory(memory.view, TABLES)
    made.begin()
    yield made
    made.end()


def _slots(stamps: bytes) -> list[int]:
    return [slot for slot, _ in STAMP.iter_unpack(stamps)]


def _change(stamps: StampMemory, *records: tuple[Table, bytes]) -> None:
    stamps.turn([(Op.PUT, table, key, b"value") for table, key in records])


def _key_elsewhere(stamps: StampMemory, taken: bytes, table: Table = Table.NAMES) -> bytes:
    """Return a key of a record that shares no stamp with the set."""
    keys = (b"key %d" % number for number in range(100))
    return next(key for key in keys if not set(_slots(stamps.of([(table, key)]))) & set(_slots(taken)))


# --- what stands ---------------------------------------------------------------------------------------


def test_a_set_stands_until_one_of_its_records_changes(memory: SealedMemory, stamps: StampMemory) -> None:
    reader = StampReader(memory.descriptor)
    found = stamps.of([(Table.NAMES, b"a"), (Table.NODES, b"b")])
    assert len(found) == 2 * STAMP.size
    assert reader.stand(found)
    _change(stamps, (Table.NAMES, _key_elsewhere(stamps, found)))
    assert reader.stand(found)
    _change(stamps, (Table.NODES, b"b"))
    assert not reader.stand(found)
    assert reader.stand(stamps.of([(Table.NAMES, b"a"), (Table.NODES, b"b")]))


def test_one_key_in_two_tables_is_two_records(stamps: StampMemory) -> None:
    found = stamps.of([(Table.NAMES, b"a")])
    assert _slots(found) != _slots(stamps.of([(Table.NODES, b"a")]))
    _change(stamps, (Table.NODES, b"a"))
    assert stamps.stand(found)


def test_a_table_is_the_same_whether_it_is_named_or_numbered(stamps: StampMemory) -> None:
    assert stamps.of([(Table.NAMES, b"a")]) == stamps.of([(int(Table.NAMES), b"a")])


def test_records_of_other_tables_turn_nothing(stamps: StampMemory) -> None:
    before = stamps.read(range(COUNT))
    _change(stamps, *[(Table.CHUNKS, b"%d" % number) for number in range(1000)])
    assert stamps.read(range(COUNT)) == before


def test_a_record_that_is_read_twice_has_one_stamp(stamps: StampMemory) -> None:
    assert len(stamps.of([(Table.NAMES, b"a"), (Table.NAMES, b"a")])) == STAMP.size


def test_an_answer_from_nothing_or_too_much_has_no_set(stamps: StampMemory) -> None:
    many = [(Table.NAMES, b"%d" % number) for number in range(STAMPS_PER_ANSWER_MAX + 1)]
    assert stamps.of([]) == b""
    assert stamps.of(many) == b""
    assert stamps.stand(stamps.of(many[1:]))


def test_all_stamps_turn_at_once(stamps: StampMemory) -> None:
    sets = [stamps.of([(Table.NAMES, b"%d" % number)]) for number in range(100)]
    stamps.turn_all()
    assert not any(map(stamps.stand, sets))


def test_what_is_no_set_does_not_stand(stamps: StampMemory) -> None:
    good = stamps.of([(Table.NAMES, b"a")])
    slot, value = STAMP.unpack(good)
    for bad in (
        b"",
        good[:-1],
        good + b"\0",
        STAMP.pack(slot, value + 1),
        STAMP.pack(COUNT, value),
        STAMP.pack(0xFFFF_FFFF, 0),
        good + STAMP.pack(slot, value + 1),
    ):
        assert not stamps.stand(bad)


def test_slots_are_spread_over_all_stamps(stamps: StampMemory) -> None:
    taken = {slot for number in range(8 * COUNT) for slot in _slots(stamps.of([(Table.NAMES, b"%d" % number)]))}
    assert len(taken) > 0.99 * COUNT


def test_a_counter_is_read_by_its_slot(stamps: StampMemory) -> None:
    [slot] = _slots(stamps.of([(Table.NAMES, b"a")]))
    _change(stamps, (Table.NAMES, b"a"), (Table.NAMES, b"a"))
    assert stamps.read([slot]) == [2]
    with pytest.raises(ValueError, match="no such slot"):
        stamps.read([COUNT])


# --- memory --------------------------------------------------------------------------------------------


def test_stamps_that_have_not_begun_or_have_ended_do_not_stand(memory: SealedMemory) -> None:
    stamps = StampMemory(memory.view, TABLES)
    found = stamps.of([(Table.NAMES, b"a")])
    assert not stamps.stand(found)
    stamps.begin()
    reader = StampReader(memory.descriptor)
    assert (reader.is_live, reader.stand(found)) == (True, True)
    stamps.end()
    assert (reader.is_live, reader.stand(found)) == (False, False)
    stamps.end()


def test_a_reader_of_stamps_that_have_ended_finds_them_ended(memory: SealedMemory, stamps: StampMemory) -> None:
    stamps.end()
    assert not StampReader(memory.descriptor).is_live


def test_a_reader_outlives_its_descriptor_and_the_engine_s_memory(memory: SealedMemory, stamps: StampMemory) -> None:
    lent = os.dup(memory.descriptor)
    reader = StampReader(lent)
    os.close(lent)
    found = stamps.of([(Table.NAMES, b"a")])
    assert reader.stand(found)


def test_stamps_begin_once_and_in_writable_memory(memory: SealedMemory, stamps: StampMemory) -> None:
    with pytest.raises(ValueError, match="begin once"):
        stamps.begin()
    reading = StampMemory(memory.view.toreadonly())
    for change in (reading.begin, reading.turn_all, lambda: reading.turn([])):
        with pytest.raises(ValueError, match=r"begin once|turned by the engine"):
            change()
    reading.end()
    assert stamps.is_live


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"LAKEHOTI"), (8, struct.pack("<I", 3)), (16, struct.pack("<Q", 2 * COUNT)), (16, struct.pack("<Q", 3))],
    ids=["magic", "version", "more than it has", "no power of two"],
)
def test_memory_with_another_header_is_refused(
    memory: SealedMemory, stamps: StampMemory, offset: int, value: bytes
) -> None:
    memory.view[offset : offset + len(value)] = value
    with pytest.raises(StoreDamaged, match="cannot be mapped"):
        StampReader(memory.descriptor)


@pytest.mark.parametrize("length", [0, 64, HEADER_BYTES, HEADER_BYTES + 8, HEADER_BYTES + 24])
def test_memory_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="stamps"):
        StampMemory(memoryview(bytearray(length)))


def test_memory_that_begins_at_no_cache_line_is_refused(memory: SealedMemory) -> None:
    with pytest.raises(ValueError, match="no cache line"):
        StampMemory(memory.view[8:])


@given(st.binary(max_size=48), st.integers(0, 68), st.lists(st.tuples(st.integers(0, 0xFFFF_FFFF), st.integers(0, 9))))
def test_nothing_stands_in_odd_memory_and_no_set_is_read_outside_it(
    odd: bytes, offset: int, stamps: list[tuple[int, int]]
) -> None:
    with mmap.mmap(-1, memory_bytes(64)) as memory:
        begun = StampMemory(memoryview(memory))
        begun.begin()
        header = memory[:HEADER_BYTES]
        memory[offset : offset + len(odd)] = odd
        try:
            reader = StampMemory(memoryview(memory).toreadonly())
        except ValueError:
            assert memory[:24] != header[:24]
        else:
            expected = bool(stamps) and all(slot < 64 and not value for slot, value in stamps)
            assert reader.stand(b"".join(STAMP.pack(*stamp) for stamp in stamps)) == (expected and reader.is_live)
            del reader
        memory[:HEADER_BYTES] = header
        begun.end()
        del begun


def test_memory_that_its_owner_can_cut_is_not_mapped(memory: SealedMemory, stamps: StampMemory) -> None:
    descriptor = os.memfd_create("cuttable", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, memory.view)
        with pytest.raises(PermissionDenied, match="could be cut"):
            StampReader(descriptor)
    finally:
        os.close(descriptor)


def test_native_modules_get_memory_that_lives_as_long_as_their_capsule(
    memory: SealedMemory, stamps: StampMemory
) -> None:
    reader = StampReader(memory.descriptor)
    capsule = reader.native
    del reader
    gc.collect()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address, count = struct.unpack("QQ", ctypes.string_at(get(capsule, b"lake_stamps"), 16))
    assert count == COUNT
    assert ctypes.string_at(address, 8) == b"LAKESTMP"
    del capsule
    gc.collect()
    assert str(os.fstat(memory.descriptor).st_ino) in _inodes_mapped()  # the engine's mapping


def _inodes_mapped() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split()[4] for line in maps]
