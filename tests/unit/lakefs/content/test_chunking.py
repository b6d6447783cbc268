"""Cuts: every byte in one chunk, tensors at their own starts, the same file always cut alike."""

from __future__ import annotations

import json
from array import array
from itertools import islice

import pytest
from hypothesis import given, strategies as st

from lakefs.content.chunking import LARGE_TENSOR_BYTES, CutPlan, fixed_cuts, iter_extents, plan, plan_file, plan_growing
from lakefs.content.manifest import CutKind
from lakefs.content.safetensors import SafetensorsHeader, parse_header
from lakefs.errors import SourceChanged
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES, KIB, MIB

small_lengths = st.one_of(
    st.integers(0, LARGE_TENSOR_BYTES - 1), st.integers(0, 100), st.just(0), st.just(LARGE_TENSOR_BYTES - 1)
)
large_lengths = st.one_of(
    st.integers(LARGE_TENSOR_BYTES, 20 * MIB),
    st.sampled_from([LARGE_TENSOR_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES - 1]),
)
tensor_lists = st.lists(st.one_of(small_lengths, large_lengths), max_size=60)


def tensor_plan(lengths: list[int], header_length: int = 1000) -> CutPlan:
    """Return the plan of a file with these tensors."""
    header = SafetensorsHeader(header_length, array("Q", lengths))
    return CutPlan(header_length + sum(lengths), header)


def tensor_cuts(lengths: list[int], header_length: int = 1000) -> list[int]:
    """Return the lengths of the chunks after the header."""
    cuts = list(tensor_plan(lengths, header_length).lengths())
    return cuts[len(list(fixed_cuts(header_length))) :]


def starts(cuts: list[int]) -> set[int]:
    """Return the offsets at which chunks begin."""
    return {offset for offset, _ in iter_extents(cuts)}


def safetensors_prefix(lengths: list[int]) -> tuple[bytes, int]:
    """Return a real header for tensors of these lengths, with its length prefix, and the file's length."""
    members = {}
    for index, (offset, length) in enumerate(iter_extents(lengths)):
        members[f"t{index}"] = {"dtype": "U8", "shape": [length], "data_offsets": [offset, offset + length]}
    text = json.dumps(members).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + sum(lengths)


class Source:
    """A file that is `content`, then zeros up to `size_bytes`; notes what is read of it."""

    def __init__(self, content: bytes, size_bytes: int) -> None:
        self.content = content
        self.size_bytes = size_bytes
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset_bytes: int, length: int) -> bytes:
        self.reads.append((offset_bytes, length))
        end = min(offset_bytes + length, self.size_bytes)
        return self.content[offset_bytes:end].ljust(max(0, end - offset_bytes), b"\0")


# --- fixed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "cuts"),
    [
        (0, []),
        (1, [1]),
        (CHUNK_BYTES - 1, [CHUNK_BYTES - 1]),
        (CHUNK_BYTES, [CHUNK_BYTES]),
        (CHUNK_BYTES + 1, [CHUNK_BYTES, 1]),
        (3 * CHUNK_BYTES, [CHUNK_BYTES] * 3),
    ],
)
def test_fixed_cuts_are_every_4_mib(size_bytes: int, cuts: list[int]) -> None:
    assert list(fixed_cuts(size_bytes)) == cuts


def test_cuts_are_generated_not_listed() -> None:
    assert list(islice(CutPlan(BLOB_BYTES_MAX).lengths(), 3)) == [CHUNK_BYTES] * 3
    assert list(islice(tensor_plan([BLOB_BYTES_MAX]).lengths(), 3)) == [1000, CHUNK_BYTES, CHUNK_BYTES]


def test_a_plan_can_be_walked_twice() -> None:
    whole = tensor_plan([5 * MIB, 3, 4])
    assert list(whole.lengths()) == list(whole.lengths())


# --- tensors -----------------------------------------------------------------------------------------


def test_cuts_of_a_small_model_are_the_ones_they_always_were() -> None:
    big, norm = 6 * MIB, 8 * KIB
    lengths = [big, norm, norm, big, norm, 700 * KIB, 900 * KIB, 900 * KIB, 1023 * KIB, 900 * KIB, 1 * MIB]
    assert list(tensor_plan(lengths).lengths()) == [
        1000,
        4 * MIB, 2 * MIB,
        2 * norm,
        4 * MIB, 2 * MIB,
        norm + (700 + 900 + 900 + 1023) * KIB,
        900 * KIB,
        1 * MIB,
    ]  # fmt: skip


def test_small_tensors_fill_a_chunk_to_the_last_byte() -> None:
    assert tensor_cuts([512 * KIB] * 9) == [CHUNK_BYTES, 512 * KIB]
    assert tensor_cuts([512 * KIB] * 7 + [512 * KIB + 1, 0]) == [3584 * KIB, 512 * KIB + 1]


def test_a_header_over_4_mib_is_cut_too() -> None:
    assert list(tensor_plan([10], header_length=CHUNK_BYTES + 7).lengths()) == [CHUNK_BYTES, 7, 10]


def test_a_file_without_tensors_is_one_chunk() -> None:
    assert list(tensor_plan([]).lengths()) == [1000]
    assert list(tensor_plan([0, 0]).lengths()) == [1000]


@given(tensor_lists, st.sampled_from([10, 1000, CHUNK_BYTES, 9 * MIB + 1]))
def test_chunks_are_1_byte_to_4_mib_and_sum_to_the_file(lengths: list[int], header_length: int) -> None:
    whole = tensor_plan(lengths, header_length)
    cuts = list(whole.lengths())
    assert sum(cuts) == whole.size_bytes
    assert all(1 <= cut <= CHUNK_BYTES for cut in cuts)
    assert header_length in {*starts(cuts), whole.size_bytes}, "no chunk mixes header and tensors"


@given(tensor_lists)
def test_a_large_tensor_is_cut_from_its_own_start_to_its_own_end(lengths: list[int]) -> None:
    cuts = tensor_cuts(lengths)
    begun = starts(cuts) | {sum(cuts)}
    for offset, length in iter_extents(lengths):
        if length < LARGE_TENSOR_BYTES:
            continue
        within = {start - offset for start in begun if offset <= start <= offset + length}
        assert within == {*range(0, length, CHUNK_BYTES), length}


@given(tensor_lists)
def test_a_small_tensor_is_never_split_and_packed_as_long_as_the_next_fits(lengths: list[int]) -> None:
    cuts = tensor_cuts(lengths)
    begun = starts(cuts)
    extent_of_chunk = dict(iter_extents(cuts))
    run_start, packed = 0, 0
    for offset, length in iter_extents(lengths):
        if length >= LARGE_TENSOR_BYTES:
            run_start, packed = offset + length, 0
            continue
        assert not any(offset < start < offset + length for start in begun)
        if length and offset in begun and packed:
            assert packed + length > CHUNK_BYTES, "a chunk is closed only when the next tensor does not fit"
            assert extent_of_chunk[run_start] == packed
            run_start, packed = offset, 0
        packed += length


@given(tensor_lists, tensor_lists, tensor_lists)
def test_behind_a_large_tensor_nothing_before_it_moves_a_cut(
    before: list[int], other: list[int], after: list[int]
) -> None:
    tail = tensor_cuts([5 * MIB, *after])
    for head in (before, other, []):
        whole = tensor_cuts([*head, 5 * MIB, *after])
        assert whole[len(whole) - len(tail) :] == tail
        assert whole[: len(whole) - len(tail)] == tensor_cuts(head)


def test_within_a_run_a_changed_length_moves_cuts_only_up_to_the_next_large_tensor() -> None:
    run = [900 * KIB] * 20
    first = tensor_cuts([100, *run, 5 * MIB, *run])
    second = tensor_cuts([500 * KIB, *run, 5 * MIB, *run])
    assert first != second
    tail = tensor_cuts([5 * MIB, *run])
    assert first[-len(tail) :] == second[-len(tail) :] == tail


@given(tensor_lists)
def test_there_are_few_chunks_for_the_bytes(lengths: list[int]) -> None:
    cuts = tensor_cuts(lengths)
    total = sum(lengths)
    assert len(cuts) <= 2 * total // MIB + 1
    if all(length < LARGE_TENSOR_BYTES for length in lengths):
        assert len(cuts) <= total // (3 * MIB) + 1


@pytest.mark.parametrize("length", [1, 100, 4096, 65_535, 1 * MIB - 1])
def test_50_000_small_tensors_give_few_chunks(length: int) -> None:
    cuts = tensor_cuts([length] * 50_000)
    assert len(cuts) <= 50_000 * length // MIB + 1


# --- recognising -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3 * MIB), max_size=8))
def test_a_safetensors_file_is_planned_alike_from_memory_and_from_disk(lengths: list[int]) -> None:
    prefix, size_bytes = safetensors_prefix(lengths)
    source = Source(prefix, size_bytes)
    from_disk = plan_file(source.read_at, size_bytes)
    assert from_disk.cut_kind is CutKind.SAFETENSORS
    assert from_disk == plan(prefix, size_bytes) == plan(memoryview(prefix + bytes(5)), size_bytes)
    assert from_disk.header == parse_header(prefix, size_bytes)
    assert source.reads == [(0, 9), (9, len(prefix) - 9)]


@pytest.mark.parametrize(
    "change",
    [
        lambda prefix, size: (prefix, size + 1),
        lambda prefix, size: (prefix, size - 1),
        lambda prefix, size: (prefix[:-1] + b"]", size),
        lambda prefix, size: (b"\xff" * 8 + prefix[8:], size),
    ],
)
def test_a_file_that_only_looks_like_safetensors_is_cut_fixed(change: object) -> None:
    assert callable(change)
    prefix, size_bytes = change(*safetensors_prefix([5 * MIB, 7]))
    for made in (plan(prefix, size_bytes), plan_file(Source(prefix, size_bytes).read_at, size_bytes)):
        assert made == CutPlan(size_bytes)
        assert made.cut_kind is CutKind.FIXED
        assert list(made.lengths()) == list(fixed_cuts(size_bytes))


def test_a_file_with_another_beginning_is_read_for_9_bytes_only() -> None:
    for content in (b"\x93NUMPY\x01\x00v", bytes(64), b"x" * 64, (100).to_bytes(8, "little") + b"[" + bytes(100)):
        source = Source(content, 10 * MIB)
        assert plan_file(source.read_at, 10 * MIB) == CutPlan(10 * MIB)
        assert source.reads == [(0, 9)]


@pytest.mark.parametrize("size_bytes", range(10))
def test_a_file_too_short_for_a_header_is_not_read_at_all(size_bytes: int) -> None:
    source = Source(bytes(size_bytes), size_bytes)
    assert plan_file(source.read_at, size_bytes) == CutPlan(size_bytes) == plan(b"", size_bytes)
    assert source.reads == []


@pytest.mark.parametrize("left_bytes", [0, 5, 8, 9, 20])
def test_a_file_that_shrinks_while_it_is_read_is_reported(left_bytes: int) -> None:
    prefix, size_bytes = safetensors_prefix([5 * MIB])
    with pytest.raises(SourceChanged, match="nothing writes to it"):
        plan_file(Source(prefix, left_bytes).read_at, size_bytes)


def test_a_length_prefix_that_changes_between_the_reads_is_the_one_first_read() -> None:
    prefix, size_bytes = safetensors_prefix([5 * MIB])
    source = Source(prefix, size_bytes)

    def read_at(offset_bytes: int, length: int) -> bytes:
        piece = source.read_at(offset_bytes, length)
        source.content = b"\xff" * 9 + prefix[9:]
        return piece

    assert plan_file(read_at, size_bytes) == plan(prefix, size_bytes)


@given(st.lists(st.integers(0, 3 * MIB), max_size=8), st.integers(0, 30 * MIB))
def test_a_growing_safetensors_file_is_planned_from_its_header(lengths: list[int], so_far: int) -> None:
    prefix, size_bytes = safetensors_prefix(lengths)
    grown = min(so_far, size_bytes)
    planned = plan_growing(Source(prefix, grown).read_at, grown)
    assert planned == (plan(prefix, size_bytes) if grown >= max(len(prefix), 10) else None)


@pytest.mark.parametrize("beginning", [b"\x93NUMPY\x01\x00v", bytes(64), (100).to_bytes(8, "little") + b"[" * 200])
def test_any_other_growing_file_is_cut_fixed_for_as_long_as_it_gets(beginning: bytes) -> None:
    planned = plan_growing(Source(beginning, 10 * MIB).read_at, 10 * MIB)
    assert planned == CutPlan(BLOB_BYTES_MAX)


def test_a_growing_file_whose_header_breaks_a_rule_is_cut_fixed() -> None:
    prefix, size_bytes = safetensors_prefix([5 * MIB, 7])
    for broken in (prefix[:-1] + b"]", prefix.replace(b"data_offsets", b"data_offsetx\xff")[: len(prefix)]):
        planned = plan_growing(Source(broken, size_bytes).read_at, size_bytes)
        assert planned is not None
        assert planned.header is None


def test_extents_follow_each_other_from_0() -> None:
    assert list(iter_extents([3, 1, 5])) == [(0, 3), (3, 1), (4, 5)]
    assert list(iter_extents([])) == []
