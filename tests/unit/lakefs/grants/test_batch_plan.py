"""Plans of reads: the native one and its twin plan and read the same, whatever the places are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.grants import batch_plan as plain_reads
from lakefs.grants.batch_plan import ASK_FROM_BYTES, RUN_BYTES_MAX, RUN_CHUNKS_MAX, SEGMENTS_MAX
from lakefs.grants.dram_slabs import UNIT_BYTES, generation_number
from lakefs.limits import GRANULE_BYTES, KIB
from lakefs.shared_index.table_format import PLACE, pack_place
from lakefs.wire.media import MEDIUM_DRAM
from tests.oracles.plain_reads import TwinPlan, twin_are_bytes

ReadPlan = plain_reads.ReadPlan
Plan = ReadPlan | TwinPlan
BOTH: Final[tuple[type[Plan], ...]] = (ReadPlan, TwinPlan)
CONTENT: Final = bytes(range(256)) * (8 * KIB)
DATA: Final = b"\x01" + bytes(32)
MANIFEST: Final = b"\x02" + bytes(32)
Place = tuple[int, int, int, int, int]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Two MiB in memory."""
    descriptor = os.memfd_create("segment")
    os.write(descriptor, CONTENT)
    yield descriptor
    os.close(descriptor)


def packed(places: list[Place]) -> bytes:
    return b"".join(PLACE.pack(*place) for place in places)


def side_by_side(lengths: list[int], segment: int = 7) -> list[Place]:
    offsets = [sum(lengths[:number]) for number in range(len(lengths))]
    return [(segment, offset, length, offset % 97, 1) for offset, length in zip(offsets, lengths, strict=True)]


def read_all(kind: type[Plan], places: list[Place], descriptor: int) -> tuple[object, ...]:
    """Read by a plan; return its properties, what it read, and the bytes in the targets."""
    targets = [bytearray(length + number % 2) for number, (_, _, length, _, _) in enumerate(places)]
    views = [memoryview(target) for target in targets]
    plan = kind([DATA] * len(places), views, packed(places), 1 << 30)
    arrived = plan.read(0, plan.runs, [(descriptor, 0)] * len(plan.segments))
    for number, length, crc in arrived:
        offset = places[number][1]
        assert targets[number][:length] == CONTENT[offset : offset + length]
        assert (length, crc) == (places[number][2], places[number][3])
    lengths = [-1] * len(places)
    plan.read_lengths(0, plan.runs, [(descriptor, 0)] * len(plan.segments), lengths)
    assert [(number, length) for number, length in enumerate(lengths) if length != -1] == [
        (number, length) for number, length, _ in arrived
    ]
    return plan.segments, plan.runs, plan.others, plan.parts(RUN_BYTES_MAX), arrived


LENGTHS: Final = st.sampled_from([0, 1, 700, 4096, GRANULE_BYTES, GRANULE_BYTES + 1, 300_000])


@st.composite
def placed(draw: st.DrawFn) -> list[Place]:
    """Draw places, many of them right after the one before."""
    places: list[Place] = []
    end = 0
    for _ in range(draw(st.integers(0, 40))):
        offset = end if draw(st.integers(0, 3)) else draw(st.integers(0, len(CONTENT) + 10_000))
        length = draw(LENGTHS)
        tier = 1 if draw(st.integers(0, 7)) else draw(st.sampled_from([0, 2, 4]))
        places.append((draw(st.sampled_from([5, 5, 5, 6])), offset, length, draw(st.integers(0, 99)), tier))
        end = offset + length
    return places


@given(placed())
@settings(max_examples=80, deadline=None)
def test_native_and_twin_make_the_same_runs_and_read_the_same(file: int, places: list[Place]) -> None:
    assert read_all(ReadPlan, places, file) == read_all(TwinPlan, places, file)


@pytest.mark.parametrize("kind", BOTH)
def test_neighbours_are_one_run_up_to_its_bounds(kind: type[Plan], file: int) -> None:
    segments, runs, others, parts, arrived = read_all(kind, side_by_side([GRANULE_BYTES] * 16), file)
    assert (segments, runs, others, parts) == ([7], 2, [], [(0, 1), (1, 2)])
    assert isinstance(arrived, list)
    assert [number for number, _, _ in arrived] == list(range(16))
    many = 2 * RUN_CHUNKS_MAX + 5  # more than the kernel takes in one call
    _, runs, _, parts, arrived = read_all(kind, side_by_side([5] * many), file)
    assert (runs, parts) == (3, [(0, 3)])
    assert isinstance(arrived, list)
    assert len(arrived) == many


@pytest.mark.parametrize("kind", BOTH)
def test_what_cannot_be_planned_is_left_out(kind: type[Plan], file: int) -> None:
    place = (7, 0, 100, 1, 1)
    for chunk, length, found, longest in (
        (MANIFEST, 100, place, 1000),
        (b"", 100, (7, 0, 100, 1, 0), 1000),
        (DATA, 99, place, 1000),
        (DATA, 100, place, 99),
        (DATA, 100, (7, 0, 100, 1, 4), 1000),
        (DATA, 100, (7, 0, 0, 1, 1), 1000),
    ):
        plan = kind([chunk], [memoryview(bytearray(length))], packed([found]), longest)
        assert (plan.runs, plan.parts(1)) == (0, [])
    too_many = [(segment, 0, 1, 0, 1) for segment in range(SEGMENTS_MAX + 3)]
    targets = [memoryview(bytearray(1)) for _ in too_many]
    plan = kind([DATA] * len(too_many), targets, packed(too_many), 1)
    assert (plan.runs, len(plan.segments)) == (SEGMENTS_MAX, SEGMENTS_MAX)


@pytest.mark.parametrize("kind", BOTH)
def test_what_does_not_go_together_is_refused(kind: type[Plan], file: int) -> None:
    place = packed([(7, 0, 100, 1, 1)])
    target = memoryview(bytearray(100))
    for chunks, targets, places in (([DATA], [], place), ([DATA], [target], place[:-1]), ([], [target], place)):
        with pytest.raises(ValueError, match="go together"):
            kind(chunks, targets, places, 100)
    with pytest.raises(BufferError):
        kind([DATA], [target.toreadonly()], place, 100)
    plan = kind([DATA], [target], place, 100)
    for first, stop, descriptors in ((0, 2, 1), (-1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 1, 2)):
        with pytest.raises(IndexError):
            plan.read(first, stop, [(file, 0)] * descriptors)
        with pytest.raises(IndexError):
            plan.read_lengths(first, stop, [(file, 0)] * descriptors, [0])
    with pytest.raises(ValueError, match="go together"):
        plan.read_lengths(0, 1, [(file, 0)], [])


@pytest.mark.parametrize("kind", BOTH)
def test_only_what_came_whole_has_arrived(kind: type[Plan], file: int) -> None:
    offset = len(CONTENT) - 250
    places = [(7, offset + 100 * number, 100, 1, 1) for number in range(4)]
    targets = [memoryview(bytearray(100)) for _ in places]
    plan = kind([DATA] * 4, targets, packed(places), 100)
    assert plan.runs == 1
    assert plan.read(0, 1, [(file, 0)]) == [(0, 100, 1), (1, 100, 1)]
    assert plan.read(0, 1, [None]) == []
    assert plan.read(0, 0, [(file, 0)]) == []
    closed = os.memfd_create("closed")
    os.close(closed)
    assert plan.read(0, 1, [(closed, 0)]) == []


@pytest.mark.parametrize("kind", BOTH)
def test_a_long_chunk_that_is_not_cached_is_not_asked_for(kind: type[Plan], tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(CONTENT)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        place = (7, 0, ASK_FROM_BYTES, 1, 1)
        plan = kind([DATA], [memoryview(bytearray(ASK_FROM_BYTES))], packed([place]), ASK_FROM_BYTES)
        if plan.read(0, 1, [(opened.fileno(), os.RWF_NOWAIT)]):
            pytest.skip("this file system keeps what it was told to drop, or refuses no read")
        os.pread(opened.fileno(), ASK_FROM_BYTES, 0)
        assert plan.read(0, 1, [(opened.fileno(), os.RWF_NOWAIT)]) == [(0, ASK_FROM_BYTES, 1)]


@pytest.mark.parametrize("kind", BOTH)
def test_targets_stay_lent_while_there_is_a_plan(kind: type[Plan], file: int) -> None:
    memory = bytearray(100)
    plan = kind([DATA], [memoryview(memory)], packed([(7, 0, 100, 1, 1)]), 100)
    with pytest.raises(BufferError):
        memory.append(0)
    assert plan.read(0, 1, [(file, 0)])
    del plan
    memory.append(0)


@pytest.mark.parametrize("are_bytes", [plain_reads.are_bytes, twin_are_bytes])
def test_only_views_of_writable_bytes_are_taken_as_they_are(are_bytes: Callable[[list[Any]], bool]) -> None:
    memory = memoryview(bytearray(64))
    assert are_bytes([])
    assert are_bytes([memory, memory[3:9], memory[:0]])
    for other in (
        memory.toreadonly(),
        memory[::2],
        memory.cast("b"),
        memory.cast("I"),
        memory.cast("B", (8, 8)),
        bytearray(5),
        b"bytes",
        None,
    ):
        assert not are_bytes([memory, other])


def _slot_place(slab: int, generation: int) -> int:
    place = pack_place(slab, generation)
    assert place is not None
    return place


@pytest.mark.parametrize("kind", BOTH)
def test_slots_are_copied_while_their_generation_is_that_of_the_place(kind: type[Plan], file: int) -> None:
    slab_bytes = 1 << 20
    slabs = {0: memoryview(CONTENT[:slab_bytes]), 2: memoryview(CONTENT[5 : slab_bytes + 5])}
    generations = memoryview(bytearray(3 * slab_bytes // UNIT_BYTES * 8)).cast("Q")
    wanted = [(0, 0, 100), (0, UNIT_BYTES, 200), (2, 3 * UNIT_BYTES, 300), (1, 0, 50), (2, slab_bytes - 10, 11)]
    places: list[Place] = [
        (_slot_place(slab, 2 * number), offset, length, number, MEDIUM_DRAM)
        for number, (slab, offset, length) in enumerate(wanted)
    ]
    places += [
        (_slot_place(0, 7), 0, 10, 9, MEDIUM_DRAM),
        (7, 0, 100, 1, 1),
        (_slot_place(9, 2), 0, 10, 9, MEDIUM_DRAM),
    ]
    for number, (slab, offset, _) in enumerate(wanted):
        generations[generation_number(slab, offset, slab_bytes)] = 2 * number
    targets = [memoryview(bytearray(place[2] + 1)) for place in places]
    plan = kind([DATA] * len(places), targets, packed(places), 1000)
    assert (plan.slots, plan.runs, plan.others) == (7, 1, [])
    assert plan.copy(0, 99, generations, slabs, slab_bytes) == [(0, 100, 0), (1, 200, 1), (2, 300, 2)]
    for number in range(3):
        slab, offset, length = wanted[number]
        assert targets[number][:length] == slabs[slab][offset : offset + length]
    generations[generation_number(0, UNIT_BYTES, slab_bytes)] = 3
    assert plan.copy(1, 3, generations, slabs, slab_bytes) == [(2, 300, 2)]
    assert plan.copy(0, 99, generations[:1], slabs, slab_bytes) == [(0, 100, 0)]
    assert kind([DATA], targets[:1], packed(places[:1]), 99).others == [0]  # too long together with its checksums
