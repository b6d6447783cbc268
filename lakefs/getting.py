"""Get: name -> layout -> grants -> bytes, checked, written once as steps.

Each chunk is fetched by the best mover there is: from the segment file by descriptor (`movers`), inline with the
answer to `OpenObjects`, or streamed (`ReadChunks`).  Whatever moved it, the bytes are checked here, by BLAKE3
against the chunk's id unless the caller asked for CRC32C; a range of a chunk is checked by granule.

Rules kept here:
- A reader gets the bytes of one version of an object, or an error; never old and new mixed: the layout is read
  once, and chunks are named by their content.
- A failed check is followed by one fresh locate and one more read; then the engine is asked for the bytes, which
  reads past the page cache and notes damage.  What fails then is ChunkDamaged naming the object.
- At most `WINDOW` groups of chunks (16 MiB each at most), or streamed chunks, are in flight.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from lakefs.errors import (
    ChunkNotFound,
    CorruptionError,
    InternalError,
    InvalidArgument,
    LakeError,
    StaleGrant,
)
from lakefs.ids import ChunkId, ChunkKind, SegmentId, kind_of
from lakefs.limits import BATCH_MAX
from lakefs.manifest import Manifest, check_child, parse
from lakefs.movers import (
    MEDIUM_INLINE,
    MEDIUM_SEGMENT,
    Check,
    SegmentDescriptors,
    check_digest,
    check_granules,
    damaged,
    fetch_into,
    fetch_range,
    require_present,
)
from lakefs.names import Name
from lakefs.new_bytes import NewBytes
from lakefs.service import Reply
from lakefs.steps import Pipeline, Send, Steps, Tell, Work, send, work
from lakefs.wire.messages import (
    CloseLeases,
    Grant,
    Locate,
    Located,
    ObjectStat,
    OpenedObject,
    OpenObjects,
    OpenResult,
    OpenResults,
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


@dataclass(frozen=True)
class Access:
    """How a client reads: its descriptors, what its connection can do, and who is told of progress.

    `progress(bytes_done, bytes_already_there)` is called with increments from the driver's own thread.
    """

    descriptors: SegmentDescriptors
    can_use_descriptors: bool
    check: Check = Check.BLAKE3
    progress: Callable[[int, int], None] = lambda done, present: None


class Piece(NamedTuple):
    """One chunk of a blob and where it lies in it."""

    chunk: ChunkId
    offset: int
    length: int


@dataclass
class Opened:
    """An object opened for reading: its pieces in order, what is known of their places, and its lease."""

    name: Name
    stat: ObjectStat
    lease: int
    pieces: list[Piece]
    grants: dict[ChunkId, Grant]
    inline: dict[ChunkId, bytes]

    def overlapping(self, offset: int, length: int) -> list[Piece]:
        """Pieces that hold bytes of [offset, offset + length)."""
        if length <= 0 or not self.pieces:
            return []
        first = bisect_right(self.pieces, offset, key=_start_of) - 1
        return self.pieces[first : bisect_left(self.pieces, offset + length, lo=first, key=_start_of)]


def _start_of(piece: Piece) -> int:
    return piece.offset


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


def open_objects(
    access: Access,
    names: Sequence[Name],
    *,
    lease: bool = True,
    inline_bytes: int = 1 << 20,
    durable: bool = True,
    version: str = "",
) -> Steps[list[Opened | LakeError]]:
    """Open objects, or that version of one; an error stands in the place of a name that cannot be opened."""
    opened: list[Opened | LakeError] = []
    for start in range(0, len(names), BATCH_MAX):
        batch = names[start : start + BATCH_MAX]
        request = OpenObjects(
            [(name.bucket, name.key) for name in batch],
            inline_bytes=inline_bytes,
            lease=lease,
            durable=durable,
            versions=[version] if version else [],
        )
        reply = yield from send(request)
        assert isinstance(reply.message, OpenResults)
        body = memoryview(reply.body.joined())
        reply.body.release()
        try:
            for name, result in zip(batch, reply.message.results, strict=True):
                opened.append((yield from _opened_or_error(access, name, result, body)))
        except BaseException:
            found = [result.opened for result in reply.message.results if result.opened]
            yield from close_leases([answer.lease for answer in found])
            raise
    return opened


def _opened_or_error(
    access: Access, name: Name, result: OpenResult, body: memoryview
) -> Steps[Opened | LakeError]:
    if result.opened is None:
        failure = result.failure
        assert failure is not None
        return failure.as_error()
    try:
        return (yield from _opened(access, name, result.opened, body))
    except CorruptionError as error:
        yield from close_leases([result.opened.lease])
        return error


def open_object(
    access: Access,
    name: Name,
    *,
    lease: bool = True,
    inline_bytes: int = 1 << 20,
    durable: bool = True,
    version: str = "",
) -> Steps[Opened]:
    """Open one object, or that version of it.  BucketNotFound, KeyNotFound, IsAFolder, VersionIsMarker."""
    (opened,) = yield from open_objects(
        access, [name], lease=lease, inline_bytes=inline_bytes, durable=durable, version=version
    )
    if isinstance(opened, LakeError):
        raise opened
    return opened


def close_object(opened: Opened) -> Steps[None]:
    """Give the lease back; a lost connection has given it back already."""
    yield from close_leases([opened.lease])


def close_leases(leases: Sequence[int]) -> Steps[None]:
    """Give leases back, 0 being none."""
    held = [lease for lease in leases if lease]
    if not held:
        return
    try:
        yield Tell(CloseLeases(held))
    except LakeError:
        return


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


def read_range(access: Access, opened: Opened, offset: int, length: int) -> Steps[bytes]:
    """The bytes [offset, offset + length), cut at the blob's end, each checked.  InvalidArgument before its start."""
    if offset < 0:
        raise InvalidArgument(f"{opened.name}: there is nothing at {offset}", subject=str(opened.name))
    length = max(0, min(length, opened.stat.size_bytes - offset))
    target = NewBytes(length)
    view = target.view
    whole: list[Piece] = []
    for piece in opened.overlapping(offset, length):
        begin = max(offset, piece.offset)
        end = min(offset + length, piece.offset + piece.length)
        if end - begin == piece.length:
            whole.append(piece)
            continue
        part = yield from _fetch_part(access, opened, piece, begin - piece.offset, end - begin)
        view[begin - offset : end - offset] = part
    if whole:
        yield from fetch_pieces(access, opened, whole, _ShiftedSink(view, offset))
    return target.take()


def get_many(access: Access, names: Sequence[Name]) -> Steps[list[bytes | LakeError]]:
    """Whole contents of many objects; an error stands in the place of one that cannot be read.

    Small objects come inline with one answer for many names; larger ones follow by grant.
    """
    contents: list[bytes | LakeError] = []
    for start in range(0, len(names), GET_MANY_BATCH):
        batch = names[start : start + GET_MANY_BATCH]
        opened_batch = yield from open_objects(access, batch, inline_bytes=GET_MANY_INLINE_BYTES)
        try:
            for opened in opened_batch:
                try:
                    if isinstance(opened, LakeError):
                        raise opened
                    contents.append((yield from read_whole(access, opened)))
                except LakeError as error:
                    contents.append(error)
        finally:
            yield from close_leases([opened.lease for opened in opened_batch if isinstance(opened, Opened)])
    return contents


GET_MANY_BATCH = 256
GET_MANY_INLINE_BYTES = 8 << 20


def read_whole(access: Access, opened: Opened) -> Steps[bytes]:
    """The whole blob as bytes."""
    if len(opened.pieces) == 1 and opened.pieces[0].chunk in opened.inline:
        access.progress(opened.pieces[0].length, 0)
        return opened.inline[opened.pieces[0].chunk]
    target = NewBytes(opened.stat.size_bytes)
    yield from fetch_pieces(access, opened, opened.pieces, BufferSink(target.view))
    return target.take()


class _ShiftedSink:
    """Whole chunks into a buffer that begins at `offset` of the blob."""

    in_place = True

    def __init__(self, target: memoryview, offset: int) -> None:
        self._target = target
        self._offset = offset

    def memory_for(self, piece: Piece) -> memoryview:
        begin = piece.offset - self._offset
        return self._target[begin : begin + piece.length]

    def deliver(self, piece: Piece, payload: memoryview) -> None:
        return None


def _opened(access: Access, name: Name, answer: OpenedObject, body: memoryview) -> Steps[Opened]:
    opened = opened_at(name, answer)
    for chunk, length, grant in zip(answer.chunks, answer.lengths, answer.grants, strict=True):
        if grant.medium == MEDIUM_INLINE:
            payload = body[grant.offset : grant.offset + length]
            try:
                check_digest(ChunkId(chunk), payload)
            except StaleGrant:
                raise damaged(ChunkId(chunk), str(name)) from None
            opened.inline[ChunkId(chunk)] = bytes(payload)
    if answer.stat.size_bytes and not answer.chunks:
        opened.pieces = _pieces(*(yield from _layout(access, opened)))
    return opened


def opened_at(name: Name, answer: OpenedObject) -> Opened:
    """What an answer to `OpenObjects` says of an object: lease, places, and the layout, when that came along.

    Payloads that came inline are left out.
    """
    opened = Opened(name, answer.stat, answer.lease, _pieces(answer.chunks, answer.lengths), {}, {})
    for chunk, grant in zip(answer.chunks, answer.grants, strict=True):
        if grant.medium == MEDIUM_SEGMENT:
            opened.grants[ChunkId(chunk)] = grant
    return opened


def _pieces(chunks: Sequence[bytes], lengths: Sequence[int]) -> list[Piece]:
    offsets = accumulate(lengths, initial=0)
    return [
        Piece(ChunkId(chunk), offset, length)
        for chunk, offset, length in zip(chunks, offsets, lengths, strict=False)
    ]


def _layout(access: Access, opened: Opened) -> Steps[tuple[list[ChunkId], list[int]]]:
    """Data chunks of a manifest too large to come with the answer, depth first, left to right."""
    top = chunk_of_stat(opened.stat)
    root = yield from _read_manifest(access, opened, top)
    if root.size_bytes != opened.stat.size_bytes:
        raise InternalError(
            f"{opened.name}: the manifest's size is not the object's", subject=str(opened.name)
        )
    chunks: list[ChunkId] = []
    lengths: list[int] = []
    pending = [root]
    while pending:
        manifest = pending.pop()
        if manifest.level == 0:
            chunks.extend(entry.chunk for entry in manifest.entries)
            lengths.extend(entry.size_bytes for entry in manifest.entries)
            continue
        children: list[Manifest] = []
        for entry in manifest.entries:
            child = yield from _read_manifest(access, opened, entry.chunk)
            check_child(entry, manifest, child)
            children.append(child)
        pending.extend(reversed(children))
    return chunks, lengths


def chunk_of_stat(stat: ObjectStat) -> ChunkId:
    """The chunk that the object's blob id names."""
    return ChunkId(stat.blob)


def _read_manifest(access: Access, opened: Opened, chunk: ChunkId) -> Steps[Manifest]:
    assert kind_of(chunk) is ChunkKind.MANIFEST
    yield from locate(access, opened, [chunk])
    payload = bytearray(opened.grants[chunk].logical_bytes)
    piece = Piece(chunk, 0, len(payload))
    yield from fetch_pieces(access, opened, [piece], BufferSink(memoryview(payload)))
    return parse(payload)


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


def _fetch_part(access: Access, opened: Opened, piece: Piece, offset: int, length: int) -> Steps[memoryview]:
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
