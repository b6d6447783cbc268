"""Fetching chunks: grants -> bytes, checked, written once as steps.

Each chunk is fetched by the best mover there is: from the segment file by descriptor or from the engine's DRAM tier by
mapping (`movers`), inline with the
answer to `OpenObjects`, or streamed (`ReadChunks`).  Whatever moved it, the bytes are checked here, by BLAKE3
against the chunk's id unless the caller asked for CRC32C, or for bytes unverified; a range of a chunk is checked by
granule.

Rules kept here:
- A failed check is followed by one fresh locate and one more read; then the engine is asked for the bytes, which
  reads past the page cache and notes damage.  What fails then is ChunkDamaged naming the object.
- At most `FETCH_WINDOW` groups of chunks (16 MiB each at most), or streamed chunks, are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from lakefs.content.verify import Check, damaged, granule_crcs, matches_id
from lakefs.errors import ChunkNotFound, CorruptionError, StaleGrant
from lakefs.get.opened import Access, Opened, Piece
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import (
    BRING_IN_FROM,
    fetch_cached,
    fetch_into,
    fetch_range,
    missing_for,
    read_ahead,
    require_present,
)
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import FETCH_GROUP_BYTES, FETCH_WINDOW, SLABS_PER_REQUEST_MAX
from lakefs.steps.steps import Pipeline, Send, Steps, Work, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    Grant,
    Locate,
    Located,
    OpenSegments,
    OpenSlabs,
    ReadChunks,
    ReadChunksReply,
    ReadPiece,
    SegmentsOpened,
    SlabsOpened,
)

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


class Places(Protocol):
    """What is known of the places of chunks: of an opened object, or of chunks asked for by id."""

    @property
    def name(self) -> object:
        """What errors name."""

    grants: dict[ChunkId, Grant]
    inline: dict[ChunkId, bytes]


class Wanted(NamedTuple):
    """A whole chunk, what is known of its place, and where it goes."""

    opened: Places
    piece: Piece
    sink: Sink


def fetch_pieces(access: Access, opened: Places, pieces: Sequence[Piece], sink: Sink) -> Steps[None]:
    """Fetch whole chunks into the sink, several at once.  ChunkDamaged, ChunkNotFound, EngineUnreachable."""
    return fetch_wanted(access, [Wanted(opened, piece, sink) for piece in pieces])


def fetch_wanted(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    """Fetch chunks of any number of opened objects, several at once; errors name the object.  As `fetch_pieces`."""
    pipeline = Pipeline(FETCH_WINDOW)
    try:
        for start in range(0, len(wanted), LOCATE_BATCH):
            yield from _fetch_batch(access, wanted[start : start + LOCATE_BATCH], pipeline)
        yield from pipeline.drain()
    except (ChunkNotFound, StaleGrant):
        yield from pipeline.settle()  # who begins anew may do so in the same memory
        raise


def _fetch_batch(access: Access, batch: Sequence[Wanted], pipeline: Pipeline) -> Steps[None]:
    yield from _locate_wanted(access, batch)
    local: list[Wanted] = []
    for want in batch:
        if want.piece.chunk in want.opened.inline:
            _deliver_inline(want)
            access.progress(want.piece.length, 0)
        elif access.can_use_descriptors:
            local.append(want)
        else:
            yield from _submit_streamed(access, want, pipeline)
    for group in _groups(_not_at_once(access, local)):
        yield from _submit_local(access, group, pipeline)


def locate(access: Access, opened: Places, chunks: Sequence[ChunkId]) -> Steps[None]:
    """Have the grants of these chunks, and the descriptors of their segments.  ChunkNotFound, EngineUnreachable."""
    unknown = [
        chunk for chunk in dict.fromkeys(chunks) if chunk not in opened.grants and chunk not in opened.inline
    ]
    if unknown:
        yield from _locate(opened, unknown, access.media)
    if access.can_use_descriptors:
        grants = (opened.grants[chunk] for chunk in chunks if chunk in opened.grants)
        yield from _need_descriptors(access, grants)


def _locate(opened: Places, chunks: list[ChunkId], media: int) -> Steps[None]:
    opened.grants.update((yield from ask_for_places(dict.fromkeys(chunks, opened), media)))


def ask_for_places(chunks: Mapping[ChunkId, Places], media: int) -> Steps[dict[ChunkId, Grant]]:
    """Grants of chunks, each wanted for an object.  ChunkNotFound."""
    reply = yield from send(Locate([bytes(chunk) for chunk in chunks], media))
    assert isinstance(reply.message, Located)
    grants = dict(zip(chunks, reply.message.grants, strict=True))
    for chunk, grant in grants.items():
        require_present(chunk, grant, str(chunks[chunk].name))
    return grants


def _need_descriptors(access: Access, grants: Iterable[Grant]) -> Steps[None]:
    """Have the descriptors of the segments that grants point to, and the slabs."""
    segments, slabs = missing_for(access.descriptors, grants)
    for start in range(0, len(slabs), SLABS_PER_REQUEST_MAX):
        reply = yield from send(OpenSlabs(slabs[start : start + SLABS_PER_REQUEST_MAX]))
        assert isinstance(reply.message, SlabsOpened)
        opened = reply.message
        access.descriptors.slabs.add(opened.slabs, reply.descriptors, opened.slab_bytes)
    yield from need_segments(access.descriptors, segments)


def need_segments(descriptors: SegmentDescriptors, segments: Sequence[SegmentId]) -> Steps[None]:
    """Have descriptors of segments that there are none of, as far as the engine gives them.  PermissionDenied."""
    for start in range(0, len(segments), DESCRIPTORS_PER_REQUEST):
        wanted = segments[start : start + DESCRIPTORS_PER_REQUEST]
        reply = yield from send(OpenSegments([int(segment) for segment in wanted]))
        assert isinstance(reply.message, SegmentsOpened)
        for segment, descriptor in zip(reply.message.segments, reply.descriptors, strict=True):
            descriptors.add(SegmentId(segment), descriptor)


def _locate_wanted(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    """`locate` for chunks of several objects, in one request."""
    unknown = {
        want.piece.chunk: want.opened
        for want in wanted
        if want.piece.chunk not in want.opened.grants and want.piece.chunk not in want.opened.inline
    }
    if unknown:
        found = yield from ask_for_places(unknown, access.media)
        for want in wanted:
            if want.piece.chunk in found:
                want.opened.grants[want.piece.chunk] = found[want.piece.chunk]
    if access.can_use_descriptors:
        grants = (want.opened.grants.get(want.piece.chunk) for want in wanted)
        yield from _need_descriptors(access, (grant for grant in grants if grant))


def _not_at_once(access: Access, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Fetch what is short and in the page cache here and now, looking at `at_once_bytes` at most; what is left.

    A thread's round trip costs as much as to copy and check two or three granules.
    """
    left: list[Wanted] = []
    room = access.at_once_bytes
    for want in wanted:
        length = want.piece.length
        if length > room:
            left.append(want)
            continue
        room -= length
        if want.sink.in_place and _is_fetched_at_once(access, want, want.opened.grants[want.piece.chunk]):
            access.progress(length, 0)
        else:
            left.append(want)
    return left


def _is_fetched_at_once(access: Access, want: Wanted, grant: Grant) -> bool:
    """Whether a short chunk was in the page cache, and its bytes were right; else the disk begins to read it."""
    if grant.logical_bytes != want.piece.length or grant.logical_bytes >= BRING_IN_FROM:
        return False
    memory = want.sink.memory_for(want.piece)
    try:
        is_there = fetch_cached(access.descriptors, want.piece.chunk, grant, memory, access.check)
    except StaleGrant:
        return False  # it is read once more, and then looked for again
    if is_there:
        want.sink.deliver(want.piece, memory)
    return is_there


def is_fetched_at_once(access: Access, opened: Opened, target: memoryview) -> bool:
    """Whether all content of an object is one chunk that is at hand, and right; now it is in `target`, as long as it.

    Nobody is asked, and nothing waited for.
    """
    if len(opened.pieces) != 1:
        return not opened.pieces
    chunk, _, length = opened.pieces[0]
    grant = opened.grants.get(chunk)
    if grant is None:
        content = opened.inline.get(chunk)
        if content is not None:
            target[:] = content
        return content is not None
    if not access.can_use_descriptors or not len(target) == length == grant.logical_bytes < BRING_IN_FROM:
        return False
    try:
        return fetch_cached(access.descriptors, chunk, grant, target, access.check)
    except StaleGrant:
        return False


def _groups(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Chunks that one thread fetches in one go: few hand-overs, and still work for several threads."""
    limit = min(FETCH_GROUP_BYTES, _length_of(wanted) // GROUPS_MIN)
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


def _length_of(wanted: Sequence[Wanted]) -> int:
    return sum(want.piece.length for want in wanted)


def _submit_local(access: Access, group: Sequence[Wanted], pipeline: Pipeline) -> Steps[None]:
    def done(stale: list[Wanted]) -> Steps[None]:
        access.progress(_length_of(group) - _length_of(stale), 0)
        for want in stale:
            yield from _fetch_again(access, want)

    grants = [want.opened.grants[want.piece.chunk] for want in group]
    for grant in grants:
        read_ahead(access.descriptors, grant, 0, grant.logical_bytes)
    yield from pipeline.submit(Work(_fetch_group, (access, group, grants)), done)


def _submit_streamed(access: Access, want: Wanted, pipeline: Pipeline) -> Steps[None]:
    memory = _memory_to_stream(want)

    def received(reply: Reply) -> Steps[None]:
        yield from work(_check_streamed, access, want, reply, memory)
        access.progress(want.piece.length, 0)

    request = ReadChunks([bytes(want.piece.chunk)], [0], [0])
    yield from pipeline.submit(Send(request, into=[memory]), received)


def _fetch_group(access: Access, group: Sequence[Wanted], grants: Sequence[Grant]) -> list[Wanted]:
    """Fetch and check each; those whose check failed, to be fetched again.  The disk reads short ones side by side."""
    stale: list[Wanted] = []
    left = [
        (want, grant)
        for want, grant in zip(group, grants, strict=True)
        if len(group) == 1 or not _is_fetched_at_once(access, want, grant)
    ]
    for want, grant in left:
        try:
            _fetch_local(access, want, grant)
        except StaleGrant:
            stale.append(want)
    return stale


def _fetch_local(access: Access, want: Wanted, grant: Grant) -> None:
    memory = want.sink.memory_for(want.piece)
    if grant.logical_bytes != want.piece.length:
        raise StaleGrant("the grant's length is not the chunk's")
    fetch_into(access.descriptors, want.piece.chunk, grant, memory, access.check)
    want.sink.deliver(want.piece, memory)


def _memory_to_stream(want: Wanted) -> memoryview:
    return (
        want.sink.memory_for(want.piece) if want.sink.in_place else memoryview(bytearray(want.piece.length))
    )


def _check_streamed(access: Access, want: Wanted, reply: Reply, memory: memoryview) -> None:
    """The engine's word is final: it has looked past the page cache too.  ChunkDamaged, ChunkNotFound, ..."""
    name = want.opened.name
    answer = _streamed_piece(want.opened, want.piece, reply)
    if (answer.offset, answer.length) != (0, want.piece.length):
        raise ChunkNotFound(f"{name}: the engine sent another range than was asked for")
    if access.check is not Check.NONE and not matches_id(want.piece.chunk, memory):
        raise damaged(want.piece.chunk, str(name))
    want.sink.deliver(want.piece, memory)


def _streamed_piece(opened: Places, piece: Piece, reply: Reply) -> ReadPiece:
    """The only piece of an answer; its failure is raised with the object's name."""
    assert isinstance(reply.message, ReadChunksReply)
    (answer,) = reply.message.pieces
    if answer.failure is None:
        return answer
    error = answer.failure.as_error()
    if isinstance(error, CorruptionError):
        raise damaged(piece.chunk, str(opened.name), error.message) from error
    raise type(error)(f"{opened.name}: {error.message}", subject=str(opened.name)) from error


def _deliver_inline(want: Wanted) -> None:
    memory = want.sink.memory_for(want.piece)
    memory[:] = want.opened.inline[want.piece.chunk]
    want.sink.deliver(want.piece, memory)


def _fetch_again(access: Access, want: Wanted) -> Steps[None]:
    """After a failed check: locate anew and read once more; then let the engine read, which knows what damage is."""
    chunk = want.piece.chunk
    yield from _locate(want.opened, [chunk], 0)
    grant = want.opened.grants[chunk]
    yield from _need_descriptors(access, [grant])
    try:
        yield from work(_fetch_local, access, want, grant)
    except StaleGrant:
        memory = _memory_to_stream(want)
        reply = yield from send(ReadChunks([bytes(chunk)], [0], [0]), into=[memory])
        yield from work(_check_streamed, access, want, reply, memory)
    access.progress(want.piece.length, 0)


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
        yield from _locate(opened, [piece.chunk], 0)
        grant = opened.grants[piece.chunk]
        yield from _need_descriptors(access, [grant])
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
    if granule_crcs(payload) != answer.crcs:
        raise damaged(piece.chunk, str(opened.name))
    return payload[offset - answer.offset : offset - answer.offset + length]
