"""The native table of known names: what it gives, when it gives nothing, and how much it holds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st

from engine.format.layouts import Op, Table
from engine.memory.sealed_memory import SealedMemory
from lakefs.content.verify import granule_crcs
from lakefs.grants.dram_slabs import UNIT_BYTES
from lakefs.host.crc import crc32c
from lakefs.ids import EMPTY_CHUNK, data_chunk_id
from lakefs.known._known import KnownTable
from lakefs.limits import GRANULE_BYTES, HOT_INDEX_SLOTS_MIN
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import pack_place, table_bytes
from lakefs.stamps.stamps import STAMP, StampMemory, StampReader, memory_bytes
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT

COUNT: Final = 1 << 16
LONGEST: Final = 256 << 10
SEGMENT: Final = 7
SLAB: Final = 3
SLAB_BYTES: Final = 8 * UNIT_BYTES
CELL: Final = 2
GENERATION: Final = 4


class Rig:
    """A table with stamps, an index, one segment and one slab, all made by hand."""

    def __init__(self, folder: Path, memory_bytes_: int = 1 << 20) -> None:
        self._memory = SealedMemory("stamps", memory_bytes(COUNT))
        self.stamps = StampMemory(self._memory.view, (Table.NAMES,))
        self.stamps.begin()
        self.reader = StampReader(self._memory.descriptor)
        self.index = SharedTable(bytearray(table_bytes(HOT_INDEX_SLOTS_MIN)), HOT_INDEX_SLOTS_MIN)
        self.segment = folder / "segment"
        self.segment.write_bytes(bytes(1 << 20))
        self.file = os.open(self.segment, os.O_RDWR)
        self.slab = bytearray(SLAB_BYTES)
        self.generations = bytearray(8 * 8 * (SLAB + 1))
        self._used = 0
        self.found: list[bool] = []
        self.table = KnownTable(memory_bytes_)
        self.open()

    def open(self) -> None:
        """Let the table use everything."""
        self.table.use_stamps(self.reader)
        self.table.use_places(self.index)
        assert self.table.use_segment(SEGMENT, self.file, 0) is None
        generations, slab = memoryview(self.generations).toreadonly(), memoryview(self.slab).toreadonly()
        self.table.use_slabs(generations, SLAB_BYTES, {SLAB: slab})

    def close(self) -> None:
        self.table.forget()
        self.stamps.end()
        self._memory.close()
        os.close(self.file)

    def store(self, content: bytes, *, crc: int | None = None, segment: int = SEGMENT, length: int = -1) -> bytes:
        """Put content into the segment and the index, with the CRCs of its granules behind it; return its chunk."""
        chunk = bytes(data_chunk_id(content))
        vector = granule_crcs(content) if len(content) > GRANULE_BYTES else b""
        os.pwrite(self.file, content + vector, self._used)
        right = crc32c(vector or content)
        length = len(content) if length < 0 else length
        self.index.put(chunk, MEDIUM_SEGMENT, segment, self._used, length, right if crc is None else crc)
        self._used += len(content) + len(vector)
        return chunk

    def store_in_slab(
        self, content: bytes, *, slab: int = SLAB, cell: int = CELL, generation: int = GENERATION
    ) -> bytes:
        chunk = bytes(data_chunk_id(content))
        at = CELL * UNIT_BYTES
        self.slab[at : at + len(content)] = content
        number = 8 * (SLAB * SLAB_BYTES // UNIT_BYTES + CELL)
        if number + 8 <= len(self.generations):
            self.generations[number : number + 8] = GENERATION.to_bytes(8, "little")
        place = pack_place(slab, generation)
        assert place is not None
        self.index.put(chunk, MEDIUM_DRAM, place, cell * UNIT_BYTES, len(content), crc32c(content))
        return chunk

    def learn(self, name: str, chunk: bytes | None, size: int, stat: bytes = b"stat") -> set[tuple[int, int]]:
        wanted, is_found = self.table.learn([(name, self.stamps.of([(Table.NAMES, name.encode())]), stat, chunk, size)])
        self.found.append(is_found)
        return wanted

    def change(self, name: str) -> None:
        self.stamps.turn([(Op.PUT, Table.NAMES, name.encode(), b"")])

    def read(self, name: Any) -> bytes | None:
        """Return the content by every way to it, which all find the same."""
        found = self.table.read(name)
        many: list[tuple[bytes, bytes, int] | None] = []
        self.table.read_many([name], many, 1 << 20)
        memory = bytearray(b"\xff" * (LONGEST + 9))
        filled: list[tuple[int, bytes, int] | None] = []
        self.table.read_many([name], filled, 1 << 20, [memoryview(memory)])
        if found is None:
            assert many == [None]
            assert filled == [None]
            return None
        assert many[0] is not None
        assert filled[0] is not None
        assert many[0][:2] == found
        assert memory == found[0] + b"\xff" * (len(memory) - len(found[0]))
        assert filled[0][0] == len(found[0])
        return found[0]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


# --- content -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, GRANULE_BYTES, GRANULE_BYTES + 1, 3 * GRANULE_BYTES, LONGEST])
def test_content_is_read_where_the_index_says_it_lies(rig: Rig, size: int) -> None:
    content = os.urandom(size)
    assert rig.learn("b/k", rig.store(content), size) == set()
    assert rig.read("b/k") == rig.read("lake://b/k") == content
    opened = (content, bytes(data_chunk_id(content)), b"stat")
    assert rig.table.read("b/k", True) == (opened if size <= GRANULE_BYTES else None)
    for name in ("b/other", "b/k/", "lake://lake://b/k", "LAKE://b/k", "", "lake://", "\ud800", 7, None, b"b/k"):
        assert rig.read(name) is None
        assert rig.table.stat(name) is None  # type: ignore[arg-type]


def test_content_of_the_dram_tier_is_copied_while_its_cell_holds_it(rig: Rig) -> None:
    content = os.urandom(5000)
    rig.learn("b/k", rig.store_in_slab(content), 5000)
    assert rig.read("b/k") == content
    number = 8 * (SLAB * SLAB_BYTES // UNIT_BYTES + CELL)
    for other in (GENERATION + 1, GENERATION + 2, 0):
        rig.generations[number : number + 8] = other.to_bytes(8, "little")
        assert rig.read("b/k") is None
    rig.generations[number : number + 8] = GENERATION.to_bytes(8, "little")
    for at in (0, 2500, 4999):
        rig.slab[CELL * UNIT_BYTES + at] ^= 4
        assert rig.read("b/k") is None
        rig.slab[CELL * UNIT_BYTES + at] ^= 4
    assert rig.read("b/k") == content


def test_places_outside_of_what_is_mapped_are_not_read(rig: Rig) -> None:
    for number, place in enumerate(
        ({"slab": SLAB + 1}, {"slab": 5000}, {"cell": 8}, {"cell": 7}, {"generation": 3}, {"generation": 1 << 40})
    ):
        content = os.urandom(UNIT_BYTES + 1 + number)
        rig.learn("b/k", rig.store_in_slab(content, **place), len(content))
        assert rig.read("b/k") is None
    content = os.urandom(300)
    for wrong in ({"segment": 8}, {"crc": 5}, {"length": 299}, {"length": 301}):
        rig.learn("b/k", rig.store(content, **wrong), 300)
        assert rig.read("b/k") is None
    rig.learn("b/k", rig.store(content), 300)
    assert rig.read("b/k") == content
    os.ftruncate(rig.file, 100)
    assert rig.read("b/k") is None


@pytest.mark.parametrize("size", [2000, GRANULE_BYTES + 1, LONGEST])
def test_flipped_bytes_are_not_returned(rig: Rig, size: int) -> None:
    content = os.urandom(size)
    rig.learn("b/k", rig.store(content), size)
    vector = range(size, size + 4 * -(-size // GRANULE_BYTES)) if size > GRANULE_BYTES else ()
    for at in (0, 1, 1000, size - 1, *vector):
        before = os.pread(rig.file, 1, at)
        os.pwrite(rig.file, bytes([before[0] ^ 0x80]), at)
        assert rig.read("b/k") is None
        os.pwrite(rig.file, before, at)
    assert rig.read("b/k") == content


def test_segments_and_slabs_that_are_missing_are_named(rig: Rig) -> None:
    content = os.urandom(100)
    assert rig.learn("b/k", rig.store(content, segment=8), 100) == {(MEDIUM_SEGMENT, 8)}
    assert rig.learn("b/k", rig.store_in_slab(content, slab=5), 100) == {(MEDIUM_DRAM, 5)}
    assert rig.learn("b/k", rig.store_in_slab(content, slab=5000), 100) == set()
    rig.store(content)
    assert all(rig.found)
    rig.learn("b/other", bytes(data_chunk_id(b"none")), 4)
    assert not rig.found[-1]
    rig.table.drop_segments()
    assert rig.learn("b/k", bytes(data_chunk_id(content)), 100) == {(MEDIUM_SEGMENT, SEGMENT)}
    assert rig.read("b/k") is None


def test_empty_content_lies_nowhere_and_long_content_is_not_known(rig: Rig) -> None:
    assert rig.learn("b/empty", bytes(EMPTY_CHUNK), 0) == set()
    assert rig.read("b/empty") == b""
    rig.learn("b/long", b"\x01" * 33, LONGEST + 1)
    assert rig.table.stat("b/long") == b"stat"
    assert rig.read("b/long") is None
    rig.learn("b/folder", None, 0)
    assert rig.read("b/folder") is None
    rig.learn("b/odd", b"\x01" * 32, 10)
    assert rig.read("b/odd") is None


def test_memory_that_is_too_short_is_left_to_others(rig: Rig) -> None:
    content = os.urandom(100)
    rig.learn("b/k", rig.store(content), 100)
    found: list[tuple[int, bytes, int] | None] = []
    rig.table.read_many(["b/k"], found, 1000, [memoryview(bytearray(99))])
    assert found == [None]
    with pytest.raises(BufferError):
        rig.table.read_many(["b/k"], [], 1000, [memoryview(bytes(100))])
    with pytest.raises(ValueError, match="as many"):
        rig.table.read_many(["b/k"], [], 1000, [])


# --- what stands -----------------------------------------------------------------------------------------


def test_a_changed_name_is_not_answered_until_it_is_learned_again(rig: Rig) -> None:
    chunk = rig.store(b"content")
    for name in ("b/1", "b/2"):
        rig.learn(name, chunk, 7)
    found: list[tuple[bytes, bytes, int] | None] = []
    rig.table.read_many(["b/1", "b/2"], found, 1000)
    assert rig.table.stand(["b/1", "b/2"], found)
    rig.change("b/1")
    assert rig.read("b/1") is rig.table.stat("b/1") is None
    assert rig.read("b/2") == b"content"
    assert not rig.table.stand(["b/1", "b/2"], found)
    rig.learn("b/1", chunk, 7)
    assert rig.read("b/1") == b"content"
    assert not rig.table.stand(["b/1", "b/2"], found), "between the two it may have been another"
    assert rig.table.stand(["b/1", "b/2"], [None, found[1]])


def test_a_stat_does_not_take_the_place_of_content_that_rests_on_the_same(rig: Rig) -> None:
    rig.learn("b/k", rig.store(b"content"), 7)
    rig.learn("b/k", None, 7)
    assert rig.read("b/k") == b"content"
    rig.change("b/k")
    rig.learn("b/k", None, 9)
    assert rig.read("b/k") is None
    assert rig.table.stat("b/k") == b"stat"


def test_nothing_stands_of_an_engine_that_has_ended_or_after_forgetting(rig: Rig) -> None:
    rig.learn("b/k", rig.store(b"content"), 7)
    with pytest.raises(ValueError, match="other stamps"):
        rig.table.use_stamps(rig.reader)
    rig.table.forget()
    assert rig.table.counts[:2] == (0, 0)
    assert rig.read("b/k") is None
    assert rig.learn("b/k", rig.store(b"content"), 7) == set()
    assert rig.read("b/k") is None, "there are no stamps"
    rig.table.forget()
    rig.open()
    rig.learn("b/k", rig.store(b"content"), 7)
    assert rig.read("b/k") == b"content"
    rig.stamps.end()
    assert rig.read("b/k") is rig.table.stat("b/k") is None


# --- bounds ----------------------------------------------------------------------------------------------


def test_a_read_stops_where_the_room_ends(rig: Rig) -> None:
    chunk = rig.store(b"1234567890")
    names = [f"b/{number}" for number in range(5)]
    for name in names:
        rig.learn(name, chunk, 10)
    found: list[tuple[bytes, bytes, int] | None] = []
    for expected in (2, 4, 5):
        rig.table.read_many(names, found, 25)
        assert len(found) == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 20_000))
def test_whatever_is_learned_the_table_is_bounded_and_right(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: int
) -> None:
    rig, chance = Rig(tmp_path_factory.mktemp("table"), limit), random.Random(seed)
    chunks = [(rig.store(content), content) for content in (b"a", b"bb" * 50, b"c" * 3000)]
    expected: dict[str, bytes] = {}
    try:
        for _ in range(300):
            name = f"b/{chance.randrange(40)}" + "x" * chance.choice((0, 0, 0, 500))
            if chance.random() < 0.3:
                rig.change(name)
                expected.pop(name, None)
            else:
                chunk, content = chance.choice(chunks)
                rig.learn(name, chunk, len(content), bytes(chance.randrange(300)))
                expected[name] = content
            count, held, _ = rig.table.counts
            assert held <= limit
            assert count <= 40 * 2
            for asked, content in chance.sample(sorted(expected.items()), min(3, len(expected))):
                assert rig.read(asked) in (None, content)
        assert sum(rig.read(name) is not None for name in expected) > 0 or limit < 1000
    finally:
        rig.close()


def test_odd_sets_of_stamps_never_stand(rig: Rig) -> None:
    chunk = rig.store(b"content")
    for odd in (b"", b"x", STAMP.pack(COUNT, 0), STAMP.pack(1 << 31, 0), STAMP.pack(1, 99), STAMP.pack(1, 0)[:-1]):
        rig.table.learn([("b/k", odd, b"stat", chunk, 7)])
        assert rig.read("b/k") is rig.table.stat("b/k") is None
    with pytest.raises(TypeError):
        rig.table.learn([("b/k", None, b"stat", chunk, 7)])  # type: ignore[list-item]
