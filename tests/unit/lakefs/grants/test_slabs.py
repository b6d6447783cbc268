"""Slabs as a client reads them: copies between two looks at the generation, and only sealed memory is mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.tiers.arena import Arena, Cell
from lakefs.errors import StaleGrant
from lakefs.grants.dram_slabs import Slabs
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire.media import MEDIUM_DRAM
from lakefs.wire.messages import Grant

SLAB = 1 * MIB
CHUNK = data_chunk_id(b"content")


@contextmanager
def _arena() -> Iterator[Arena]:
    arena = Arena(1, SLAB)
    arena.add_slab(arena.make_slab_memory(), arena.classes[1])
    yield arena
    arena.close()


def _grant(cell: Cell, generation: int, length: int = 64 * KIB) -> Grant:
    return Grant(MEDIUM_DRAM, cell.slab, cell.offset, length, length, 0, 0, generation)


def _reader(arena: Arena) -> Slabs:
    slabs = Slabs()
    held = [os.dup(slab.memory.descriptor) for slab in arena.slabs.values()]
    slabs.add(list(arena.slabs), [*held, os.dup(arena.generations_descriptor)], SLAB)
    return slabs


def _fill(arena: Arena, cell: Cell, content: bytes) -> int:
    arena.begin_change(cell)
    arena.memory(cell)[: len(content)] = content
    return arena.end_change(cell)


def test_a_reader_copies_what_it_was_granted_and_nothing_once_the_cell_is_used_anew() -> None:
    with _arena() as arena:
        slabs = _reader(arena)
        cell = arena.take_free(arena.classes[1], CHUNK)
        generation = _fill(arena, cell, b"first" * 1000)
        target = memoryview(bytearray(10))
        slabs.copy(_grant(cell, generation), 5, target)
        assert bytes(target) == b"firstfirst"
        assert bytes(slabs.view(_grant(cell, generation), 0, 5)) == b"first"
        arena.begin_change(cell)
        with pytest.raises(StaleGrant):
            slabs.copy(_grant(cell, generation), 0, target)
        _fill(arena, cell, b"other" * 1000)
        with pytest.raises(StaleGrant):
            slabs.copy(_grant(cell, generation), 0, target)


def test_any_part_of_a_cell_can_be_copied() -> None:
    with _arena() as arena:
        slabs = _reader(arena)
        arena.begin_recut(arena.slabs[0])
        arena.recut(arena.slabs[0], arena.classes[2])
        cell = arena.take_free(arena.classes[2], CHUNK)
        content = os.urandom(256 * KIB)
        grant = _grant(cell, _fill(arena, cell, content), len(content))
        long, short = memoryview(bytearray(256 * KIB)), memoryview(bytearray(100))
        slabs.copy(grant, 0, long)
        slabs.copy(grant, 1000, short)
        assert long == content
        assert short == content[1000:1100]


def test_what_a_reader_sees_is_read_only_for_good() -> None:
    with _arena() as arena:
        cell = arena.take_free(arena.classes[1], CHUNK)
        view = _reader(arena).view(_grant(cell, _fill(arena, cell, b"first")), 0, 5)
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def test_grants_that_point_outside_of_what_is_mapped_are_stale() -> None:
    with _arena() as arena:
        slabs = _reader(arena)
        cell = arena.take_free(arena.classes[1], CHUNK)
        generation = _fill(arena, cell, b"first")
        target = memoryview(bytearray(64 * KIB))
        for grant in (
            Grant(MEDIUM_DRAM, 1, 0, 10, 10, 0, 0, generation),
            Grant(MEDIUM_DRAM, 0, 1 << 40, 10, 10, 0, 0, generation),
            Grant(MEDIUM_DRAM, 0, cell.offset, 10, 10, 0, 0, generation + 2),
        ):
            with pytest.raises(StaleGrant):
                slabs.copy(grant, 0, target)
        with pytest.raises(StaleGrant):
            slabs.copy(_grant(cell, generation), SLAB, target)
        slabs.drop()
        with pytest.raises(StaleGrant):
            slabs.copy(_grant(cell, generation), 0, target)


def test_grants_of_another_engine_mean_nothing_in_the_slabs_of_the_one_before() -> None:
    with _arena() as before, _arena() as arena:
        slabs = _reader(before)
        old, cell = before.take_free(before.classes[1], CHUNK), arena.take_free(arena.classes[1], CHUNK)
        _fill(before, old, b"first")
        grant = _grant(cell, _fill(arena, cell, b"other"))
        assert (old.slab, old.offset) == (cell.slab, cell.offset)
        target = memoryview(bytearray(5))
        with pytest.raises(StaleGrant):
            slabs.copy(grant, 0, target)
        slabs.add([], [os.dup(arena.generations_descriptor)], SLAB)
        assert slabs.missing({0}) == [0]
        with pytest.raises(StaleGrant):
            slabs.copy(grant, 0, target)
        generations = os.dup(arena.generations_descriptor)
        slabs.add([0], [os.dup(arena.slabs[0].memory.descriptor), generations], SLAB)
        slabs.copy(grant, 0, target)
        assert bytes(target) == b"other"


def test_memory_that_its_maker_can_shrink_is_not_mapped_and_its_descriptor_is_closed() -> None:
    with _arena() as arena:
        descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SLAB)
        inode = _inode_of(descriptor)
        slabs = Slabs()
        slabs.add([0], [descriptor, os.dup(arena.generations_descriptor)], SLAB)
        assert slabs.missing({0}) == [0]
        assert _inode_of(descriptor) != inode


def _inode_of(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


_READER = """
import os, struct, sys
from lakefs.errors import StaleGrant
from lakefs.ids import data_chunk_id
from lakefs.grants.dram_slabs import Slabs, generation_number
from lakefs.wire.grants import Grant
from lakefs.wire.media import MEDIUM_DRAM
slab, generations, slab_bytes, cell_bytes = map(int, sys.argv[1:])
slabs = Slabs()
numbers = os.dup(generations)
slabs.add([0], [slab, generations], slab_bytes)
target = memoryview(bytearray(cell_bytes))
good = stale = 0
while good + stale < 1000 or good < 50:
    offset = cell_bytes * ((good + stale) % 4)
    at = 8 * generation_number(0, offset, slab_bytes)
    generation = struct.unpack("=Q", os.pread(numbers, 8, at))[0]
    if generation % 2:
        stale += 1
        continue
    try:
        slabs.copy(Grant(MEDIUM_DRAM, 0, offset, cell_bytes, cell_bytes, 0, 0, generation), 0, target)
    except StaleGrant:
        stale += 1
        continue
    words = set(target.cast("Q"))
    assert words == {generation}, (generation, words)
    good += 1
print(good, stale)
"""


def test_a_reader_in_another_process_never_takes_torn_or_foreign_bytes_while_cells_are_used_anew() -> None:
    with _arena() as arena:
        cells = [arena.take_free(arena.classes[1], CHUNK) for _ in range(4)]
        for cell in cells:
            _fill(arena, cell, (arena.generation(cell) + 1).to_bytes(8, "little") * (8 * KIB))
        fds = [arena.slabs[0].memory.descriptor, arena.generations_descriptor]
        argv = [sys.executable, "-c", _READER, *map(str, fds), str(SLAB), str(64 * KIB)]
        with subprocess.Popen(argv, pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
            turn = 0
            while reader.poll() is None:
                turn += 1
                cell = cells[turn % 4]
                following = arena.generation(cell) + 2
                generation = _fill(arena, cell, following.to_bytes(8, "little") * (8 * KIB))
                assert generation == following
            out, err = reader.communicate()
        assert reader.returncode == 0, err.decode()
        good, stale = map(int, out.split())
        assert good >= 50
        assert stale > 0
