"""The lease for an answer that takes long: only of an object that still has the pieces of the answer."""

from __future__ import annotations

import pytest
import trio

from gateway.s3.door.teaching import S3Door
from lakefs.errors import KeyNotFound
from lakefs.get.opened import Opened, Piece
from lakefs.ids import ChunkId
from lakefs.names import Name
from lakefs.wire.messages import ObjectStat

NAME = Name("bucket", "key")
FIRST, SECOND, THIRD = (ChunkId(b"\x01" + bytes([number]) * 32) for number in range(3))
MIB = 1 << 20


class _Contents:
    """Opens one object, or none, and notes what is closed."""

    def __init__(self, pieces: list[Piece] | None) -> None:
        self.closed: list[Opened] = []
        self._pieces = pieces

    async def open_leased(self, name: Name) -> Opened:
        await trio.lowlevel.checkpoint()
        if self._pieces is None:
            raise KeyNotFound("it was removed")
        stat = ObjectStat(name.bucket, name.key, kind=2, node=0, size_bytes=2 * MIB, etag="", mtime_ns=0)
        return Opened(name, stat, 1, self._pieces, {}, {})

    async def close(self, opened: Opened) -> None:
        await trio.lowlevel.checkpoint()
        self.closed.append(opened)


@pytest.mark.parametrize(
    ("pieces", "is_leased"),
    [
        ([Piece(FIRST, 0, MIB), Piece(SECOND, MIB, MIB)], True),
        ([Piece(FIRST, 0, MIB), Piece(SECOND, MIB, MIB), Piece(THIRD, 2 * MIB, 5)], True),
        ([Piece(SECOND, 0, MIB), Piece(FIRST, MIB, MIB)], False),
        ([Piece(THIRD, 0, 5), Piece(FIRST, 5, MIB), Piece(SECOND, MIB + 5, MIB)], False),
        ([Piece(FIRST, 0, MIB)], False),
        (None, False),
    ],
)
def test_an_object_is_leased_if_it_has_the_same_pieces_at_the_same_places(
    pieces: list[Piece] | None, is_leased: bool
) -> None:
    contents = _Contents(pieces)
    door = S3Door.__new__(S3Door)
    door.contents = contents  # type: ignore[assignment]
    wanted = [Piece(FIRST, 0, MIB), Piece(SECOND, MIB, MIB)]
    found = trio.run(door._leased, NAME, wanted)
    assert (found is not None) == is_leased
    assert len(contents.closed) == (pieces is not None and not is_leased)
