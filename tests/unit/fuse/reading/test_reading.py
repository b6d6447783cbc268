"""Reads of one object for the mount: any range of it, through memory that is used again, with a check each time."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import cast

import pytest
import trio
from hypothesis import given, settings, strategies as st

from engine.tiers.arena import Arena
from fuse.reading.blob_reader import BlobReader, PageSums, ReadBuffers
from lakefs.client.trio.driver import TrioDriver
from lakefs.get.opened import Access, Opened, Piece
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import bring_in
from lakefs.host.crc import crc32c
from lakefs.host.offload import InlineOffload
from lakefs.host.page_cache import is_cached
from lakefs.ids import ChunkId, ChunkKind, SegmentId, chunk_id_of
from lakefs.limits import GRANULE_BYTES, KIB, MIB
from lakefs.names import Name
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT
from lakefs.wire.messages import Grant, ObjectStat
from lakefs.wire.offers import EVERYTHING, Offers

SEGMENT = SegmentId(1)
LENGTHS = (100, 3 * GRANULE_BYTES, GRANULE_BYTES + 1, 2 * MIB, 5)
CONTENT = os.urandom(sum(LENGTHS))


class Shelf:
    """A segment file with the chunks of one object, and a reader of it; a fallback is counted and returns zeros."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fell_back = 0
        self.descriptors = SegmentDescriptors()
        self.opened = Opened(Name("b", "k"), ObjectStat("b", "k", 2, 1, len(CONTENT), "", 0), 0, [], {}, {})
        with path.open("wb") as file:
            offset = 0
            for length in LENGTHS:
                payload = CONTENT[offset : offset + length]
                chunk = chunk_id_of(ChunkKind.DATA, payload)
                crcs = [crc32c(payload[at : at + GRANULE_BYTES]) for at in range(0, length, GRANULE_BYTES)]
                vector = struct.pack(f"<{len(crcs)}I", *crcs) if len(crcs) > 1 else b""
                crc = crc32c(vector) if vector else crcs[0]
                self.opened.pieces.append(Piece(chunk, offset, length))
                self.opened.grants[chunk] = Grant(MEDIUM_SEGMENT, int(SEGMENT), file.tell(), length, length, 0, crc)
                file.write(payload + vector)
                file.seek(-file.tell() % 4096, os.SEEK_CUR)
                offset += length
            file.truncate(file.tell())
            os.fsync(file.fileno())
        self.descriptors.add(SEGMENT, os.open(path, os.O_RDONLY))
        self.reader = BlobReader(cast(TrioDriver, self), InlineOffload(), ReadBuffers(), self.opened)

    @property
    def steps(self) -> Shelf:
        """Stand in for the lake's steps."""
        return self

    def access(self, progress: None) -> Access:
        """Stand in for `LakeSteps.access`."""
        return Access(self.descriptors, Offers(EVERYTHING, by_memory=True))

    async def run(self, steps: object) -> bytes:
        """Stand in for `TrioLake.run`: the reader has given up its own reads."""
        self.fell_back += 1
        return b""

    def cool(self) -> None:
        """Drop the segment from memory."""
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, length: int) -> bytes:
        """Read like the mount: at once if possible, else with a wait."""
        found = self.reader.read_nowait(offset, length)
        return bytes(found) if found is not None else self.read_waiting(offset, length)

    def read_waiting(self, offset: int, length: int) -> bytes:
        """Make the read that may wait."""

        async def read() -> bytes:
            return bytes(await self.reader.read(offset, length))

        return trio.run(read)

    def chunk(self, index: int) -> ChunkId:
        """Return the chunk of the piece of that number."""
        return self.opened.pieces[index].chunk


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf") / "segment")


@settings(max_examples=200, deadline=None)
@given(offset=st.integers(0, len(CONTENT) + 10), length=st.integers(0, 1 << 20), waits=st.booleans())
def test_any_range_is_read_at_once_or_with_a_wait(shelf: Shelf, offset: int, length: int, waits: bool) -> None:
    read = shelf.read_waiting if waits else shelf.read
    assert read(offset, length) == CONTENT[offset : offset + length]
    assert not shelf.fell_back


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_edges_of_chunks_are_read_from_both_sides(shelf: Shelf, index: int) -> None:
    edge = shelf.opened.pieces[index].offset
    for begin in (max(edge - 1, 0), edge, edge + 1):
        for length in (1, 2, 4096, GRANULE_BYTES, 1 << 20):
            assert shelf.read(begin, length) == CONTENT[begin : begin + length]


def test_a_cold_range_is_read_with_a_wait_and_is_in_memory_afterwards(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "segment")
    shelf.cool()
    begin = shelf.opened.pieces[3].offset
    assert shelf.read_waiting(begin, 1 << 20) == CONTENT[begin : begin + (1 << 20)]
    found = shelf.reader.read_nowait(begin, 1 << 20)
    assert found is not None
    assert bytes(found) == CONTENT[begin : begin + (1 << 20)]


@pytest.mark.parametrize("waits", [False, True])
def test_bytes_that_changed_after_they_were_read_once_are_not_given_again(tmp_path: Path, waits: bool) -> None:
    shelf = Shelf(tmp_path / "segment")
    piece = shelf.opened.pieces[1]
    assert shelf.read(piece.offset, 4096) == CONTENT[piece.offset : piece.offset + 4096]
    with shelf.path.open("r+b") as file:
        file.seek(shelf.opened.grants[piece.chunk].offset + 70)
        file.write(b"rot")
    read = shelf.read_waiting if waits else shelf.read
    assert read(piece.offset, 4096) == b""
    assert shelf.fell_back == 1


def test_pages_of_a_granule_that_was_checked_are_checked_by_themselves(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "segment")
    piece = shelf.opened.pieces[1]
    shelf.read(piece.offset, 10)
    with shelf.path.open("r+b") as file:
        file.seek(shelf.opened.grants[piece.chunk].offset + 5000)
        file.write(b"rot")
    for begin, length in ((0, 4096), (8192, 4096), (8193, 30_000), (GRANULE_BYTES - 1, 1)):
        found = shelf.reader.read_nowait(piece.offset + begin, length)
        assert found is not None
        assert bytes(found) == CONTENT[piece.offset + begin : piece.offset + begin + length]
    for begin, length in ((4095, 2), (5000, 1), (4096, 4096), (8191, 2), (0, 60_000)):
        assert shelf.reader.read_nowait(piece.offset + begin, length) is None


def test_a_granule_with_another_checksum_teaches_nothing() -> None:
    sums, chunk = PageSums(), ChunkId(bytes(33))
    granule = memoryview(os.urandom(GRANULE_BYTES))
    assert not sums.learn(chunk, 0, granule, crc32c(granule) ^ 1)
    assert sums.of(chunk, 0) is None
    assert sums.learn(chunk, 0, granule, crc32c(granule))
    assert sums.of(chunk, 0) is not None


def test_the_sums_of_the_granules_that_were_learnt_first_are_forgotten_first() -> None:
    sums, chunk = PageSums(granules_max=2), ChunkId(bytes(33))
    granule = memoryview(b"the last granule of a chunk may be short")
    for number in range(3):
        assert sums.learn(chunk, number, granule, crc32c(granule))
    assert [sums.of(chunk, number) is None for number in range(3)] == [True, False, False]


def test_a_chunk_whose_length_is_not_the_grants_is_left_to_the_engine(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "segment")
    grant = shelf.opened.grants[shelf.chunk(1)]
    shelf.opened.grants[shelf.chunk(1)] = Grant(grant.medium, grant.segment, grant.offset, 4096, 4096, 0, grant.crc)
    assert shelf.read(shelf.opened.pieces[1].offset, 10) == b""
    assert shelf.fell_back == 1


def test_a_chunk_in_the_engines_memory_is_read_from_there_for_as_long_as_it_is_there(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "segment")
    piece = shelf.opened.pieces[1]
    grant = shelf.opened.grants[piece.chunk]
    arena = Arena(1, MIB)
    cell_class = next(each for each in arena.classes if each.cell_bytes >= 256 * KIB)
    arena.add_slab(arena.make_slab_memory(), cell_class)
    cell = arena.take_free(cell_class, piece.chunk)
    arena.begin_change(cell)
    with shelf.path.open("r+b") as file:
        file.seek(grant.offset)
        extent = file.read(piece.length + 12)
        arena.memory(cell)[: len(extent)] = extent
        file.truncate(0)  # a read from the segment would fail
    place = (MEDIUM_DRAM, cell.slab, cell.offset, piece.length, piece.length, 0, grant.crc)
    shelf.opened.grants[piece.chunk] = Grant(*place, arena.end_change(cell))
    held = [os.dup(slab.memory.descriptor) for slab in arena.slabs.values()]
    shelf.descriptors.slabs.add(list(arena.slabs), [*held, os.dup(arena.generations_descriptor)], MIB)
    for begin, length in ((0, piece.length), (5, 10), (GRANULE_BYTES - 1, 2), (5, 10), (8192, 4096)):
        wanted = CONTENT[piece.offset + begin : piece.offset + begin + length]
        found = shelf.reader.read_nowait(piece.offset + begin, length)
        assert found is not None
        assert bytes(found) == wanted
        assert shelf.read_waiting(piece.offset + begin, length) == wanted
    arena.begin_change(cell)
    for number, length in enumerate((10, piece.length)):
        assert shelf.fell_back == number
        assert shelf.reader.read_nowait(piece.offset, length) is None
        assert shelf.read_waiting(piece.offset, length) == b""  # the fallback, which asks the engine
    arena.close()


def test_an_object_whose_chunks_end_early_is_not_filled_up_with_what_was_read_before(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "segment")
    del shelf.opened.pieces[-1]
    reader = BlobReader(cast(TrioDriver, shelf), InlineOffload(), ReadBuffers(), shelf.opened)
    found = reader.read_nowait(len(CONTENT) - 20, 20)
    assert found is not None
    assert bytes(found) == CONTENT[-20:-5]


def test_memory_that_was_handed_out_is_lent_again_only_after_the_next_is() -> None:
    buffers = ReadBuffers()
    first, second = buffers.take(4096), buffers.take(4096)
    buffers.hand_out(first)
    assert buffers.take(4096) is not first
    buffers.hand_out(second)
    assert buffers.take(4096) is first
    assert buffers.take(4096) is not second


def test_a_place_that_is_brought_in_is_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(4 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(descriptor, MIB, MIB) is not False:
            pytest.skip("this file system keeps files in memory, or the kernel does not tell")
        bring_in(descriptor, MIB, MIB)
        assert is_cached(descriptor, MIB, MIB)
    finally:
        os.close(descriptor)


def test_a_place_behind_the_end_is_left_to_the_read(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"short")
    with path.open("rb") as file:
        bring_in(file.fileno(), 0, 4 * MIB)
        bring_in(file.fileno(), 64 * MIB, 4 * MIB)


def test_a_page_that_is_not_there_is_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * 4096))
    with path.open("rb") as file:
        assert is_cached(file.fileno(), 100, 2 * 4096) is not False
        assert not is_cached(file.fileno(), 0, 4 * 4096)
    assert is_cached(1 << 20, 0, 4096) is None
