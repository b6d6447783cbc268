"""The erasure code against plain arithmetic, and every loss that it must outlive."""

from __future__ import annotations

import hashlib
import threading
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.cluster._erasure import Code
from lakefs.cluster.erasure import TABLES_MAX, ErasureCode
from lakefs.errors import InvalidArgument
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES
from tests.oracles.gf256 import is_invertible, parity_of
from tests.unit.lakefs.cluster.chunks_cut import CODES, boundaries, chunk_of, data_shards_of, encoded, rebuilt

EVERY_CODE = pytest.mark.parametrize("name", CODES)
GOLDEN = {
    ("4+2", 1): "80adb3e643a62e95",
    ("4+2", 65_536): "1ebe3ac89ac75b62",
    ("4+2", 100_000): "a84291dc9d0ade57",
    ("4+2", 4_194_304): "0cd8048c061f548b",
    ("4+2", 4_190_001): "c30cb9f1288e68b4",
    ("8+2", 1): "80adb3e643a62e95",
    ("8+2", 65_536): "1ebe3ac89ac75b62",
    ("8+2", 100_000): "747415634e5fb592",
    ("8+2", 4_194_304): "6a8cded98e9d89f0",
    ("8+2", 4_190_001): "5d6ecf69974640d0",
}
"""First 16 digits of the SHA-256 of all parity.  Stored bytes depend on them: they never change."""


@EVERY_CODE
def test_parity_is_that_of_plain_arithmetic_at_all_boundaries(name: str) -> None:
    code = CODES[name]
    for length in boundaries(code.data):
        shards = encoded(code, chunk_of(length))
        wanted = parity_of(data_shards_of(chunk_of(length), code.data), code.data, code.parity)
        assert [shards[code.data + row] for row in range(code.parity)] == wanted, length


@pytest.mark.parametrize(("name", "length"), GOLDEN)
def test_parity_is_the_same_for_ever(name: str, length: int) -> None:
    code = CODES[name]
    chunk = hashlib.shake_128(b"golden").digest(length)
    shards = encoded(code, chunk)
    digest = hashlib.sha256(b"".join(shards[code.data + row] for row in range(code.parity))).hexdigest()
    assert digest[:16] == GOLDEN[name, length]


@EVERY_CODE
def test_a_lone_shard_lies_there_in_copies(name: str) -> None:
    code = CODES[name]
    for length in (1, 63, 4096, GRANULE_BYTES):
        assert set(encoded(code, chunk_of(length)).values()) == {chunk_of(length)}


@EVERY_CODE
def test_any_rows_of_the_code_are_independent(name: str) -> None:
    """Exhaustive: k of the k+m rows, for each number of data shards that exist."""
    code = CODES[name]
    rows = _rows_seen(code)
    for count in range(1, code.data + 1):
        existing = [*range(count), *range(code.data, code.data + code.parity)]
        for chosen in combinations(existing, count):
            assert is_invertible([rows[shard][:count] for shard in chosen]), chosen


def _rows_seen(code: ErasureCode) -> list[list[int]]:
    """Return the rows of the code as they show in parity: each data shard in turn is all ones, the others are zeros."""
    columns = []
    for column in range(code.data):
        chunk = bytearray(code.data * GRANULE_BYTES)
        chunk[column * GRANULE_BYTES : (column + 1) * GRANULE_BYTES] = b"\x01" * GRANULE_BYTES
        shards = encoded(code, bytes(chunk))
        assert all(len(set(shards[code.data + row])) == 1 for row in range(code.parity))
        columns.append([shards[code.data + row][0] for row in range(code.parity)])
    units = [[int(i == column) for i in range(code.data)] for column in range(code.data)]
    return units + [[column[row] for column in columns] for row in range(code.parity)]


def test_a_matrix_that_is_not_invertible_is_noticed() -> None:
    assert not is_invertible([[1, 2], [2, 4]])
    assert is_invertible([[1, 2], [2, 5]])


@EVERY_CODE
def test_every_loss_of_as_many_shards_as_there_is_parity_is_made_good(name: str) -> None:
    code = CODES[name]
    for length in boundaries(code.data):
        shards = encoded(code, chunk_of(length))
        for lost in (pattern for many in range(code.parity + 1) for pattern in combinations(shards, many)):
            present = {shard: content for shard, content in shards.items() if shard not in lost}
            assert rebuilt(code, length, present, list(lost)) == {shard: shards[shard] for shard in lost}, length


@st.composite
def cases(draw: st.DrawFn, name: str) -> tuple[int, list[int], list[int], int, int]:
    """Return a length, the shards that are present and wanted, and a range of them."""
    code = CODES[name]
    length = draw(st.one_of(st.sampled_from(boundaries(code.data)), st.integers(1, CHUNK_BYTES)))
    order = draw(st.permutations(code.shards(length)))
    begin = draw(st.integers(0, code.shard_bytes(length) - 1))
    end = draw(st.integers(begin + 1, min(begin + 3 * GRANULE_BYTES, code.shard_bytes(length))))
    count = code.data_shards(length)
    return length, order[:count], order[count:], begin, end


@pytest.mark.parametrize("name", ["4+2", "1+1", "2+1", "8+2"])
@settings(max_examples=60)
@given(choices=st.data())
def test_any_range_of_all_others_is_made_from_that_of_just_enough_shards(name: str, choices: st.DataObject) -> None:
    code = CODES[name]
    length, present, wanted, begin, end = choices.draw(cases(name))
    shards = encoded(code, chunk_of(length))
    made = rebuilt(code, length, {shard: shards[shard] for shard in present}, wanted, begin, end)
    assert made == {shard: shards[shard][begin:end] for shard in wanted}


@pytest.mark.parametrize("name", ["4+2", "8+2"])
def test_behind_the_end_of_the_last_shard_any_of_one_less_are_enough(name: str) -> None:
    code = CODES[name]
    length = code.data * GRANULE_BYTES - 40_000
    shards = encoded(code, chunk_of(length))
    full = [shard for shard in shards if shard != code.data - 1]
    begin = GRANULE_BYTES - 40_000
    for present in combinations(full, code.needed(length, begin)):
        wanted = [shard for shard in full if shard not in present]
        made = rebuilt(code, length, {shard: shards[shard] for shard in present}, wanted, begin)
        assert made == {shard: shards[shard][begin:] for shard in wanted}


@pytest.mark.parametrize("name", ["4+2", "1+1", "8+2"])
@given(length=st.integers(1, 700_000), place=st.integers(0, 699_999), bit=st.integers(0, 7))
def test_a_flipped_bit_changes_one_byte_of_each_parity_shard(name: str, length: int, place: int, bit: int) -> None:
    code = CODES[name]
    chunk = chunk_of(length)
    place %= length
    flipped = bytearray(chunk)
    flipped[place] ^= 1 << bit
    before, after = encoded(code, chunk), encoded(code, bytes(flipped))
    at = place % code.shard_bytes(length)
    for shard in range(code.data, code.data + code.parity):
        assert before[shard][at] != after[shard][at]
        assert before[shard][:at] + before[shard][at + 1 :] == after[shard][:at] + after[shard][at + 1 :]


@pytest.mark.parametrize("lost", [1, 4])
def test_a_flipped_bit_of_a_source_changes_what_is_made(lost: int) -> None:
    code = CODES["4+2"]
    shards = encoded(code, chunk_of(300_000))
    present = {shard: content for shard, content in shards.items() if shard not in (lost, 5)}
    for source, content in present.items():
        wrong = present | {source: bytes([content[0] ^ 0x80]) + content[1:]}
        assert rebuilt(code, 300_000, wrong, [lost])[lost] != shards[lost], source


@pytest.mark.parametrize("length", [1, 4096, GRANULE_BYTES + 1, 1_000_001])
def test_nothing_is_written_beside_the_memory_passed(length: int) -> None:
    code = CODES["4+2"]
    step, room = code.shard_bytes(length), 64
    memory = bytearray(b"\xa5" * (2 * step + 3 * room))
    views = [memoryview(memory)[row * (step + room) + room :][:step] for row in range(2)]
    chunk = bytearray(chunk_of(length))
    code.encode(chunk, views)
    shards = encoded(code, chunk_of(length))
    gap = b"\xa5" * room
    assert memory == gap + shards[4] + gap + shards[5] + gap
    code.rebuild(length, {0: chunk[:step], **dict(enumerate(data_shards_of(bytes(chunk), 4)))}, {4: views[0]})
    assert memory == gap + shards[4] + gap + shards[5] + gap
    assert chunk == chunk_of(length)


def test_shards_are_made_in_place_between_the_others_of_a_chunk() -> None:
    """A degraded read: data shards are read into the chunk's memory, the lost one is made where it belongs."""
    code, length = CODES["4+2"], 1_000_001
    shards = encoded(code, chunk_of(length))
    for lost in range(4):
        chunk = bytearray(chunk_of(length))
        places = {}
        for shard in range(4):
            at, size = code.extent(length, shard)
            places[shard] = memoryview(chunk)[at : at + size]
        wanted = {lost: places.pop(lost)}
        wanted[lost][:] = bytes(len(wanted[lost]))
        code.rebuild(length, {**places, 5: shards[5]}, wanted)
        assert chunk == chunk_of(length)


def test_every_pattern_of_the_longest_code_is_kept_within_the_bound() -> None:
    code = Code(8, 2, 2, 16, TABLES_MAX)
    granule = bytes(2)
    for count in range(1, 9):
        existing = [*range(count), 8, 9]
        for present in combinations(existing, count):
            others = [shard for shard in existing if shard not in present]
            for wanted in ([others[0]], [others[1]], others):
                room = {shard: bytearray(2) for shard in wanted}
                code.rebuild(2 * count, dict.fromkeys(present, granule), room, 0, 2)
    assert code.tables_kept == 483 <= TABLES_MAX


def test_a_code_that_keeps_no_more_tables_is_right_as_well() -> None:
    code, length = ErasureCode(4, 2), 300_000
    code._code = Code(4, 2, GRANULE_BYTES, CHUNK_BYTES, 1)
    shards = encoded(code, chunk_of(length))
    for lost in combinations(shards, 2):
        present = {shard: content for shard, content in shards.items() if shard not in lost}
        assert rebuilt(code, length, present, list(lost)) == {shard: shards[shard] for shard in lost}
        assert code._code.tables_kept == 1


def test_many_threads_use_one_code() -> None:
    code = ErasureCode(4, 2)
    code._code = Code(4, 2, GRANULE_BYTES, CHUNK_BYTES, 2)
    lengths = [300_000, 777_777, CHUNK_BYTES, 100_000]
    wrong: list[int] = []

    def work(length: int) -> None:
        shards = encoded(CODES["4+2"], chunk_of(length))
        for lost in [*combinations(shards, 2)] * 3:
            present = {shard: content for shard, content in shards.items() if shard not in lost}
            if rebuilt(code, length, present, list(lost)) != {shard: shards[shard] for shard in lost}:
                wrong.append(length)

    threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_with_nothing_lost_nothing_is_made() -> None:
    for code in CODES.values():
        code.rebuild(4096, {0: chunk_of(4096)}, {})
    CODES["1+0"].encode(chunk_of(4096), [])


def test_memory_of_wrong_length_or_number_is_refused_before_anything_is_written() -> None:
    code, chunk = CODES["4+2"], chunk_of(500_000)
    step = code.shard_bytes(500_000)
    room = bytearray(step)
    for rows in ([], [room], [room, bytearray(step - 1)], [room, bytearray(step + 1)], [room, bytearray(step), room]):
        with pytest.raises(InvalidArgument):
            code.encode(chunk, rows)
    shards = encoded(code, chunk)
    present = {shard: shards[shard] for shard in (0, 1, 2, 5)}
    with pytest.raises(InvalidArgument, match=f"memory of {step - 1} bytes for shard 2"):
        code.rebuild(500_000, present | {2: shards[2][1:]}, {4: room})
    with pytest.raises(InvalidArgument, match="for shard 3, which has 106784 there"):
        code.rebuild(500_000, present, {3: room})
    with pytest.raises(InvalidArgument, match="memory of 10 bytes for shard 0"):
        code.rebuild(500_000, {shard: content[:10] for shard, content in present.items()}, {4: room[:11]}, 0, 11)
    assert room == bytes(step)


def test_too_few_shards_are_refused_with_how_many_are_needed() -> None:
    code = CODES["4+2"]
    shards = encoded(code, chunk_of(500_000))
    with pytest.raises(InvalidArgument, match="3 shards are present, and 4 are needed"):
        code.rebuild(500_000, {shard: shards[shard] for shard in (0, 2, 5)}, {1: bytearray(len(shards[1]))})
    with pytest.raises(InvalidArgument, match="0 shards are present, and 1 are needed"):
        CODES["1+0"].rebuild(4096, {}, {0: bytearray(4096)})


@pytest.mark.parametrize("shard", [-1, 2, 3, 6, 100])
def test_a_shard_that_the_chunk_does_not_have_is_refused(shard: int) -> None:
    code, length = CODES["4+2"], 100_000
    shards = encoded(code, chunk_of(length))
    with pytest.raises(InvalidArgument, match=f"the chunk has no shard {shard}"):
        code.rebuild(length, {0: shards[0], shard: b""}, {})
    with pytest.raises(InvalidArgument, match=f"the chunk has no shard {shard}"):
        code.rebuild(length, {0: shards[0], 4: shards[4]}, {shard: bytearray()})


def test_a_shard_that_is_present_and_wanted_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="shard 4 is present"):
        CODES["4+2"].rebuild(4096, {4: chunk_of(4096)}, {4: bytearray(4096)})


def test_memory_that_overlaps_is_refused() -> None:
    code = CODES["4+2"]
    memory = memoryview(bytearray(3 * 4096))
    with pytest.raises(InvalidArgument, match="overlaps"):
        code.encode(memory[:4096], [memory[4095 : 4095 + 4096], bytearray(4096)])
    with pytest.raises(InvalidArgument, match="overlaps"):
        code.encode(bytes(4096), [memory[:4096], memory[:4096]])
    with pytest.raises(InvalidArgument, match="overlaps"):
        code.rebuild(4096, {0: memory[:4096]}, {4: memory[1:4097]})
    code.encode(memory[4096:8192], [memory[:4096], memory[8192:]])


def test_memory_that_is_read_only_or_in_pieces_is_refused() -> None:
    code = CODES["4+2"]
    with pytest.raises(BufferError):
        code.encode(bytes(4096), [bytearray(4096), bytes(4096)])
    with pytest.raises(BufferError):
        code.encode(memoryview(bytes(8192))[::2], [bytearray(4096), bytearray(4096)])
