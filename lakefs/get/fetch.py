"""Fetching chunks: grants -> bytes, checked, written once as steps.

Each chunk is fetched in the cheapest way available: from the segment's file by descriptor or from the engine's DRAM
tier by mapping (`lakefs.grants.grant_reads`), inline with the answer to `OpenObjects`, by RDMA (`lakefs.get.remote`,
`lakefs.get.landed`), or streamed (`ReadChunks`).  In each case the bytes are checked here, by BLAKE3 against the
chunk's id unless the caller asked for CRC32C or for unverified bytes.  A range of a chunk is checked by granule.

Rules kept here:
- After a failed check the chunk is located anew and read once more.  If that fails too, the engine sends the bytes: it
  reads past the page cache and notes damage.  If those are wrong, ChunkDamaged is raised and names the object.
- At most `FETCH_WINDOW` groups of chunks (16 MiB each at most, 8 MiB of streamed ones) are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from lakefs.content.verify import Check, damaged, granule_crcs, matches_id
from lakefs.errors import ChunkNotFound, CorruptionError, StaleGrant
from lakefs.get.landed import fetch_landed
from lakefs.get.opened import Access, Opened, Piece
from lakefs.get.places import Places, Sink, Wanted, ask_for_places, groups, length_of
from lakefs.get.remote import fetched_remotely, split_remote, submit_remote
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.dram_slabs import Slabs
from lakefs.grants.grant_reads import BRING_IN_FROM, fetch_cached, fetch_into, fetch_range, missing_for, read_ahead
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import FETCH_GROUP_BYTES, FETCH_WINDOW, SLABS_PER_REQUEST_MAX, STREAM_GROUP_BYTES
from lakefs.steps.steps import Pipeline, Send, Steps, Work, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import BY_REQUEST
from lakefs.wire.messages import (
    Grant,
    OpenSegments,
    OpenSlabs,
    ReadChunks,
    ReadChunksReply,
    ReadPiece,
    SegmentsOpened,
    SlabsOpened,
)

LOCATE_BATCH = 1024
DESCRIPTORS_PER_REQUEST = 64


def fetch_pieces(access: Access, opened: Places, pieces: Sequence[Piece], sink: Sink) -> Steps[None]:
    """Fetch whole chunks into the sink, several at once.  ChunkDamaged, ChunkNotFound, EngineUnreachable."""
    return fetch_wanted(access, [Wanted(opened, piece, sink) for piece in pieces])


def fetch_wanted(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    """Fetch chunks of any number of opened objects, several at once; errors name the object.  See `fetch_pieces`."""
    pipeline = Pipeline(FETCH_WINDOW)
    try:
        for start in range(0, len(wanted), LOCATE_BATCH):
            yield from _fetch_batch(access, wanted[start : start + LOCATE_BATCH], pipeline)
        yield from pipeline.drain()
    except (ChunkNotFound, StaleGrant):
        yield from pipeline.settle()  # the caller may begin anew in the same memory
        raise


def _fetch_batch(access: Access, batch: Sequence[Wanted], pipeline: Pipeline) -> Steps[None]:
    yield from _locate_missing(access, [(want.opened, want.piece.chunk) for want in batch])
    local: list[Wanted] = []
    streamed: list[Wanted] = []
    for want in batch:
        if want.piece.chunk in want.opened.inline:
            _deliver_inline(want)
            access.progress(want.piece.length, 0)
        elif access.can_use_descriptors and want.opened.grants[want.piece.chunk].medium not in BY_REQUEST:
            local.append(want)
        else:
            streamed.append(want)
    by_network: Sequence[Wanted] = streamed
    if access.fabric is not None and by_network:
        by_network = yield from _submit_remote(access, by_network, pipeline)
        by_network = yield from fetch_landed(access, by_network, partial(_stream_now, access))
    for group in groups(by_network, STREAM_GROUP_BYTES):
        yield from _submit_streamed(access, group, pipeline)
    for group in groups(_not_at_once(access, local), FETCH_GROUP_BYTES):
        yield from _submit_local(access, group, pipeline)


def locate(access: Access, opened: Places, chunks: Sequence[ChunkId]) -> Steps[None]:
    """Get missing grants of these chunks, and descriptors of their segments.  ChunkNotFound, EngineUnreachable."""
    return _locate_missing(access, [(opened, chunk) for chunk in chunks])


def locate_all(access: Access, wanted: Sequence[tuple[Places, ChunkId]]) -> Steps[None]:
    """Do `locate` for chunks of any number of opened objects, with a request for each LOCATE_BATCH of them."""
    for start in range(0, len(wanted), LOCATE_BATCH):
        yield from _locate_missing(access, wanted[start : start + LOCATE_BATCH])


def _locate_anew(access: Access, opened: Places, chunk: ChunkId) -> Steps[Grant]:
    """Return a new grant of a chunk whose check failed, of its place in a segment, whose descriptor is then held."""
    opened.grants.update((yield from ask_for_places({chunk: opened}, 0)))
    grant = opened.grants[chunk]
    yield from _need_descriptors(access, [grant])
    return grant


def _need_descriptors(access: Access, grants: Iterable[Grant]) -> Steps[None]:
    """Get missing descriptors of the segments and slabs that the grants point to."""
    segments, slabs = missing_for(access.descriptors, grants)
    yield from need_slabs(access.descriptors.slabs, slabs)
    yield from need_segments(access.descriptors, segments)


def need_slabs(held: Slabs, slabs: Sequence[int]) -> Steps[None]:
    """Ask for these slabs of the DRAM tier, and map those that the engine sends.  PermissionDenied."""
    for start in range(0, len(slabs), SLABS_PER_REQUEST_MAX):
        reply = yield from send(OpenSlabs(list(slabs[start : start + SLABS_PER_REQUEST_MAX])))
        assert isinstance(reply.message, SlabsOpened)
        held.add(reply.message.slabs, reply.descriptors, reply.message.slab_bytes)


def need_segments(descriptors: SegmentDescriptors, segments: Sequence[SegmentId]) -> Steps[None]:
    """Ask for descriptors of these segments, and keep those that the engine sends.  PermissionDenied."""
    for start in range(0, len(segments), DESCRIPTORS_PER_REQUEST):
        wanted = segments[start : start + DESCRIPTORS_PER_REQUEST]
        reply = yield from send(OpenSegments([int(segment) for segment in wanted]))
        assert isinstance(reply.message, SegmentsOpened)
        for segment, descriptor in zip(reply.message.segments, reply.descriptors, strict=True):
            descriptors.add(SegmentId(segment), descriptor)


def _locate_missing(access: Access, wanted: Sequence[tuple[Places, ChunkId]]) -> Steps[None]:
    """Do `locate` for chunks of several objects, in one request."""
    unknown = {chunk: opened for opened, chunk in wanted if chunk not in opened.grants and chunk not in opened.inline}
    if unknown:
        found = yield from ask_for_places(unknown, access.media_now)
        for opened, chunk in wanted:
            if chunk in found:
                opened.grants[chunk] = found[chunk]
    if access.can_use_descriptors:
        grants = (opened.grants.get(chunk) for opened, chunk in wanted)
        yield from _need_descriptors(access, (grant for grant in grants if grant))


def _not_at_once(access: Access, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Fetch short chunks that are cached in this thread, `at_once_bytes` at most in all; return the chunks left.

    A hand-over to a thread costs as much as copying and checking two or three granules.
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
    """Fetch a short chunk if it is cached; return True if it was, and its bytes were right.

    Else the disk begins to read it.
    """
    if grant.logical_bytes != want.piece.length or grant.logical_bytes >= BRING_IN_FROM:
        return False
    memory = want.sink.memory_for(want.piece)
    try:
        is_present = fetch_cached(access.descriptors, want.piece.chunk, grant, memory, access.check)
    except StaleGrant:
        return False  # it is read once more, and then located again
    if is_present:
        want.sink.deliver(want.piece, memory)
    return is_present


def is_fetched_at_once(access: Access, opened: Opened, target: memoryview) -> bool:
    """Fill `target`, as long as the object, without a request or a wait; return True if that worked.

    It works for an empty object, and for one whose content is one chunk that came inline or is cached, and is right.
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


def _submit_local(access: Access, group: Sequence[Wanted], pipeline: Pipeline) -> Steps[None]:
    def done(stale: list[Wanted]) -> Steps[None]:
        access.progress(length_of(group) - length_of(stale), 0)
        for want in stale:
            yield from _fetch_again(access, want)

    grants = [want.opened.grants[want.piece.chunk] for want in group]
    for grant in grants:
        read_ahead(access.descriptors, grant, 0, grant.logical_bytes)
    yield from pipeline.submit(Work(_fetch_group, (access, group, grants)), done)


def _submit_streamed(access: Access, group: Sequence[Wanted], pipeline: Pipeline) -> Steps[None]:
    memories = [_memory_to_stream(want) for want in group]

    def received(reply: Reply) -> Steps[None]:
        yield from work(_check_streamed, access, group, reply, memories)
        access.progress(length_of(group), 0)

    yield from pipeline.submit(Send(_request_of(group), into=memories), received)


def _request_of(group: Sequence[Wanted]) -> ReadChunks:
    return ReadChunks([bytes(want.piece.chunk) for want in group], [0] * len(group), [0] * len(group))


def _fetch_group(access: Access, group: Sequence[Wanted], grants: Sequence[Grant]) -> list[Wanted]:
    """Fetch and check each chunk; return those whose check failed, to be fetched again.

    All short ones are tried from the cache first, so that the disk reads them side by side.
    """
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
    return want.sink.memory_for(want.piece) if want.sink.in_place else memoryview(bytearray(want.piece.length))


def _check_streamed(access: Access, group: Sequence[Wanted], reply: Reply, memories: Sequence[memoryview]) -> None:
    """Check and deliver streamed chunks.  Nothing is tried again: the engine has read past the page cache too.

    ChunkDamaged, ChunkNotFound, and other failures of the engine's answer; then none of the group is delivered, because
    the bytes of later chunks lie where those of a missing one would.
    """
    assert isinstance(reply.message, ReadChunksReply)
    for want, piece in zip(group, reply.message.pieces, strict=True):
        answer = _streamed_piece(want.opened, want.piece, piece)
        if (answer.offset, answer.length) != (0, want.piece.length):
            raise ChunkNotFound(f"{want.opened.name}: the engine sent another range than was asked for")
    for want, memory in zip(group, memories, strict=True):
        if access.check is not Check.NONE and not matches_id(want.piece.chunk, memory):
            raise damaged(want.piece.chunk, str(want.opened.name))
        want.sink.deliver(want.piece, memory)


def _streamed_piece(opened: Places, piece: Piece, answer: ReadPiece) -> ReadPiece:
    """Return a piece of an answer; a failure is raised with the object's name."""
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
    """Fetch a chunk after a failed check: locate it anew and read once more; then have the engine stream it."""
    chunk = want.piece.chunk
    grant = yield from _locate_anew(access, want.opened, chunk)
    try:
        yield from work(_fetch_local, access, want, grant)
    except StaleGrant:
        memory = _memory_to_stream(want)
        reply = yield from send(_request_of([want]), into=[memory])
        yield from work(_check_streamed, access, [want], reply, [memory])
    access.progress(want.piece.length, 0)


def _submit_remote(access: Access, wanted: Sequence[Wanted], pipeline: Pipeline) -> Steps[Sequence[Wanted]]:
    """READ what can be read by RDMA; return the chunks that are left to stream."""
    link, remote, streamed = yield from split_remote(access, wanted)
    if link is not None:
        for group in groups(remote, FETCH_GROUP_BYTES):
            yield from submit_remote(access, link, group, pipeline, partial(_again_remotely, access))
    return streamed


def _again_remotely(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    """Fetch chunks whose READ failed, or whose check did: once more from where they are now, then streamed."""
    left = yield from fetched_remotely(access, wanted)
    access.progress(length_of(wanted) - length_of(left), 0)
    yield from _stream_now(access, left)


def _stream_now(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    """Stream chunks, a group at a time."""
    for group in groups(wanted, STREAM_GROUP_BYTES):
        memories = [_memory_to_stream(want) for want in group]
        reply = yield from send(_request_of(group), into=memories)
        yield from work(_check_streamed, access, group, reply, memories)
        access.progress(length_of(group), 0)


def fetch_part(access: Access, opened: Opened, piece: Piece, offset: int, length: int) -> Steps[memoryview]:
    """Return a range inside one chunk, checked by granule."""
    if piece.chunk in opened.inline:
        return memoryview(opened.inline[piece.chunk])[offset : offset + length]
    yield from locate(access, opened, [piece.chunk])
    if not access.can_use_descriptors or opened.grants[piece.chunk].medium in BY_REQUEST:
        return (yield from _stream_part(opened, piece, offset, length))
    try:
        grant = opened.grants[piece.chunk]
        return (yield from work(fetch_range, access.descriptors, piece.chunk, grant, offset, length))
    except StaleGrant:
        grant = yield from _locate_anew(access, opened, piece.chunk)
    try:
        return (yield from work(fetch_range, access.descriptors, piece.chunk, grant, offset, length))
    except StaleGrant:
        return (yield from _stream_part(opened, piece, offset, length))


def _stream_part(opened: Opened, piece: Piece, offset: int, length: int) -> Steps[memoryview]:
    reply = yield from send(part_request(piece, offset, length))
    return take_part(opened, piece, offset, length, reply)


def part_request(piece: Piece, offset: int, length: int) -> ReadChunks:
    """Return the request that streams a range inside one chunk; `take_part` takes its answer."""
    return ReadChunks([bytes(piece.chunk)], [offset], [length])


def take_part(opened: Opened, piece: Piece, offset: int, length: int, reply: Reply) -> memoryview:
    """Return a streamed range, checked by granule.  ChunkDamaged, ChunkNotFound."""
    payload = memoryview(reply.body.joined())
    reply.body.release()
    assert isinstance(reply.message, ReadChunksReply)
    answer = _streamed_piece(opened, piece, reply.message.pieces[0])
    if not (
        answer.offset <= offset and offset + length <= answer.offset + answer.length == answer.offset + len(payload)
    ):
        raise ChunkNotFound(f"{opened.name}: the engine sent another range than was asked for")
    if granule_crcs(payload) != answer.crcs:
        raise damaged(piece.chunk, str(opened.name))
    return payload[offset - answer.offset : offset - answer.offset + length]
