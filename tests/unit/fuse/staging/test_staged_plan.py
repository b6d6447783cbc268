"""The plan of an edited file: which chunks are kept, and how the rest is cut."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings, strategies as st

from fuse.staging.byte_ranges import RangeSet
from fuse.staging.commit import Cut, Store, plan_cuts
from lakefs.get.opened import Piece
from lakefs.ids import ChunkId
from lakefs.limits import CHUNK_BYTES
from tests.edited_file import small_chunks
from tests.lengths import repeated

SMALL_CHUNK = 100


def pieces_of(lengths: list[int]) -> list[Piece]:
    pieces: list[Piece] = []
    for number, length in enumerate(lengths):
        offset = pieces[-1].offset + pieces[-1].length if pieces else 0
        pieces.append(Piece(ChunkId(b"\x01%032d" % number), offset, length))
    return pieces


def lengths_of(cuts: list[Cut]) -> list[int]:
    return [cut.length for cut in cuts]


@settings(max_examples=repeated(400, 2000))
@given(
    st.lists(st.integers(1, SMALL_CHUNK), max_size=8),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 150)), max_size=5),
    st.integers(0, 900),
    st.integers(0, 900),
    st.sampled_from([0, 64]),
)
def test_a_plan_covers_the_content_and_keeps_what_no_change_touches(
    lengths: list[int], writes: list[tuple[int, int]], hidden_from: int, more: int, small_payload: int
) -> None:
    pieces = pieces_of(lengths)
    base_bytes = min(sum(lengths), hidden_from)
    written = RangeSet((offset, offset + length) for offset, length in writes)
    size = max(base_bytes, written.end, more)
    with small_chunks(SMALL_CHUNK, small_payload):
        cuts = plan_cuts(pieces, written, base_bytes, size)
    at = 0
    for cut in cuts:
        assert cut.offset == at
        assert 1 <= cut.length <= SMALL_CHUNK
        at += cut.length
    assert at == size
    kept = [cut for cut in cuts if isinstance(cut, Piece)]
    for piece in kept:
        assert piece in pieces
        assert not written.overlaps(piece.offset, piece.offset + piece.length)
        assert piece.offset + piece.length <= base_bytes
    if size <= small_payload:
        assert len(cuts) <= max(1, len(kept))
        return
    # Chunks that no change touches are kept, but for the shorter ones before a new end.
    untouched = [
        piece
        for piece in pieces
        if piece.offset + piece.length <= base_bytes and not written.overlaps(piece.offset, piece.offset + piece.length)
    ]
    assert kept == untouched[: len(kept)]
    along = untouched[len(kept) :]
    assert all(piece.length < SMALL_CHUNK for piece in along)
    if size == sum(lengths) == base_bytes:
        assert along == []
        assert lengths_of(cuts) == lengths
    if along:
        tail = size - max(piece.offset + piece.length for piece in along)
        assert along[-1].length < 2 * tail


@pytest.mark.parametrize("appended", [1, 100, 1000, "random", "falling"])
def test_small_appends_leave_few_chunks_and_store_few_bytes(appended: int | str) -> None:
    rng = random.Random(5)
    lengths: list[int] = []
    stored = size = 0
    longest = 0
    with small_chunks(1 << 20, 0):
        for number in range(4000):
            more = {"random": int(2 ** rng.uniform(0, 14)), "falling": 4000 - number}.get(str(appended))
            more = int(appended) if more is None else more
            written = RangeSet([(size, size + more)])
            cuts = plan_cuts(pieces_of(lengths), written, size, size + more)
            stored += sum(cut.length for cut in cuts if isinstance(cut, Store))
            lengths, size = lengths_of(cuts), size + more
            short = [length for length in lengths if length < 1 << 20]
            assert lengths == [1 << 20] * (len(lengths) - len(short)) + short
            assert all(first >= 2 * second for first, second in itertools.pairwise(short))
            longest = max(longest, len(short))
    assert longest <= 21
    assert stored <= size * 14


def test_an_appended_end_is_cut_as_a_whole_file_is_once_it_is_long() -> None:
    size = 3 * CHUNK_BYTES + 5000
    lengths = [CHUNK_BYTES] * 3 + [5000]
    more = 5 * CHUNK_BYTES
    cuts = plan_cuts(pieces_of(lengths), RangeSet([(size, size + more)]), size, size + more)
    assert lengths_of(cuts) == [CHUNK_BYTES] * 8 + [5000]
    assert [type(cut) for cut in cuts] == [Piece] * 3 + [Store] * 6
