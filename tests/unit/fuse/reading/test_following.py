"""Content that begins with the whole of an earlier one: found by chunks first, then by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from hypothesis import given, strategies as st

from fuse.reading import following
from fuse.reading.blob_reader import BlobReader
from fuse.reading.following import appended, common_bytes
from lakefs.get.opened import Piece
from lakefs.ids import data_chunk_id


class Content:
    """A content of these chunks; counts the bytes that are read of it."""

    def __init__(self, *chunks: bytes) -> None:
        pieces, at = [], 0
        for chunk in chunks:
            pieces.append(Piece(data_chunk_id(chunk), at, len(chunk)))
            at += len(chunk)
        self.bytes = b"".join(chunks)
        self.opened = SimpleNamespace(pieces=pieces, stat=SimpleNamespace(size_bytes=at))
        self.read_bytes = 0

    async def read(self, offset: int, length: int) -> bytes:
        found = self.bytes[offset : offset + length]
        self.read_bytes += len(found)
        return found


def found(own: Content, longer: Content, *, keep: bool = True) -> bytes | None:
    """Return what is appended."""

    async def main() -> bytes | None:
        return await appended(cast(BlobReader, own), cast(BlobReader, longer), keep=keep)

    return trio.run(main)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare by 3 bytes, at most 20."""
    monkeypatch.setattr(following, "_STEP_BYTES", 3)
    monkeypatch.setattr(following, "COMPARED_MAX", 20)


def test_same_chunks_are_not_read() -> None:
    own, longer = Content(b"first", b"second"), Content(b"first", b"second", b"third")
    assert common_bytes(own.opened.pieces, longer.opened.pieces) == 11
    assert found(own, longer, keep=False) == b""
    assert (own.read_bytes, longer.read_bytes) == (0, 0)
    assert found(own, longer) == b"third"


def test_chunks_that_were_cut_anew_are_compared() -> None:
    own, longer = Content(b"first", b"se"), Content(b"first", b"second")
    assert found(own, longer) == b"cond"
    assert own.read_bytes == 2
    assert found(Content(b"first", b"so"), longer) is None
    assert found(Content(b"first"), Content(b"fi", b"rst")) == b""


def test_shorter_content_and_too_much_are_not_followed() -> None:
    assert found(Content(b"first"), Content(b"firs")) is None
    assert found(Content(), Content(b"any")) == b"any"
    assert found(Content(), Content(b"x" * 21)) is None
    assert found(Content(), Content(b"x" * 21), keep=False) == b""
    assert found(Content(b"x" * 21), Content(b"x" * 22)) is None


def test_a_reader_that_returns_too_little_is_not_followed() -> None:
    own, longer = Content(b"first"), Content(b"first and more")
    own.bytes = b"fir"
    assert found(own, longer) is None
    own, longer = Content(b"first"), Content(b"first", b" and more")
    longer.bytes = b"first and"
    assert found(own, longer) is None


def _cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[begin:end] for begin, end in pairwise(places)]


@given(
    own=st.binary(max_size=18), added=st.binary(max_size=18), flip=st.integers(-1, 17),
    cuts=st.tuples(st.lists(st.integers(1, 20), max_size=4), st.lists(st.integers(1, 20), max_size=4)),
)  # fmt: skip
def test_the_answer_is_that_of_the_bytes(
    own: bytes, added: bytes, flip: int, cuts: tuple[list[int], list[int]]
) -> None:
    longer = bytearray(own + added)
    if 0 <= flip < len(longer):
        longer[flip] ^= 1
    expected = bytes(longer[len(own) :]) if longer.startswith(own) else None
    assert found(Content(*_cut(own, cuts[0])), Content(*_cut(bytes(longer), cuts[1]))) == expected
