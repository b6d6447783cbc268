"""Reads that are checked as they are copied: what is right arrives, nothing else is said to; helped or not."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.content.verify import granule_crcs, vector_bytes
from lakefs.grants.batch_plan import CHECKED_BYTES_MAX, CHECKED_RUN_BYTES_MAX, HELPED_FROM_BYTES, HelperThread, ReadPlan
from lakefs.host.crc import crc32c
from lakefs.limits import GRANULE_BYTES
from lakefs.shared_index.table_format import PLACE
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT
from tests.oracles.plain_reads import TwinPlan

DATA: Final = b"\x01" + bytes(32)
GUARD: Final = 0xA5
TAIL_BYTES: Final = 40
"""Bytes behind each target that no read may touch."""
Plan = ReadPlan | TwinPlan


class Extent(NamedTuple):
    """A chunk in the file: its payload, and the vector behind it."""

    offset: int
    payload: bytes
    crc: int

    def place(self) -> tuple[int, int, int, int, int]:
        return (7, self.offset, len(self.payload), self.crc, MEDIUM_SEGMENT)


class Segment:
    """A file of extents, one behind the other."""

    def __init__(self, lengths: list[int], seed: int = 1) -> None:
        rng = random.Random(seed)
        self.descriptor = os.memfd_create("segment")
        self.extents: list[Extent] = []
        offset = 0
        for length in lengths:
            payload = rng.randbytes(length)
            vector = granule_crcs(payload) if length > GRANULE_BYTES else b""
            self.extents.append(Extent(offset, payload, crc32c(vector or payload)))
            os.pwrite(self.descriptor, payload + vector, offset)
            offset += length + len(vector)

    def flip(self, at: int) -> None:
        byte = os.pread(self.descriptor, 1, at)
        os.pwrite(self.descriptor, bytes([byte[0] ^ 0x10]), at)

    def close(self) -> None:
        os.close(self.descriptor)


@contextlib.contextmanager
def segment_of(lengths: list[int], seed: int = 1) -> Iterator[Segment]:
    segment = Segment(lengths, seed)
    try:
        yield segment
    finally:
        segment.close()


@pytest.fixture(scope="module")
def helper() -> Iterator[HelperThread]:
    made = HelperThread()
    yield made
    made.close()
    made.close()


def read(
    kind: type[Plan],
    segment: Segment,
    places: list[tuple[int, int, int, int, int]],
    helper: HelperThread | None = None,
    *,
    asks: bool = False,
) -> tuple[list[int], list[bytes]]:
    """Read by a plan; return the lengths, and the bytes of the targets.  What lies behind them must not change."""
    memories = [bytearray([GUARD]) * (length + TAIL_BYTES) for _, _, length, _, _ in places]
    targets = [memoryview(memory)[:-TAIL_BYTES] for memory in memories]
    packed = b"".join(PLACE.pack(*place) for place in places)
    plan = kind([DATA] * len(places), targets, packed, GRANULE_BYTES, True, asks)
    lengths = [-1] * len(places)
    plan.read_checked([(segment.descriptor, 0)] * len(plan.segments), lengths, helper)
    assert all(memory[-TAIL_BYTES:] == bytes([GUARD]) * TAIL_BYTES for memory in memories), "more than the chunk"
    return lengths, [bytes(target) for target in targets]


LENGTHS: Final = st.sampled_from(
    [1, 7, 4096, GRANULE_BYTES - 1, GRANULE_BYTES, GRANULE_BYTES + 1, CHECKED_RUN_BYTES_MAX, 300_001]
)
FAULTS: Final = st.sampled_from([*["none"] * 3, "payload", "vector", "crc", "offset", "shorter", "longer", "end"])


@given(st.lists(st.tuples(LENGTHS, FAULTS, st.integers(0, 1 << 20)), max_size=24), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_just_what_is_right_is_reported_and_as_the_twin_does(
    helper: HelperThread, drawn: list[tuple[int, str, int]], shuffled: bool, seed: int
) -> None:
    with segment_of([length for length, _, _ in drawn], seed) as segment:
        places, good = [], []
        for extent, (length, fault, where) in zip(segment.extents, drawn, strict=True):
            _, offset, _, crc, _ = extent.place()
            behind = vector_bytes(length)
            if fault == "payload":
                segment.flip(offset + where % length)
            elif fault == "vector" and behind:
                segment.flip(offset + length + where % behind)
            changed = {
                "crc": (offset, length, crc ^ 1 << where % 32),
                "offset": (offset + 1 + where % 70_000, length, crc),
                "shorter": (offset, length - 1, crc),
                "longer": (offset, length + 1, crc),
                "end": ((1 << 32) - 1 - where, length, crc),
            }.get(fault, (offset, length, crc))
            places.append((7, *changed, MEDIUM_SEGMENT))
            good.append(fault == "none" or (fault == "vector" and not behind))
        order = list(range(len(places)))
        if shuffled:
            random.Random(seed).shuffle(order)
        chosen = [places[at] for at in order]
        for helping in (None, helper):
            lengths, found = read(ReadPlan, segment, chosen, helping)
            assert lengths == read(TwinPlan, segment, chosen)[0]
            for at, length, content in zip(order, lengths, found, strict=True):
                payload = segment.extents[at].payload
                assert not good[at] or length == len(payload)
                assert length == -1 or content == payload, "other bytes, said to be right"


@pytest.mark.parametrize("length", [1, GRANULE_BYTES, GRANULE_BYTES + 1, 3 * CHECKED_RUN_BYTES_MAX + 5])
def test_each_flipped_byte_is_noticed_and_no_other_chunk_is_lost(length: int, helper: HelperThread) -> None:
    with segment_of([length, 4096, length]) as segment:
        places = [extent.place() for extent in segment.extents]
        assert read(ReadPlan, segment, places, helper)[0] == [length, 4096, length]
        whole = length + vector_bytes(length)
        for at in {0, min(1, length - 1), length // 2, length - 1, whole - 1, min(GRANULE_BYTES, length - 1)}:
            segment.flip(at)
            assert read(ReadPlan, segment, places, helper)[0] == [-1, 4096, length], at
            segment.flip(at)


def test_a_chunk_of_the_greatest_length_is_read_and_a_longer_one_is_left_out() -> None:
    lengths = [CHECKED_BYTES_MAX, CHECKED_BYTES_MAX + 1]
    with segment_of(lengths) as segment:
        places = [extent.place() for extent in segment.extents]
        assert read(ReadPlan, segment, places)[0] == [CHECKED_BYTES_MAX, -1]
        targets = [memoryview(bytearray(length)) for length in lengths]
        packed = b"".join(PLACE.pack(*place) for place in places)
        assert ReadPlan([DATA] * 2, targets, packed, GRANULE_BYTES, True).others == [1]


def test_chunks_in_slabs_are_left_to_copies() -> None:
    places = [(7, 0, 100, 1, MEDIUM_DRAM), (7, 0, GRANULE_BYTES + 1, 1, MEDIUM_DRAM)]
    targets = [memoryview(bytearray(place[2])) for place in places]
    plan = ReadPlan([DATA] * 2, targets, b"".join(PLACE.pack(*place) for place in places), GRANULE_BYTES, True)
    assert (plan.runs, plan.slots, plan.others) == (0, 1, [1])


@pytest.mark.parametrize("length", [GRANULE_BYTES, 200_000])
def test_a_file_that_ends_too_early_has_no_right_chunk_at_its_end(length: int) -> None:
    with segment_of([length] * 3) as segment:
        places = [extent.place() for extent in segment.extents]
        whole = length + vector_bytes(length)
        for end in (3 * whole - 1, 2 * whole + 1, 2 * whole):
            os.ftruncate(segment.descriptor, end)
            assert read(ReadPlan, segment, places)[0] == [length, length, -1]
            assert read(TwinPlan, segment, places)[0] == [length, length, -1]
            os.ftruncate(segment.descriptor, 3 * whole)
        os.ftruncate(segment.descriptor, 0)
        assert read(ReadPlan, segment, places)[0] == [-1] * 3


@pytest.mark.parametrize("length", [GRANULE_BYTES, 200_000])
def test_bytes_of_an_earlier_read_do_not_count_for_bytes_that_did_not_arrive(length: int) -> None:
    with segment_of([length] * 3) as segment:
        targets = [memoryview(bytearray(length)) for _ in range(3)]
        packed = b"".join(PLACE.pack(*extent.place()) for extent in segment.extents)
        plan = ReadPlan([DATA] * 3, targets, packed, GRANULE_BYTES, True)
        for end, right in ((3, [length] * 3), (1, [length, -1, -1]), (0, [-1] * 3)):
            os.ftruncate(segment.descriptor, end * (length + vector_bytes(length)))
            lengths = [-1] * 3
            plan.read_checked([(segment.descriptor, 0)], lengths)
            assert lengths == right


def test_what_does_not_go_together_is_refused(helper: HelperThread) -> None:
    with segment_of([100, GRANULE_BYTES + 1]) as segment:
        places = [extent.place() for extent in segment.extents]
        targets = [memoryview(bytearray(place[2])) for place in places]
        plan = ReadPlan([DATA] * 2, targets, b"".join(PLACE.pack(*place) for place in places), GRANULE_BYTES, True)
        for lengths in ([], [-1], [-1] * 3):
            with pytest.raises(ValueError, match="go together"):
                plan.read_checked([(segment.descriptor, 0)], lengths, helper)
        for descriptors in ([], [None] * 2):
            with pytest.raises(IndexError):
                plan.read_checked(descriptors, [-1] * 2, helper)
        lengths = [-1] * 2
        plan.read_checked([None], lengths, helper)
        assert lengths == [-1, -1]
        closed = os.dup(segment.descriptor)
        os.close(closed)
        plan.read_checked([(closed, 0)], lengths)
        assert lengths == [-1, -1]


@pytest.mark.parametrize("length", [4096, 200_000])
def test_what_is_not_cached_is_not_read_when_it_is_asked_first(length: int, tmp_path: Path) -> None:
    with segment_of([length] * 2) as memory, (tmp_path / "segment").open("w+b") as file:
        whole = length + vector_bytes(length)
        file.write(os.pread(memory.descriptor, 2 * whole, 0))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        places = [extent.place() for extent in memory.extents]
        targets = [memoryview(bytearray(length)) for _ in places]
        packed = b"".join(PLACE.pack(*place) for place in places)
        plan = ReadPlan([DATA] * 2, targets, packed, GRANULE_BYTES, True, True)
        lengths = [-1, -1]
        plan.read_checked([(file.fileno(), os.RWF_NOWAIT)], lengths)
        if lengths != [-1, -1]:
            pytest.skip("this file system keeps what it was told to drop")
        os.pread(file.fileno(), 2 * whole, 0)
        plan.read_checked([(file.fileno(), os.RWF_NOWAIT)], lengths)
        assert lengths == [length, length]


# --- the helper ------------------------------------------------------------------------------------------

BLOCKS: Final = 4 * HELPED_FROM_BYTES // GRANULE_BYTES


def threads_of_this_process() -> dict[int, tuple[str, int]]:
    """Return name and nanoseconds of CPU of each thread."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended
            spent = int((task / "schedstat").read_text().split()[0])
            found[int(task.name)] = ((task / "comm").read_text().strip(), spent)
    return found


def test_a_helper_takes_a_part_of_large_reads_and_ends_when_it_is_closed() -> None:
    before = set(threads_of_this_process())
    helper = HelperThread()
    [(number, (name, began))] = [item for item in threads_of_this_process().items() if item[0] not in before]
    assert name == "lake-helper"
    with segment_of([GRANULE_BYTES] * BLOCKS) as segment:
        places = [extent.place() for extent in segment.extents]
        for _ in range(200):
            assert read(ReadPlan, segment, places, helper)[0] == [GRANULE_BYTES] * BLOCKS
            if threads_of_this_process()[number][1] - began > 1_000_000:
                break
        else:
            raise AssertionError("the helper has done nothing")
        helper.close()
        assert number not in threads_of_this_process()
        assert read(ReadPlan, segment, places, helper)[0] == [GRANULE_BYTES] * BLOCKS, "alone"
    del helper
    HelperThread()
    assert set(threads_of_this_process()) <= before, "one that is freed has ended too"  # so may others meanwhile


def test_many_threads_share_one_helper_that_is_closed_meanwhile() -> None:
    helper, failed = HelperThread(), []
    with segment_of([GRANULE_BYTES, 300_000] * (BLOCKS // 2)) as segment:
        places = [extent.place() for extent in segment.extents]
        right = [len(extent.payload) for extent in segment.extents]

        def work(number: int) -> None:
            mine = places[number:] + places[:number]
            for _ in range(20):
                lengths, found = read(ReadPlan, segment, mine, helper)
                if lengths != right[number:] + right[:number] or found[0] != segment.extents[number].payload:
                    failed.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join()
        helper.close()
        for thread in threads[2:]:
            thread.join()
    assert not failed


def test_a_forked_child_reads_alone_and_waits_for_no_thread(helper: HelperThread) -> None:
    with segment_of([GRANULE_BYTES] * BLOCKS) as segment:
        places = [extent.place() for extent in segment.extents]
        stop = threading.Event()

        def keep_busy() -> None:
            while not stop.is_set():
                read(ReadPlan, segment, places, helper)

        busy = threading.Thread(target=keep_busy)  # so that the helper's locks are held at some forks
        busy.start()
        try:
            for _ in range(10):
                child = os.fork()
                if not child:
                    lengths = read(ReadPlan, segment, places, helper)[0]
                    helper.close()
                    os._exit(0 if lengths == [GRANULE_BYTES] * BLOCKS else 1)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            busy.join()
        assert read(ReadPlan, segment, places, helper)[0] == [GRANULE_BYTES] * BLOCKS
