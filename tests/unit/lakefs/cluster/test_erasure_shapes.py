"""Where the shards of a chunk begin and end: one rule for every length."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from lakefs.cluster import erasure
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import InvalidArgument, StoreUnusable
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES, KIB
from tests.unit.lakefs.cluster.chunks_cut import CODES, boundaries, chunk_of, data_shards_of

EVERY_CODE = pytest.mark.parametrize("name", CODES)
REFUSED = [0, -1, CHUNK_BYTES + 1]
lengths = st.integers(1, CHUNK_BYTES)


@EVERY_CODE
def test_data_shards_are_plain_slices_of_the_chunk_at_all_boundaries(name: str) -> None:
    code = CODES[name]
    for length in boundaries(code.data):
        chunk = chunk_of(length)
        extents = [code.extent(length, shard) for shard in range(code.data_shards(length))]
        assert [chunk[at : at + size] for at, size in extents] == data_shards_of(chunk, code.data), length


@EVERY_CODE
@given(length=lengths)
@example(length=CHUNK_BYTES - GRANULE_BYTES + 1)
def test_shards_lie_behind_each_other_at_granules_and_only_the_last_is_short(name: str, length: int) -> None:
    code = CODES[name]
    step, count = code.shard_bytes(length), code.data_shards(length)
    extents = [code.extent(length, shard) for shard in range(count)]
    assert [offset for offset, _ in extents] == [shard * step for shard in range(count)]
    assert [size for _, size in extents[:-1]] == [step] * (count - 1)
    assert 0 < extents[-1][1] <= step
    assert sum(extents[-1]) == length
    assert step == length if count == 1 else step % GRANULE_BYTES == 0
    assert 1 <= count <= code.data


@EVERY_CODE
@given(length=lengths)
def test_a_shard_has_no_granule_more_than_it_needs(name: str, length: int) -> None:
    code = CODES[name]
    step = code.shard_bytes(length)
    if step > GRANULE_BYTES and code.data > 1:
        assert code.data * (step - GRANULE_BYTES) < length


@EVERY_CODE
@given(length=lengths)
def test_all_shards_that_exist_are_numbered_and_make_up_what_is_stored(name: str, length: int) -> None:
    code = CODES[name]
    shards = code.shards(length)
    assert list(shards) == sorted({*range(code.data_shards(length)), *range(code.data, code.data + code.parity)})
    assert sum(code.part_bytes(length, shard) for shard in shards) == code.stored_bytes(length)
    assert code.stored_bytes(length) <= length + code.parity * max(length / code.data + GRANULE_BYTES, 1)


@pytest.mark.parametrize(("length", "stored"), [(4 * KIB, 12 * KIB), (100 * KIB, 228 * KIB), (CHUNK_BYTES, 6144 * KIB)])
def test_stored_bytes_of_known_chunks(length: int, stored: int) -> None:
    assert CODES["4+2"].stored_bytes(length) == stored


@EVERY_CODE
@given(length=lengths, ends=st.tuples(st.integers(0, CHUNK_BYTES), st.integers(0, CHUNK_BYTES)))
def test_pieces_of_a_range_are_that_range_of_the_chunk(name: str, length: int, ends: tuple[int, int]) -> None:
    code = CODES[name]
    offset, end = sorted(min(place, length) for place in ends)
    pieces = code.pieces(length, offset, end - offset)
    at = offset
    for shard, begin, stop in pieces:
        assert 0 <= begin < stop == begin + code.part_bytes(length, shard, begin, stop)
        assert code.extent(length, shard)[0] + begin == at
        at += stop - begin
    assert at == end


@EVERY_CODE
@given(length=lengths, ends=st.tuples(st.integers(0, CHUNK_BYTES), st.integers(0, CHUNK_BYTES)))
def test_a_part_of_a_shard_is_as_long_as_its_slice(name: str, length: int, ends: tuple[int, int]) -> None:
    code = CODES[name]
    begin, end = sorted(place % (code.shard_bytes(length) + 1) for place in ends)
    if begin == end:
        return
    for shard in code.shards(length):
        assert code.part_bytes(length, shard, begin, end) == len(range(code.part_bytes(length, shard))[begin:end])


@EVERY_CODE
def test_behind_the_end_of_a_short_last_shard_one_shard_less_is_needed(name: str) -> None:
    code = CODES[name]
    for length in boundaries(code.data):
        count = code.data_shards(length)
        last = code.part_bytes(length, count - 1)
        assert code.needed(length) == code.needed(length, last - 1) == count
        if last < code.shard_bytes(length):
            assert code.needed(length, last) == count - 1 >= 1


@EVERY_CODE
@pytest.mark.parametrize("length", REFUSED)
def test_lengths_that_no_chunk_has_are_refused(name: str, length: int) -> None:
    code = CODES[name]
    asked = (code.shard_bytes, code.data_shards, code.shards, code.stored_bytes, code.needed)
    for method in asked:
        with pytest.raises(InvalidArgument, match=f"a chunk of {length} bytes"):
            method(length)
    with pytest.raises(InvalidArgument):
        code.encode(bytes(max(length, 0)), [bytearray(1)] * code.parity)
    with pytest.raises(InvalidArgument):
        code.rebuild(length, {0: b"x"}, {code.data: bytearray(1)})


@EVERY_CODE
def test_shards_that_a_chunk_does_not_have_are_refused(name: str) -> None:
    code = CODES[name]
    for shard in (-1, 1, code.data + code.parity):
        if shard == code.data:
            continue
        with pytest.raises(InvalidArgument, match=f"no data shard {shard}"):
            code.part_bytes(4096, shard)
    with pytest.raises(InvalidArgument, match="no data shard"):
        code.extent(4096, code.data)


@pytest.mark.parametrize("ends", [(0, 4097), (-1, 5), (5, 5), (4096, None)])
def test_ranges_outside_a_shard_are_refused(ends: tuple[int, int | None]) -> None:
    with pytest.raises(InvalidArgument, match="of shards that have 4096"):
        CODES["4+2"].part_bytes(4096, 0, *ends)
    with pytest.raises(InvalidArgument, match="of shards that have 4096"):
        CODES["4+2"].rebuild(4096, {0: b""}, {5: bytearray()}, *ends)


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, 4097), (4097, 0), (5, -1)])
def test_ranges_outside_a_chunk_are_refused(offset: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="of a chunk of 4096"):
        CODES["4+2"].pieces(4096, offset, size)


@pytest.mark.parametrize(("data", "parity"), [(0, 1), (4, 1), (5, 2), (2, 4), (4, -2), (8, 3)])
def test_codes_that_no_lake_has_are_refused_with_those_that_may_be_had(data: int, parity: int) -> None:
    with pytest.raises(InvalidArgument, match=r"it is one of 4\+2, 1\+0, 1\+1, 2\+1, 8\+2"):
        ErasureCode(data, parity)


def test_without_its_native_module_no_code_is_made_and_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasure, "Code", None)
    with pytest.raises(StoreUnusable, match="libisal-dev"):
        ErasureCode(4, 2)
