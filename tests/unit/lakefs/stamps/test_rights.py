"""Stamps whose right has an end: they stand only while it lasts, and a reader looks at the end before it compares."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given, strategies as st

from engine.format.layouts import Op, Table
from engine.memory.sealed_memory import SealedMemory
from lakefs.stamps.stamps import STAMP, StampMemory, StampReader, memory_bytes

COUNT: Final = 1 << 14
TABLES: Final = (Table.NAMES,)
NO_RIGHT: Final = 1
LONG_NS: Final = 60_000_000_000
BASE: Final = 3 << 40
TURNS: Final = 200


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    made = SealedMemory("stamps", memory_bytes(COUNT))
    yield made
    made.close()


@pytest.fixture
def repeated(memory: SealedMemory) -> Iterator[StampMemory]:
    """Return the stamps of a head."""
    made = StampMemory(memory.view)
    made.begin(has_end=True)
    yield made
    made.end()


@pytest.fixture
def leader() -> Iterator[StampMemory]:
    """Return the counters of a leader."""
    memory = SealedMemory("counters", memory_bytes(COUNT))
    yield StampMemory(memory.view, TABLES)
    memory.close()


def bits() -> bytearray:
    return bytearray(COUNT // 8)


def change(leader: StampMemory, key: bytes, *noted: bytearray) -> dict[int, list[int]]:
    return leader.turn_noted([(Op.PUT, Table.NAMES, key, b"value")], list(noted))


def test_a_set_stands_only_while_the_right_lasts(memory: SealedMemory, repeated: StampMemory) -> None:
    reader, slots = StampReader(memory.descriptor), STAMP.pack(7, 0)
    assert reader.is_live
    assert repeated.right_end_ns == NO_RIGHT
    assert not reader.stand(slots)
    repeated.right_end_ns = now_ns() + LONG_NS
    assert reader.stand(slots)
    repeated.right_end_ns = now_ns()
    assert not reader.stand(slots)
    repeated.right_end_ns = now_ns() + 20_000_000
    assert reader.stand(slots)
    time.sleep(0.03)
    assert not reader.stand(slots)
    repeated.right_end_ns = now_ns() + LONG_NS
    repeated.raise_to(STAMP.pack(7, 1))
    assert not reader.stand(slots)


def test_stamps_of_one_engine_have_no_end(memory: SealedMemory) -> None:
    stamps = StampMemory(memory.view, TABLES)
    stamps.begin()
    assert stamps.right_end_ns == 0
    assert StampReader(memory.descriptor).stand(stamps.of([(Table.NAMES, b"a")]))
    with pytest.raises(ValueError, match="is not 0"):
        stamps.right_end_ns = 0
    stamps.end()


def test_an_older_reader_refuses_stamps_whose_right_ends(memory: SealedMemory, repeated: StampMemory) -> None:
    assert repeated.is_live
    assert int.from_bytes(memory.view[8:12], "little") == 2  # it knows version 1 alone, which says nothing of an end


def test_a_reader_that_is_amid_its_comparison_uses_no_right_that_follows_a_turn(
    memory: SealedMemory, repeated: StampMemory
) -> None:
    reader = StampReader(memory.descriptor)
    everything = b"".join(STAMP.pack(slot, slot == 0) for slot in range(COUNT))
    begin, begun = os.pipe()
    done, told = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            for number in range(1, TURNS):
                os.read(begin, 1)
                stop = time.perf_counter() + number % 20 * 2e-6
                while time.perf_counter() < stop:
                    pass
                repeated.raise_to(STAMP.pack(0, number + 1))
                repeated.right_end_ns = now_ns() + LONG_NS
                os.write(told, b".")
        finally:
            os._exit(0)
    os.set_blocking(done, False)
    try:
        repeated.raise_to(STAMP.pack(0, 1))
        for number in range(1, TURNS):
            before = STAMP.pack(0, number) + everything[STAMP.size :]
            repeated.right_end_ns = NO_RIGHT
            os.write(begun, b".")
            is_done = False
            while not is_done:
                assert not reader.stand(before), "it was turned before the right began"
                try:
                    is_done = bool(os.read(done, 1))
                except BlockingIOError:
                    continue
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        for descriptor in (begin, begun, done, told):
            os.close(descriptor)


def test_who_was_sent_a_stamp_hears_of_its_first_turn(leader: StampMemory) -> None:
    first, second = bits(), bits()
    found = leader.of([(Table.NAMES, b"a"), (Table.NAMES, b"b")], BASE, second)
    slots = [slot for slot, _ in STAMP.iter_unpack(found)]
    assert [value for _, value in STAMP.iter_unpack(found)] == [BASE, BASE]
    assert change(leader, b"a", first, second) == {1: slots[:1]}
    assert change(leader, b"a", first, second) == {}
    assert leader.pack(slots, BASE) == STAMP.pack(slots[0], BASE + 2) + STAMP.pack(slots[1], BASE)
    leader.of([(Table.NAMES, b"a")], BASE, first)
    assert change(leader, b"a", first, second) == {0: slots[:1]}
    assert change(leader, b"b", first, second) == {1: slots[1:]}
    assert (first, second) == (bits(), bits())


def test_a_set_that_is_too_large_notes_nothing(leader: StampMemory) -> None:
    noted = bits()
    assert leader.of([(Table.NAMES, b"%d" % number) for number in range(33)], BASE, noted) == b""
    assert noted == bits()


@given(st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 1 << 50)), max_size=40))
def test_counters_of_a_head_only_grow(raised: list[tuple[int, int]]) -> None:
    memory = SealedMemory("stamps", memory_bytes(COUNT))
    repeated, expected = StampMemory(memory.view), dict[int, int]()
    for slot, value in raised:
        repeated.raise_to(STAMP.pack(slot, value))
        expected[slot] = max(value, expected.get(slot, 0))
        assert repeated.read([slot]) == [expected[slot]]
    repeated.raise_all(BASE)
    assert set(repeated.read(range(COUNT))) == {BASE} | {value for value in expected.values() if value > BASE}
    memory.close()


def test_what_is_no_set_raises_nothing(leader: StampMemory) -> None:
    for bad in (b"1", STAMP.pack(COUNT, 1)):
        with pytest.raises(ValueError, match=r"set of stamps|no such slot"):
            leader.raise_to(bad)
    with pytest.raises(ValueError, match="no such slot"):
        leader.pack([COUNT])
    with pytest.raises(ValueError, match="a bit for each slot"):
        leader.of([(Table.NAMES, b"a")], 0, bytearray(COUNT // 8 - 1))
    with pytest.raises(ValueError, match="a bit for each slot"):
        change(leader, b"a", bits()[1:])


# --- counters that are sums of parts -------------------------------------------------------------------

Steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=60)


@given(Steps)
def test_a_translated_set_stands_while_no_part_of_its_slots_is_raised(steps: list[tuple[int, int, int]]) -> None:
    stamps = StampMemory(mmap.mmap(-1, memory_bytes(4)))
    stamps.raise_to(STAMP.pack(2, 5))
    parts = [stamps.parts(), bytearray(32), bytearray(32)]
    values = [{2: 5}, {}, {}]
    answers: list[tuple[bytes, int, int]] = []
    for index, slot, value in steps:
        translated = stamps.raise_part(parts[index], STAMP.pack(slot, value))
        is_newest = value >= values[index].get(slot, 0)
        for known, of_slot, _ in answers:
            if of_slot == slot and value > values[index].get(slot, 0):
                assert STAMP.unpack(known)[1] < stamps.read([slot])[0], "it does not stand, and never will"
        values[index][slot] = max(value, values[index].get(slot, 0))
        (now,) = stamps.read([slot])
        assert now == sum(each.get(slot, 0) for each in values)
        assert (STAMP.unpack(translated) == (slot, now)) == is_newest
        answers.append((translated, slot, index))
    stamps.raise_whole_part(parts[1], BASE)
    assert stamps.read([0]) == [BASE + values[0].get(0, 0) + values[2].get(0, 0)]


def test_a_part_has_a_number_for_each_slot(repeated: StampMemory) -> None:
    for part in (bytearray(8 * COUNT - 1), bytearray()):
        with pytest.raises(ValueError, match="a number for each slot"):
            repeated.raise_part(part, b"")
        with pytest.raises(ValueError, match="a number for each slot"):
            repeated.raise_whole_part(part, 1)
    with pytest.raises(ValueError, match="no such slot"):
        repeated.raise_part(repeated.parts(), STAMP.pack(COUNT, 1))
    with pytest.raises(ValueError, match="a set of stamps"):
        repeated.raise_part(repeated.parts(), b"x")
    repeated.right_end_ns = now_ns() + LONG_NS
    repeated.withdraw()
    assert repeated.right_end_ns == NO_RIGHT
