"""Records of keyed blobs: packed and read back, ordered by space, and refused when they are not whole."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from engine.format.keyed import (
    KEYED_HEAD,
    KEYED_PART,
    NOT_COUNTED,
    NUMBER_MAX,
    KeyedValue,
    SpaceRecord,
    space_and_key,
    unpack_space,
    unpack_value,
    value_key,
    values_range,
)
from lakefs.errors import StoreUnusable
from lakefs.ids import ChunkId
from lakefs.limits import CHUNK_BYTES, KEYED_PARTS_MAX, KEYED_VALUE_BYTES_MAX

NUMBERS = st.integers(0, NUMBER_MAX) | st.sampled_from([0, 1, NUMBER_MAX - 1, NUMBER_MAX])
KEYS = st.binary(min_size=1, max_size=64)
TIMES = st.integers(0, (1 << 64) - 1)
PARTS = st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(1, CHUNK_BYTES)), min_size=1, max_size=64)


def value_of(parts: list[tuple[bytes, int]], created: int = 1, expires: int = 0, depth: int = 0) -> KeyedValue:
    chunks = tuple(ChunkId(b"\x01" + digest) for digest, _ in parts)
    return KeyedValue(created, expires, depth, chunks, tuple(length for _, length in parts))


@given(PARTS, TIMES, TIMES, st.integers(0, 65_535))
def test_a_value_is_read_back_as_it_was_packed(
    parts: list[tuple[bytes, int]], created: int, expires: int, depth: int
) -> None:
    value = value_of(parts, created, expires, depth)
    assert unpack_value(value.pack()) == value
    assert value.size_bytes == sum(length for _, length in parts)


@given(PARTS, st.data())
def test_a_value_that_was_cut_or_grew_is_refused(parts: list[tuple[bytes, int]], data: st.DataObject) -> None:
    packed = value_of(parts).pack()
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(StoreUnusable):
        unpack_value(packed[:cut])
    with pytest.raises(StoreUnusable):
        unpack_value(packed + data.draw(st.binary(min_size=1, max_size=80)))


@pytest.mark.parametrize("length", [0, CHUNK_BYTES + 1, (1 << 32) - 1])
def test_a_part_of_an_impossible_length_is_refused(length: int) -> None:
    packed = KEYED_HEAD.pack(1, 0, 0, 1, 0, 0) + KEYED_PART.pack(bytes(32), length)
    with pytest.raises(StoreUnusable):
        unpack_value(packed)


def test_values_of_too_many_parts_or_bytes_are_refused() -> None:
    longest = [(bytes(32), CHUNK_BYTES)] * (KEYED_VALUE_BYTES_MAX // CHUNK_BYTES)
    assert unpack_value(value_of(longest).pack()).size_bytes == KEYED_VALUE_BYTES_MAX
    with pytest.raises(StoreUnusable):
        unpack_value(value_of([*longest, (bytes(32), 1)]).pack())
    count = KEYED_PARTS_MAX + 1
    with pytest.raises(StoreUnusable):
        unpack_value(KEYED_HEAD.pack(1, 0, 0, count, 0, 0) + KEYED_PART.pack(bytes(32), 1) * count)


@pytest.mark.parametrize(("version", "flags"), [(0, 0), (2, 0), (1, 1)])
def test_a_value_of_a_later_release_is_refused(version: int, flags: int) -> None:
    with pytest.raises(StoreUnusable, match="not known"):
        unpack_value(KEYED_HEAD.pack(version, flags, 0, 1, 0, 0) + KEYED_PART.pack(bytes(32), 1))


@given(NUMBERS, KEYS, NUMBERS, KEYS)
def test_values_of_a_space_are_together_and_no_two_share_a_key(a: int, key: bytes, b: int, other: bytes) -> None:
    place = value_key(a, key)
    assert space_and_key(place) == (a, key)
    assert (place == value_key(b, other)) == ((a, key) == (b, other))
    start, end = values_range(b)
    assert (start <= place < end) == (a == b)


@given(st.text(min_size=1, max_size=50), TIMES, st.integers(0, 1 << 62), st.booleans())
def test_a_space_is_read_back_as_it_was_packed(name: str, time: int, count: int, removed: bool) -> None:
    record = SpaceRecord(1, name, 0, time, count, time, count, count, removed, count)
    assert unpack_space(record.pack()) == record


def test_a_space_of_an_earlier_release_has_no_count_of_parts() -> None:
    record = SpaceRecord(1, "x", 0, 1, 2, 3, 4, 5, parts=6)
    earlier = msgspec.msgpack.encode(msgspec.msgpack.decode(record.pack())[:9])
    assert unpack_space(record.pack()) == record
    assert unpack_space(earlier) == msgspec.structs.replace(record, parts=NOT_COUNTED)


def test_a_space_of_a_later_release_is_refused() -> None:
    with pytest.raises(StoreUnusable, match="version 2"):
        unpack_space(SpaceRecord(2, "x", 0, 0, 0, 0, 0, 0).pack())
