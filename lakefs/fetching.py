"""Fetching chunks: grants -> bytes, checked, written once as steps.

Each chunk is fetched by the best mover there is: from the segment file by descriptor (`movers`), inline with the
answer to `OpenObjects`, or streamed (`ReadChunks`).  Whatever moved it, the bytes are checked here, by BLAKE3
against the chunk's id unless the caller asked for CRC32C; a range of a chunk is checked by granule.

Rules kept here:
- A failed check is followed by one fresh locate and one more read; then the engine is asked for the bytes, which
  reads past the page cache and notes damage.  What fails then is ChunkDamaged naming the object.
- At most `WINDOW` groups of chunks (16 MiB each at most), or streamed chunks, are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from lakefs.errors import ChunkNotFound, CorruptionError, StaleGrant
from lakefs.ids import ChunkId, SegmentId
from lakefs.movers import check_digest, check_granules, damaged, fetch_into, fetch_range, require_present
from lakefs.opened import Access, Opened, Piece
from lakefs.service import Reply
from lakefs.steps import Pipeline, Send, Steps, Work, send, work
from lakefs.wire.messages import (
    Grant,
    Locate,
    Located,
    OpenSegments,
    ReadChunks,
    ReadChunksReply,
    ReadPiece,
    SegmentsOpened,
)

WINDOW = 6
"""Groups of chunks, or streamed chunks, in flight: enough to keep two threads and a disk busy."""
GROUP_BYTES_MAX = 16 << 20
GROUPS_MIN = 4
LOCATE_BATCH = 1024
DESCRIPTORS_PER_REQUEST = 64


class Sink(Protocol):
    """Where whole chunks go.  Called from several threads, each time for another place."""

    @property
    def in_place(self) -> bool:
        """Whether each piece has memory of its own; else a thread has one, good until `deliver`."""
        ...

    def memory_for(self, piece: Piece) -> memoryview:
        """Memory of `piece.length` bytes to fetch into."""
        ...

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        """The piece has been fetched into that memory and checked."""
        ...


class BufferSink:
    """One buffer for the whole blob; chunks land in it directly."""

    in_place = True

    def __init__(self, target: memoryview) -> None:
        self._target = target

    def memory_for(self, piece: Piece) -> memoryview:
        return self._target[piece.offset : piece.offset + piece.length]

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        return None


def fetch_pieces(access: Access, opened: Opened, pieces: Sequence[Piece], sink: Sink) -> Steps[None]:
    """Fetch whole chunks into the sink, several at once.  ChunkDamaged, ChunkNotFound, EngineUnreachable."""
    pipeline = Pipeline(WINDOW)
    for start in range(0, len(pieces), LOCATE_BATCH):
        batch = pieces[start : start + LOCATE_BATCH]
        yield from locate(access, opened, [piece.chunk for piece in batch])
        local: list[Piece] = []
        for piece in batch:
            if piece.chunk in opened.inline:
                _deliver_inline(opened, piece, sink)
                access.progress(piece.length, 0)
            elif access.can_use_descriptors:
                local.append(piece)
            else:
                yield from _submit_streamed(access, opened, piece, sink, pipeline)
        for group in _groups(local):
            yield from _submit_local(access, opened, group, sink, pipeline)
    yield from pipeline.drain()


def locate(access: Access, opened: Opened, chunks: Sequence[ChunkId]) -> Steps[None]:
    """Have the grants of these chunks, and the descriptors of their segments.  ChunkNotFound, EngineUnreachable."""
    unknown = [
        chunk for chunk in dict.fromkeys(chunks) if chunk not in opened.grants and chunk not in opened.inline
    ]
    if unknown:
        yield from _locate(opened, unknown)
    if access.can_use_descriptors:
        grants = (opened.grants[chunk] for chunk in chunks if chunk in opened.grants)
        yield from _need_descriptors(access, {SegmentId(grant.segment) for grant in grants})


def _locate(opened: Opened, chunks: list[ChunkId]) -> Steps[None]:
    reply = yield from send(Locate([bytes(chunk) for chunk in chunks]))
    assert isinstance(reply.message, Located)
    for chunk, grant in zip(chunks, reply.message.grants, strict=True):
        require_present(chunk, grant)
        opened.grants[chunk] = grant


def _need_descriptors(access: Access, segments: set[SegmentId]) -> Steps[None]:
    missing = access.descriptors.missing(segments)
    for start in range(0, len(missing), DESCRIPTORS_PER_REQUEST):
        wanted = missing[start : start + DESCRIPTORS_PER_REQUEST]
        reply = yield from send(OpenSegments([int(segment) for segment in wanted]))
        assert isinstance(reply.message, SegmentsOpened)
        for segment, descriptor in zip(reply.message.segments, reply.descriptors, strict=True):
            access.descriptors.add(SegmentId(segment), descriptor)


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that one thread fetches in one go: few hand-overs, and still work for several threads."""
    limit = min(GROUP_BYTES_MAX, sum(piece.length for piece in pieces) // GROUPS_MIN)
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.length > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.length
    if group:
        yield group


def _submit_local(
    access: Access, opened: Opened, group: Sequence[Piece], sink: Sink, pipeline: Pipeline
) -> Steps[None]:
    def done(stale: list[Piece]) -> Steps[None]:
        access.progress(sum(piece.length for piece in group) - sum(piece.length for piece in stale), 0)
        for piece in stale:
            yield from _fetch_again(access, opened, piece, sink)

    grants = [opened.grants[piece.chunk] for piece in group]
    yield from pipeline.submit(Work(_fetch_group, (access, group, grants, sink)), done)


def _submit_streamed(
    access: Access, opened: Opened, piece: Piece, sink: Sink, pipeline: Pipeline
) -> Steps[None]:
    memory = _memory_to_stream(piece, sink)

    def received(reply: Reply) -> Steps[None]:
        yield from work(_check_streamed, opened, piece, reply, memory, sink)
        access.progress(piece.length, 0)

    request = ReadChunks([bytes(piece.chunk)], [0], [0])
    yield from pipeline.submit(Send(request, into=[memory]), received)


def _fetch_group(access: Access, group: Sequence[Piece], grants: Sequence[Grant], sink: Sink) -> list[Piece]:
    """Fetch and check each; those whose check failed, to be fetched again."""
    stale: list[Piece] = []
    for piece, grant in zip(group, grants, strict=True):
        try:
            _fetch_local(access, piece, grant, sink)
        except StaleGrant:
            stale.append(piece)
    return stale


def _fetch_local(access: Access, piece: Piece, grant: Grant, sink: Sink) -> None:
    memory = sink.memory_for(piece)
    if grant.logical_bytes != piece.length:
        raise StaleGrant("the grant's length is not the chunk's")
    fetch_into(access.descriptors, piece.chunk, grant, memory, access.check)
    sink.deliver(piece, memory)


def _memory_to_stream(piece: Piece, sink: Sink) -> memoryview:
    return sink.memory_for(piece) if sink.in_place else memoryview(bytearray(piece.length))


def _check_streamed(opened: Opened, piece: Piece, reply: Reply, memory: memoryview, sink: Sink) -> None:
    """The engine's word is final: it has looked past the page cache too.  ChunkDamaged, ChunkNotFound, ..."""
    answer = _streamed_piece(opened, piece, reply)
    if (answer.offset, answer.length) != (0, piece.length):
        raise ChunkNotFound(f"{opened.name}: the engine sent another range than was asked for")
    try:
        check_digest(piece.chunk, memory)
    except StaleGrant:
        raise damaged(piece.chunk, str(opened.name)) from None
    sink.deliver(piece, memory)


def _streamed_piece(opened: Opened, piece: Piece, reply: Reply) -> ReadPiece:
    """The only piece of an answer; its failure is raised with the object's name."""
    assert isinstance(reply.message, ReadChunksReply)
    (answer,) = reply.message.pieces
    if answer.failure is None:
        return answer
    error = answer.failure.as_error()
    if isinstance(error, CorruptionError):
        raise damaged(piece.chunk, str(opened.name), error.message) from error
    raise type(error)(f"{opened.name}: {error.message}", subject=str(opened.name)) from error


def _deliver_inline(opened: Opened, piece: Piece, sink: Sink) -> None:
    memory = sink.memory_for(piece)
    memory[:] = opened.inline[piece.chunk]
    sink.deliver(piece, memory)


def _fetch_again(access: Access, opened: Opened, piece: Piece, sink: Sink) -> Steps[None]:
    """After a failed check: locate anew and read once more; then let the engine read, which knows what damage is."""
    yield from _locate(opened, [piece.chunk])
    grant = opened.grants[piece.chunk]
    yield from _need_descriptors(access, {SegmentId(grant.segment)})
    try:
        yield from work(_fetch_local, access, piece, grant, sink)
    except StaleGrant:
        memory = _memory_to_stream(piece, sink)
        reply = yield from send(ReadChunks([bytes(piece.chunk)], [0], [0]), into=[memory])
        yield from work(_check_streamed, opened, piece, reply, memory, sink)
    access.progress(piece.length, 0)


def fetch_part(access: Access, opened: Opened, piece: Piece, offset: int, length: int) -> Steps[memoryview]:
    """A range inside one chunk, checked by granule."""
    if piece.chunk in opened.inline:
        return memoryview(opened.inline[piece.chunk])[offset : offset + length]
    yield from locate(access, opened, [piece.chunk])
    if not access.can_use_descriptors:
        return (yield from _stream_part(opened, piece, offset, length))
    try:
        grant = opened.grants[piece.chunk]
        return (yield from work(fetch_range, access.descriptors, piece.chunk, grant, offset, length))
    except StaleGrant:
        yield from _locate(opened, [piece.chunk])
        grant = opened.grants[piece.chunk]
        yield from _need_descriptors(access, {SegmentId(grant.segment)})
    try:
        return (yield from work(fetch_range, access.descriptors, piece.chunk, grant, offset, length))
    except StaleGrant:
        return (yield from _stream_part(opened, piece, offset, length))


def _stream_part(opened: Opened, piece: Piece, offset: int, length: int) -> Steps[memoryview]:
    reply = yield from send(ReadChunks([bytes(piece.chunk)], [offset], [length]))
    payload = memoryview(reply.body.joined())
    reply.body.release()
    answer = _streamed_piece(opened, piece, reply)
    if not (
        answer.offset <= offset
        and offset + length <= answer.offset + answer.length == answer.offset + len(payload)
    ):
        raise ChunkNotFound(f"{opened.name}: the engine sent another range than was asked for")
    try:
        check_granules(piece.chunk, payload, answer.crcs)
    except StaleGrant:
        raise damaged(piece.chunk, str(opened.name)) from None
    return payload[offset - answer.offset : offset - answer.offset + length]
