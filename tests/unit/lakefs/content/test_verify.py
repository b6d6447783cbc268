"""Checks of a chunk's bytes: the right ones pass in each way, and one bit or one byte off is refused in each way."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from crc32c import crc32c
from hypothesis import example, given, settings, strategies as st

from engine.format.checksums import check_payload, seal_payload, vector_of
from engine.format.extents import large_extent_bytes
from engine.format.layouts import ChunkRecord
from lakefs.content.verify import (
    NO_VECTOR,
    Check,
    GranuleCrcs,
    crcs_between,
    crcs_of,
    granule_crcs,
    granule_crcs_around,
    granules_around,
    matches,
    matches_id,
    mismatch,
    room_for_vector,
    vector_bytes,
)
from lakefs.errors import StaleGrant
from lakefs.ids import Birth, ChunkId, ChunkKind, SegmentId, chunk_id_of, id_text
from lakefs.limits import GRANULE_BYTES

G = GRANULE_BYTES
BORDERS = (1, 2, G - 1, G, G + 1, 2 * G, 3 * G + 5)
lengths = st.one_of(st.sampled_from(BORDERS), st.integers(1, 3 * G))
kinds = st.sampled_from(ChunkKind)
positions = st.integers(0, 1 << 40)
"""A position, taken modulo the number of bits."""
FEW = settings(max_examples=60, deadline=None)


class Stored:
    """A payload as the engine writes it: sealed by the writer's side, and a reader's copy of what lies there."""

    def __init__(self, length: int, kind: ChunkKind = ChunkKind.DATA) -> None:
        self.payload = bytearray(random.Random(length).randbytes(length))
        self.chunk = chunk_id_of(kind, self.payload)
        extent = memoryview(bytearray(large_extent_bytes(length)))
        extent[:length] = self.payload
        self.crc = seal_payload(extent, length, vector_of(self.payload))
        self.vector = bytearray(extent[length : length + vector_bytes(length)])
        self.record = ChunkRecord(Birth(1), SegmentId(1), 0, length, length, self.crc)

    def by_id(self) -> bool:
        asked = matches_id(self.chunk, self.payload)
        assert asked == matches(self.chunk, self.payload, Check.BLAKE3, 0, NO_VECTOR)
        return asked

    def by_crc(self) -> bool:
        return matches(self.chunk, memoryview(self.payload), Check.CRC32C, self.crc, memoryview(self.vector))

    def by_crcs(self) -> bool:
        """Check like a reader of a range: the vector first, then granules."""
        try:
            crcs = crcs_of(self.chunk, self.vector, self.crc)
        except StaleGrant:
            return False
        return granule_crcs(self.payload) == crcs

    def by_record(self) -> bool:
        """Check like the engine."""
        return check_payload(self.record, self.payload, self.vector)


WAYS: tuple[Callable[[Stored], bool], ...] = (Stored.by_id, Stored.by_crc, Stored.by_crcs, Stored.by_record)


def _turn(content: bytearray, position: int) -> None:
    """Flip one bit."""
    at, bit = divmod(position % (8 * len(content)), 8)
    content[at] ^= 1 << bit


@FEW
@given(lengths, kinds)
def test_the_right_bytes_pass_in_each_way(length: int, kind: ChunkKind) -> None:
    stored = Stored(length, kind)
    assert [way(stored) for way in WAYS] == [True] * len(WAYS)


@FEW
@given(lengths, kinds, positions)
def test_a_bit_of_the_payload_is_refused_in_each_way_that_looks(length: int, kind: ChunkKind, position: int) -> None:
    stored = Stored(length, kind)
    _turn(stored.payload, position)
    assert [way(stored) for way in WAYS] == [False] * len(WAYS)
    assert matches(stored.chunk, stored.payload, Check.NONE, stored.crc, stored.vector)


@FEW
@given(st.integers(G + 1, 3 * G), positions)
def test_a_bit_of_the_vector_is_refused_in_each_way_that_looks_at_it(length: int, position: int) -> None:
    stored = Stored(length)
    _turn(stored.vector, position)
    assert [way(stored) for way in WAYS] == [True, False, False, False]
    with pytest.raises(StaleGrant, match="the checksums of chunk"):
        crcs_of(stored.chunk, stored.vector, stored.crc)


@FEW
@given(lengths, kinds, st.integers(0, 31), positions)
def test_a_bit_of_the_checksum_or_of_the_id_is_refused(length: int, kind: ChunkKind, bit: int, position: int) -> None:
    stored = Stored(length, kind)
    stored.crc ^= 1 << bit
    assert (stored.by_crc(), stored.by_crcs()) == (False, False)
    name = bytearray(stored.chunk)
    _turn(name, position)
    assert not matches_id(bytes(name), stored.payload)


@FEW
@given(lengths, st.integers(1, 2 * G), st.booleans())
@example(G + 1, 1, False)
@example(G, 1, True)
@example(1, 1, False)
def test_another_length_is_refused_in_each_way(length: int, change: int, longer: bool) -> None:
    """This holds when the surplus is zeros, and when what is left is nothing or a granule."""
    stored = Stored(length)
    if longer:
        stored.payload += bytes(change)
    else:
        del stored.payload[-change:]
    assert [way(stored) for way in WAYS] == [False] * len(WAYS)


@FEW
@given(st.integers(G + 1, 3 * G), st.integers(1, 12), st.booleans())
def test_a_vector_of_another_length_is_refused(length: int, change: int, longer: bool) -> None:
    stored = Stored(length)
    if longer:
        stored.vector += bytes(change)
    else:
        del stored.vector[-change:]
    assert (stored.by_crc(), stored.by_record()) == (False, False)
    assert not matches(stored.chunk, stored.payload, Check.CRC32C, crc32c(stored.payload), NO_VECTOR)
    stored.crc = crc32c(stored.vector)  # checked, but not the vector of this payload
    assert (stored.by_crc(), stored.by_crcs()) == (False, False)


@FEW
@given(lengths, positions, st.integers(1, 2 * G), positions)
def test_a_range_is_checked_by_its_granules_and_no_others(length: int, offset: int, wanted: int, position: int) -> None:
    stored = Stored(length)
    offset %= length
    wanted = min(wanted, length - offset)
    begin, end = granules_around(offset, wanted, length)
    assert begin <= offset < offset + wanted <= end <= length
    assert begin % G == 0
    assert end % G == 0 or end == length
    assert end - begin < wanted + 2 * G
    crcs = crcs_between(crcs_of(stored.chunk, stored.vector, stored.crc), begin, end)
    assert granule_crcs(memoryview(stored.payload)[begin:end]) == crcs
    _turn(stored.payload, position)
    is_inside = begin <= position % (8 * length) // 8 < end
    assert (granule_crcs(memoryview(stored.payload)[begin:end]) == crcs) != is_inside


@FEW
@given(lengths)
def test_the_vector_has_the_crc_of_each_granule(length: int) -> None:
    stored = Stored(length)
    granules = [stored.payload[at : at + G] for at in range(0, length, G)]
    crcs = b"".join(crc32c(bytes(granule)).to_bytes(4, "little") for granule in granules)
    assert granule_crcs(stored.payload) == crcs
    assert stored.vector == (crcs if len(granules) > 1 else b"")
    assert len(room_for_vector(length, Check.CRC32C)) == len(stored.vector) == vector_bytes(length)
    assert {len(room_for_vector(length, check)) for check in (Check.BLAKE3, Check.NONE)} == {0}


def test_no_bytes_are_no_chunk_by_their_checksum() -> None:
    assert not matches(chunk_id_of(ChunkKind.DATA, b""), b"", Check.CRC32C, 0)
    assert matches_id(chunk_id_of(ChunkKind.DATA, b""), b"")


@pytest.mark.parametrize("kind", ChunkKind)
def test_bytes_are_no_chunk_of_another_kind(kind: ChunkKind) -> None:
    chunk = chunk_id_of(kind, b"content")
    assert matches_id(chunk, b"content")
    for other in {*range(256)} - {kind}:
        assert not matches_id(bytes([other]) + chunk[1:], b"content")


@pytest.mark.parametrize("check", [Check.BLAKE3, Check.CRC32C])
def test_the_error_names_the_chunk(check: Check) -> None:
    chunk = ChunkId(chunk_id_of(ChunkKind.DATA, b"content"))
    error = mismatch(chunk, check)
    assert id_text(chunk) in error.message
    assert error.subject == id_text(chunk)


@FEW
@given(st.integers(0, G - 1), lengths, st.integers(0, G - 1), st.integers(0, 99))
@example(0, G, 0, 1)
@example(5, G - 5, 0, 1)
@example(5, 3, 7, 1)
@example(0, 2 * G + 1, G - 1, 1)
def test_granules_in_three_pieces_have_the_crcs_of_the_whole(lead: int, length: int, trail: int, seed: int) -> None:
    if trail:  # as in a range: the last piece ends the granule that the middle one begins, or is shorter
        trail = min(trail, -(lead + length) % G)
    whole = random.Random(seed).randbytes(lead + length + trail)
    pieces = whole[:lead], whole[lead : lead + length], whole[lead + length :]
    assert granule_crcs_around(*pieces) == granule_crcs(whole)


@FEW
@given(lengths, st.lists(st.integers(0, 3 * G + 5), max_size=6), positions)
@example(3 * G + 5, [1, G, 3 * G + 4], 3 * G + 4)
def test_granules_that_are_taken_as_they_arrive_are_judged_as_all_at_once(
    length: int, arrivals: list[int], position: int
) -> None:
    stored = Stored(length)
    view = memoryview(stored.payload)
    for is_right in (True, False):
        if not is_right:
            view[position % length] ^= 1
        crcs = GranuleCrcs()
        for arrived in sorted(arrivals):
            crcs.take(view, arrived)
            if arrived < length:
                assert not crcs.match(stored.crc, stored.vector), "a part was taken for the whole"
        crcs.take(view, length)
        crcs.take(view, length)
        assert crcs.match(stored.crc, stored.vector) == stored.by_crc() == is_right
        assert not crcs.match(stored.crc ^ 1, stored.vector)
