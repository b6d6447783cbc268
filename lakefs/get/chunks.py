"""Reading chunks by their ids, written once as steps; no object is opened and no lease is taken.

A chunk that no name refers to may be removed at any moment.  Its bytes are checked like those of any read.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakefs.errors import ChunkDamaged, InvalidArgument
from lakefs.get.fetch import LOCATE_BATCH, fetch_wanted
from lakefs.get.opened import Access, Piece
from lakefs.get.places import BufferSink, Wanted, ask_for_places
from lakefs.host.new_bytes import NewBytes
from lakefs.ids import EMPTY_CHUNK, ChunkId, id_text, is_well_formed
from lakefs.steps.steps import Steps
from lakefs.wire.messages import Grant


class ChunkPlace:
    """The place of one chunk, as far as it is known; a `Places` for one chunk."""

    __slots__ = ("chunk", "grants", "inline")

    def __init__(self, chunk: ChunkId) -> None:
        self.chunk = chunk
        self.grants: dict[ChunkId, Grant] = {}
        self.inline: dict[ChunkId, bytes] = {EMPTY_CHUNK: b""} if chunk == EMPTY_CHUNK else {}

    @property
    def name(self) -> str:
        """Name of the chunk in errors."""
        return id_text(self.chunk)

    @property
    def length(self) -> int:
        """Length of the chunk in bytes; the chunk has been located."""
        return self.grants[self.chunk].logical_bytes if self.grants else 0


def get_chunks_into(access: Access, chunks: Sequence[ChunkId], targets: Sequence[memoryview]) -> Steps[list[int]]:
    """Read chunks, each into memory of the caller; return their lengths.  After an error the memory may hold anything.

    ChunkNotFound, ChunkDamaged; InvalidArgument when memory is too short, or an id is not well formed.
    """
    places = yield from _located(access, chunks)
    wanted: list[Wanted] = []
    for place, target in zip(places, targets, strict=True):
        length = place.length
        if len(target) < length:
            raise InvalidArgument(
                f"chunk {place.name} has {length} bytes, the buffer for it only {len(target)}", subject=place.name
            )
        wanted.append(_wanted(place, target[:length]))
    yield from _fetch(access, wanted)
    return [place.length for place in places]


def get_chunks(access: Access, chunks: Sequence[ChunkId]) -> Steps[list[bytes]]:
    """Return chunks as bytes, in order.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
    places = yield from _located(access, chunks)
    found = [NewBytes(place.length) for place in places]
    wanted = [_wanted(place, new.view) for place, new in zip(places, found, strict=True)]
    yield from _fetch(access, wanted)
    del wanted
    return [new.take() for new in found]


def _located(access: Access, chunks: Sequence[ChunkId]) -> Steps[list[ChunkPlace]]:
    places: dict[ChunkId, ChunkPlace] = {}
    for chunk in chunks:
        if not is_well_formed(chunk):
            raise InvalidArgument(f"{bytes(chunk).hex()} is no chunk's id: 33 bytes, and a known kind")
        places[chunk] = ChunkPlace(chunk)
    unknown = [chunk for chunk in places if chunk != EMPTY_CHUNK]
    for start in range(0, len(unknown), LOCATE_BATCH):
        batch = unknown[start : start + LOCATE_BATCH]
        found = yield from ask_for_places({chunk: places[chunk] for chunk in batch}, access.media_now)
        for chunk, grant in found.items():
            places[chunk].grants[chunk] = grant
    return [places[chunk] for chunk in chunks]


def _wanted(place: ChunkPlace, target: memoryview) -> Wanted:
    return Wanted(place, Piece(place.chunk, 0, len(target)), BufferSink(target))


def _fetch(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    try:
        yield from fetch_wanted(access, wanted)
    except ChunkDamaged as error:
        raise ChunkDamaged(
            f"a chunk is damaged on disk and was not read ({error.message}); see whose it is with: lake fsck --full",
            subject=error.subject,
        ) from error
