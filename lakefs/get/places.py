"""Chunks that are wanted: where they are as far as is known, and who receives them.

`ask_for_places` asks the engine for grants.  `lakefs.get.fetch` fetches what they point to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from lakefs.get.opened import Piece, noted_grant
from lakefs.grants.grant_reads import require_present
from lakefs.ids import ChunkId
from lakefs.steps.steps import Steps, send
from lakefs.wire.messages import Grant, Locate, Located

GROUPS_MIN = 4


class Sink(Protocol):
    """Receives whole chunks.  Called from several threads, never for the same piece at once."""

    @property
    def in_place(self) -> bool:
        """True if each piece has memory of its own; else a thread has one memory, valid until `deliver`."""
        ...

    def memory_for(self, piece: Piece) -> memoryview:
        """Return memory of `piece.length` bytes to fetch into."""
        ...

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        """Take a piece that has been fetched into that memory and checked."""
        ...


class BufferSink:
    """One buffer for the blob, or for its bytes from `offset` on; chunks land in it directly."""

    in_place = True

    def __init__(self, target: memoryview, offset: int = 0) -> None:
        self._target = target
        self._offset = offset

    def memory_for(self, piece: Piece) -> memoryview:
        begin = piece.offset - self._offset
        return self._target[begin : begin + piece.length]

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        return None


class Places(Protocol):
    """Known places of chunks: those of an opened object, or of chunks that are read by id."""

    @property
    def name(self) -> object:
        """Name of the object, or of the chunk, in errors."""

    grants: dict[ChunkId, Grant]
    inline: dict[ChunkId, bytes]


class Wanted(NamedTuple):
    """A whole chunk to fetch, its known places, and the sink that receives it."""

    opened: Places
    piece: Piece
    sink: Sink


def ask_for_places(chunks: Mapping[ChunkId, Places], media: int) -> Steps[dict[ChunkId, Grant]]:
    """Ask the engine for grants of chunks, each wanted for an object.  ChunkNotFound."""
    reply = yield from send(Locate([bytes(chunk) for chunk in chunks], media))
    assert isinstance(reply.message, Located)
    found = (noted_grant(grant, reply.epoch) for grant in reply.message.grants)
    grants = dict(zip(chunks, found, strict=True))
    for chunk, grant in grants.items():
        require_present(chunk, grant, str(chunks[chunk].name))
    return grants


def groups(wanted: Sequence[Wanted], group_bytes: int) -> Iterator[list[Wanted]]:
    """Group chunks, at most `group_bytes` in a group.

    One thread, or one request, fetches a group: few hand-overs, and still work for several.
    """
    limit = min(group_bytes, length_of(wanted) // GROUPS_MIN)
    group: list[Wanted] = []
    size = 0
    for want in wanted:
        if group and size + want.piece.length > limit:
            yield group
            group, size = [], 0
        group.append(want)
        size += want.piece.length
    if group:
        yield group


def length_of(wanted: Sequence[Wanted]) -> int:
    """Return the bytes of all these chunks."""
    return sum(want.piece.length for want in wanted)
