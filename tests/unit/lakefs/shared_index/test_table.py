"""The shared index's table: native and oracle against a dict, each other, and beside a writer in another process."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from lakefs.errors import StoreDamaged
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import (
    DEAD,
    ENTRIES_OFFSET,
    ENTRY_BYTES,
    HEADER,
    PLACE,
    PROBE_SLOTS,
    SHIFT_SLOTS,
    STRIPES_OFFSET,
    Found,
    TableHeader,
    capacity_for,
    entries_max,
    table_bytes,
    unpack_header,
)
from lakefs.wire.grants import Grant
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT
from tests.oracles.shared_table import TwinTable, home_of, unpack_entry
from tests.shared_index_churn import CAPACITY, STEADY, key_at, place_of
from tests.style.source_tree import ROOT

Table = SharedTable | TwinTable
BOTH: Final[tuple[type[Table], ...]] = (SharedTable, TwinTable)
SMALL: Final = 1024


def _new(kind: type[Table], capacity: int = SMALL) -> tuple[Table, bytearray]:
    memory = bytearray(table_bytes(capacity))
    return kind(memory, capacity), memory


def _chunk(home: int, number: int, capacity: int = SMALL) -> bytes:
    """Return a chunk whose home is that slot."""
    head = (home << (65 - capacity.bit_length())) | number
    return bytes([1 + number % 2]) + head.to_bytes(8, "little") + number.to_bytes(24, "little")


# --- against a dict ------------------------------------------------------------------------------------

_CHUNKS: Final = st.builds(_chunk, st.sampled_from([0, 1, 2, 3, 500, 501, 1022, 1023]), st.integers(0, 40))
_PLACES: Final = st.tuples(
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
_STEPS: Final = st.one_of(
    st.tuples(st.just("put"), _CHUNKS, _PLACES),
    st.tuples(st.just("put"), _CHUNKS, _PLACES),
    st.tuples(st.just("remove"), _CHUNKS, st.none()),
    st.tuples(st.just("clear"), st.none(), st.none()),
)


@given(st.lists(_STEPS, max_size=120))
@settings(max_examples=60)
def test_both_tables_are_a_dict_that_may_refuse_and_hold_the_same_bytes(
    steps: list[tuple[str, bytes | None, tuple[int, int, int, int, int] | None]],
) -> None:
    (native, native_bytes), (twin, twin_bytes) = _new(SharedTable), _new(TwinTable)
    model: dict[bytes, Found] = {}
    for step, chunk, place in steps:
        if step == "clear":
            native.clear()
            twin.clear()
            model.clear()
        elif place is None:
            assert chunk is not None
            assert native.remove(chunk) == twin.remove(chunk) == (model.pop(chunk, None) is not None)
        else:
            assert chunk is not None
            taken = native.put(chunk, *place)
            assert taken == twin.put(chunk, *place)
            assert taken or chunk not in model
            if taken:
                model[chunk] = place
    assert native_bytes == twin_bytes
    asked = [_chunk(home, number) for home in (0, 1, 2, 500, 1023) for number in range(41)]
    for table in (native, twin):
        assert table.find_many(asked) == [model.get(chunk) for chunk in asked]
        packed = bytearray(len(asked) * PLACE.size)
        assert table.find_packed(asked, packed) == sum(chunk in model for chunk in asked)
        told = [(tier, *where) for *where, tier in PLACE.iter_unpack(packed)]
        assert told == [model.get(chunk, (0, 0, 0, 0, 0)) for chunk in asked]
        with pytest.raises(ValueError):
            table.find_packed(asked, packed[:-1])
        assert [table.find(chunk) for chunk in model] == list(model.values())
        assert table.count == len(model)
        assert table.audit()
        assert table.count == len(model)


_NUMBERS: Final = st.one_of(st.integers(0, 300), st.integers(0, 2**16 + 5), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("kind", BOTH)
@given(
    places=st.lists(st.tuples(st.integers(0, 2**64 - 1) | _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS), max_size=200),
    tier=st.sampled_from([MEDIUM_SEGMENT, MEDIUM_DRAM]),
    told=st.integers(0, 5),
)
@settings(max_examples=60)
def test_grants_are_packed_as_the_messages_are(
    kind: type[Table], places: list[tuple[int, int, int, int]], tier: int, told: int
) -> None:
    table, _ = _new(kind)
    chunks = [_chunk(number % 1000, number) for number in range(len(places))]
    for chunk, place in zip(chunks, places, strict=True):
        assert table.put(chunk, tier, *place)
    grants = [_grant((tier, *place)) for place in places]
    assert table.pack_grants(chunks) == (msgspec.msgpack.encode(grants), _shortest(grants))
    unknown = _chunk(1, 999)
    assert table.pack_grants([*chunks, unknown]) is None
    instead: list[Found | None] = [None] * len(chunks)
    for number in range(min(told, len(chunks))):
        instead[number] = (MEDIUM_SEGMENT, 2**63 + number, 2**31, 2**31 + told, 2**32 - 1)
        grants[number] = Grant(MEDIUM_SEGMENT, 2**63 + number, 2**31, 2**31 + told, 2**31 + told, 0, 2**32 - 1)
    assert table.pack_grants(chunks, instead) == (msgspec.msgpack.encode(grants), _shortest(grants))
    whole = table.pack_grants([*chunks, unknown], [*instead, (MEDIUM_DRAM, 2**64 - 1, 0, 0, 0)])
    assert whole == (msgspec.msgpack.encode([*grants, Grant(MEDIUM_DRAM, 2**16 - 1, epoch=2**48 - 1)]), 0)
    with pytest.raises(ValueError):
        table.pack_grants([*chunks, b"no id"])
    with pytest.raises(ValueError):
        table.pack_grants(chunks, [*instead, None])
    assert table.put(unknown, 200, 1, 1, 1, 1), "a tier that no grant tells"
    assert table.pack_grants([*chunks, unknown]) is None


def _grant(place: Found) -> Grant:
    tier, segment, offset, length, crc = place
    slab, generation = divmod(segment, 2**48) if tier == MEDIUM_DRAM else (segment, 0)
    return Grant(tier, slab, offset, length, length, 0, crc, generation)


def _shortest(grants: Sequence[Grant]) -> int:
    return min((grant.stored_bytes for grant in grants), default=2**32 - 1)


@pytest.mark.parametrize("kind", BOTH)
def test_a_table_takes_what_its_load_allows_and_counts_as_full_then(kind: type[Table]) -> None:
    table, _ = _new(kind)
    chooser = random.Random(1)
    chunks = [bytes([1]) + chooser.randbytes(32) for _ in range(SMALL)]
    taken = [table.put(chunk, 1, 2, 3, 4, 5) for chunk in chunks]
    assert sum(taken) == table.count == entries_max(SMALL)
    assert all(taken[: entries_max(SMALL)])
    assert [table.find(chunk) is not None for chunk in chunks] == taken
    assert table.put(chunks[0], 1, 9, 9, 9, 9), "a place can change in a full table"
    assert table.find(chunks[0]) == (1, 9, 9, 9, 9)


@pytest.mark.parametrize("kind", BOTH)
def test_chunks_made_to_crowd_one_home_are_not_taken_in_past_the_probe_and_harm_no_others(kind: type[Table]) -> None:
    table, _ = _new(kind)
    crowd = [_chunk(7, number) for number in range(PROBE_SLOTS + 10)]
    assert [table.put(chunk, 1, 0, 0, 0, 0) for chunk in crowd] == [True] * PROBE_SLOTS + [False] * 10
    assert table.put(_chunk(6, 1), 1, 0, 0, 0, 0)
    assert not table.put(_chunk(6, 2), 1, 0, 0, 0, 0), "it would push the last of the crowd out of sight"
    assert table.put(_chunk(7 + PROBE_SLOTS, 1), 1, 0, 0, 0, 0)
    assert table.audit()
    assert all(table.find(chunk) for chunk in crowd[:PROBE_SLOTS])


@pytest.mark.parametrize("kind", BOTH)
def test_a_run_made_to_be_long_is_neither_moved_on_a_put_nor_on_a_removal(kind: type[Table]) -> None:
    capacity = 4 * SMALL
    table, memory = _new(kind, capacity)
    run = [_chunk(100, 0, capacity), *(_chunk(100 + i, 1, capacity) for i in range(2 * SHIFT_SLOTS))]
    assert all(table.put(chunk, 1, 0, 0, 0, 0) for chunk in run)
    assert not table.put(_chunk(100, 2, capacity), 1, 0, 0, 0, 0)
    assert table.remove(run[0])
    assert (table.count, table.dead) == (len(run) - 1, 1)
    assert table.find(run[0]) is None
    assert unpack_entry(bytes(memory[ENTRIES_OFFSET + 100 * 64 :][:64])).kind == DEAD
    assert all(table.find(chunk) for chunk in run[1:])
    assert table.audit()
    assert table.dead == 1


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_no_id_and_what_fits_no_entry_is_refused(kind: type[Table]) -> None:
    table, memory = _new(kind)
    for chunk in (b"", b"\x01" * 32, b"\x01" * 34, b"\x03" + bytes(32), b"\xff" + bytes(32)):
        for call in (table.find, table.remove, lambda chunk: table.put(chunk, 1, 1, 1, 1, 1)):
            with pytest.raises(ValueError):
                call(chunk)
        with pytest.raises(ValueError):
            table.find_many([_chunk(1, 1), chunk])
    for place in ((256, 0, 0, 0, 0), (1, 1 << 64, 0, 0, 0), (1, 0, 1 << 32, 0, 0), (1, 0, 0, 0, -1)):
        with pytest.raises(OverflowError):
            table.put(_chunk(1, 1), *place)
    assert not any(memory)
    for capacity in (0, 1000, SMALL // 2, 1 << 40):
        with pytest.raises(ValueError):
            kind(bytearray(100), capacity)
    with pytest.raises(ValueError):
        kind(bytearray(table_bytes(SMALL) - 1), SMALL)


@pytest.mark.parametrize("kind", BOTH)
def test_a_table_in_read_only_memory_finds_and_cannot_be_written(kind: type[Table]) -> None:
    table, memory = _new(kind)
    table.put(_chunk(3, 1), 1, 2, 3, 4, 5)
    reader = kind(memoryview(memory).toreadonly(), SMALL)
    assert reader.find(_chunk(3, 1)) == (1, 2, 3, 4, 5)
    for change in (lambda: reader.put(_chunk(3, 2), 1, 0, 0, 0, 0), lambda: reader.remove(_chunk(3, 1)), reader.clear):
        with pytest.raises(TypeError):
            change()
    assert reader.find(_chunk(3, 1)) == (1, 2, 3, 4, 5)


# --- bytes that are not what was written ---------------------------------------------------------------


@given(st.integers(0, 1 << 32), st.integers(1, 2000))
@settings(max_examples=25)
def test_a_scribbled_table_answers_nothing_or_what_was_put(seed: int, scribbles: int) -> None:
    chooser = random.Random(seed)
    table, memory = _new(SharedTable)
    chunks = {_chunk(chooser.randrange(SMALL), number): (1, number, 0, 0, 0) for number in range(500)}
    for chunk, place in chunks.items():
        table.put(chunk, *place)
    for _ in range(scribbles):
        memory[chooser.randrange(len(memory))] = chooser.randrange(256)
    for kind in BOTH:
        reader = kind(memoryview(memory).toreadonly(), SMALL)
        for chunk, place in chunks.items():
            assert reader.find(chunk) in (None, place)
        if scribbles > 1000:
            assert not reader.audit()


@pytest.mark.parametrize("kind", BOTH)
def test_a_table_torn_in_the_middle_of_a_change_does_not_pass_the_audit(kind: type[Table]) -> None:
    table, memory = _new(kind)
    for number in range(3):
        table.put(_chunk(9, number), 1, 2, 3, 4, number)
    at = ENTRIES_OFFSET + 10 * ENTRY_BYTES
    for torn in (
        memory[at : at + 1] + b"\1" + memory[at + 2 : at + 64],  # an odd or other version
        bytes(64),  # a hole in the run
        memory[at : at + 48] + bytes(16),  # half of it written
        bytes(memory[at - 64 : at]),  # a move that was begun
    ):
        damaged = bytearray(memory)
        damaged[at : at + 64] = torn
        assert not kind(damaged, SMALL).audit()
    assert kind(memory, SMALL).audit()


@given(st.binary(max_size=200))
def test_no_bytes_pass_as_a_header_but_a_header(noise: bytes) -> None:
    with pytest.raises(StoreDamaged):
        unpack_header(noise)
    header = TableHeader(2048, b"s" * 16, b"b" * 16, 7, 8)
    packed = header.pack()
    assert unpack_header(packed + noise) == header
    at = len(noise) % HEADER.size
    with pytest.raises(StoreDamaged):
        unpack_header(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])


def test_the_size_of_a_table_follows_from_what_it_is_to_hold() -> None:
    assert capacity_for(0) == capacity_for(819) == 1024
    assert capacity_for(820) == 2048
    assert capacity_for(10_000_000) == 1 << 24
    assert capacity_for(1 << 60) == 1 << 32
    assert table_bytes(1024) == STRIPES_OFFSET + 4 * 4096 + (1024 + 64) * 64
    assert home_of(b"\xff" * 32, 1024) == 1023


# --- beside a writer in another process ----------------------------------------------------------------


@contextmanager
def _churning(kind: type[Table]) -> Iterator[mmap.mmap]:
    """Map a table, read-only, that another process changes all the time."""
    descriptor = os.memfd_create("churned")
    os.ftruncate(descriptor, table_bytes(CAPACITY))
    command = [sys.executable, "-m", "tests.shared_index_churn", str(descriptor), kind.__name__]
    writer = subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"ready\n"
        yield mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        assert writer.poll() is None
    finally:
        os.close(descriptor)
        writer.stdin.close()
        written = writer.stdout.read()
        writer.stdout.close()
        assert writer.wait() == 0
        assert int(written) > 0


@pytest.mark.parametrize("writer", BOTH)
@pytest.mark.parametrize("reader", BOTH)
def test_beside_a_writer_in_another_process_no_answer_is_of_another_chunk_and_what_stays_is_found(
    writer: type[Table], reader: type[Table]
) -> None:
    with _churning(writer) as memory:
        table = reader(memory, CAPACITY)
        chunks = [key_at(number) for number in range(STEADY * 2)]
        rounds = 60 if reader is SharedTable else 12
        finders: Sequence[Callable[[], list[Found | None]]] = (
            lambda: table.find_many(chunks),
            lambda: [table.find(chunk) for chunk in chunks],
        )
        missed = 0
        for _ in range(rounds):
            for find in finders:
                found = find()
                for number, answer in enumerate(found):
                    assert answer is None or place_of(number, answer[2]) == answer
                missed += found[:STEADY].count(None)
        # A reader gives up after some looks at a place that changes under it; that must be rare.
        assert missed <= rounds * STEADY // 50
