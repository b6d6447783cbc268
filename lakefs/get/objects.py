"""Get: name -> layout -> grants -> bytes, checked, written once as steps.

`lakefs.get.opened` has the state of an opened object; `lakefs.get.fetch` fetches its chunks.

Rules kept here:
- A reader gets the bytes of one version of an object, or an error; never old and new mixed: the layout is read
  once, and chunks are named by their content.
- Whole content shorter than `UNLEASED_BELOW_BYTES` is read without a lease, which saves the engine a request, unless
  the caller wants bytes unverified.  If gc frees a chunk before it is read, all is opened once more, with leases, and
  read from the beginning.
- Inline payloads are checked by BLAKE3 when they arrive, unless the caller wants bytes unverified.  Manifests are
  always checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from lakefs.content.manifest import Manifest, check_child, parse
from lakefs.content.verify import Check, damaged, matches_id
from lakefs.errors import ChunkNotFound, CorruptionError, InternalError, InvalidArgument, LakeError, StaleGrant
from lakefs.get.fetch import fetch_part, fetch_pieces, fetch_wanted, is_fetched_at_once, locate
from lakefs.get.opened import Access, Opened, Piece, chunk_of_stat, opened_at, pieces_of
from lakefs.get.places import BufferSink, Wanted
from lakefs.host.new_bytes import NewBytes
from lakefs.ids import ChunkId, ChunkKind, kind_of
from lakefs.limits import BATCH_MAX, UNLEASED_BELOW_BYTES
from lakefs.names import Name
from lakefs.steps.steps import Steps, Tell, send
from lakefs.wire.media import IN_FRAMES
from lakefs.wire.messages import CloseLeases, OpenedObject, OpenObjects, OpenResult, OpenResults

T = TypeVar("T")
GET_MANY_BATCH = 256
GET_MANY_INLINE_BYTES = 8 << 20
_ALWAYS: Final = 0
"""`lease_from` that leases content of any length."""


def open_objects(
    access: Access,
    names: Sequence[Name],
    *,
    lease: bool = True,
    inline_bytes: int = 1 << 20,
    durable: bool = True,
    version: str = "",
    lease_from: int = _ALWAYS,
    learns: bool | None = None,
) -> Steps[list[Opened | LakeError]]:
    """Open objects, or the given version of one; the result has an error in the place of a name that cannot be opened.

    `lease_from`: no lease on content shorter than this many bytes; its chunks may then be removed at any moment.
    `learns`: the client's learner learns the answers; by default, if they are durable and of current versions.
    """
    opened: list[Opened | LakeError] = []
    learner = access.learner if (durable and not version if learns is None else learns) else None
    for start in range(0, len(names), BATCH_MAX):
        batch = names[start : start + BATCH_MAX]
        request = OpenObjects(
            [(name.bucket, name.key) for name in batch],
            inline_bytes=inline_bytes,
            lease=lease,
            durable=durable,
            versions=[version] if version else [],
            media=access.media_now,
            lease_from=lease_from,
            stamps=learner is not None and learner.wants_stamps,
        )
        reply = yield from send(request)
        assert isinstance(reply.message, OpenResults)
        body = memoryview(reply.body.joined())
        reply.body.release()
        try:
            for name, result in zip(batch, reply.message.results, strict=True):
                opened.append((yield from _opened_or_error(access, name, result, body, reply.epoch)))
                if isinstance(opened[-1], Opened):
                    opened[-1].stamps = result.stamps
        except BaseException:
            found = [result.opened for result in reply.message.results if result.opened]
            yield from close_leases([answer.lease for answer in found])
            raise
        if learner is not None:
            learned = [(one.name, one.stat, one.stamps) for one in opened[start:] if isinstance(one, Opened)]
            learner.learn(learned, reply.epoch, is_opened=True)
    return opened


def _opened_or_error(
    access: Access, name: Name, result: OpenResult, body: memoryview, epoch: int
) -> Steps[Opened | LakeError]:
    if result.opened is None:
        failure = result.failure
        assert failure is not None
        return failure.as_error()
    try:
        return (yield from _opened(access, name, result.opened, body, epoch))
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
    learns: bool | None = None,
) -> Steps[Opened]:
    """Open one object, or the given version of it, see `open_objects`.

    BucketNotFound, KeyNotFound, IsAFolder, VersionIsMarker.
    """
    (opened,) = yield from open_objects(
        access, [name], lease=lease, inline_bytes=inline_bytes, durable=durable, version=version, learns=learns
    )
    if isinstance(opened, LakeError):
        raise opened
    return opened


def _unleased_first(access: Access, read: Callable[[int], Steps[T]]) -> Steps[T]:
    """Read whole content with leases on long content only; if a chunk was freed, read once more with leases on all.

    `read` gets the length from which content is leased, and starts from the beginning.  Content that is not checked is
    always leased: without a check, a read of a freed place would go unnoticed.
    """
    if access.check is not Check.NONE:
        try:
            return (yield from read(UNLEASED_BELOW_BYTES))
        except (ChunkNotFound, StaleGrant):
            pass  # a chunk existed when the name was opened: read the name's current content
    return (yield from read(_ALWAYS))


def close_object(opened: Opened) -> Steps[None]:
    """Close the lease; a lost connection has closed it already."""
    yield from close_leases([opened.lease])


def close_leases(leases: Sequence[int]) -> Steps[None]:
    """Close leases; 0 is no lease."""
    held = [lease for lease in leases if lease]
    if not held:
        return
    try:
        yield Tell(CloseLeases(held))
    except LakeError:
        return


def read_range(access: Access, opened: Opened, offset: int, length: int) -> Steps[bytes]:
    """Return the bytes [offset, offset + length), cut at the blob's end, checked.  InvalidArgument before its start."""
    if offset < 0:
        raise InvalidArgument(f"{opened.name}: there is nothing at {offset}", subject=str(opened.name))
    target = NewBytes(max(0, min(length, opened.stat.size_bytes - offset)))
    yield from read_range_into(access, opened, offset, target.view)
    return target.take()


def read_range_into(access: Access, opened: Opened, offset: int, view: memoryview) -> Steps[None]:
    """Fill memory with the bytes from `offset` on, checked; all of them are in the blob.

    After an error or a cancellation the memory may hold anything.
    """
    length = len(view)
    whole: list[Piece] = []
    for piece in opened.overlapping(offset, length):
        begin = max(offset, piece.offset)
        end = min(offset + length, piece.offset + piece.length)
        if end - begin == piece.length:
            whole.append(piece)
            continue
        part = yield from fetch_part(access, opened, piece, begin - piece.offset, end - begin)
        view[begin - offset : end - offset] = part
    if whole:
        yield from fetch_pieces(access, opened, whole, BufferSink(view, offset))
        if access.check is Check.NONE and not access.is_held(opened.epoch):
            opened.grants.clear()  # the lease has ended, and without a check a freed place would not be noticed
            yield from fetch_pieces(access, opened, whole, BufferSink(view, offset))


def get_whole(access: Access, name: Name) -> Steps[bytes]:
    """Return the whole content of an object, checked.  KeyNotFound, IsAFolder, ChunkDamaged."""
    return (yield from _unleased_first(access, partial(_get_whole, access, name)))


def _get_whole(access: Access, name: Name, lease_from: int) -> Steps[bytes]:
    (opened,) = yield from open_objects(access, [name], lease_from=lease_from)
    if isinstance(opened, LakeError):
        raise opened
    try:
        content = _only_inline(access, opened)
        if content is not None:
            return content
        target = NewBytes(opened.stat.size_bytes)
        yield from _fill(access, [(opened, target.view)])
        return target.take()
    finally:
        yield from close_object(opened)


def get_many(access: Access, names: Sequence[Name]) -> Steps[list[bytes]]:
    """Return whole contents of many objects, in order.  Raises the first failure.

    Small objects arrive inline with one answer for many names; larger ones are fetched by grant, a batch together.
    """
    contents: list[bytes] = []
    for start in range(0, len(names), GET_MANY_BATCH):
        batch = names[start : start + GET_MANY_BATCH]
        contents += yield from _unleased_first(access, partial(_get_batch, access, batch))
    return contents


def _get_batch(access: Access, names: Sequence[Name], lease_from: int) -> Steps[list[bytes]]:
    opened_batch = yield from open_objects(access, names, inline_bytes=GET_MANY_INLINE_BYTES, lease_from=lease_from)
    try:
        contents: list[bytes | NewBytes] = []
        targets: list[tuple[Opened, memoryview]] = []
        for opened in opened_batch:
            if isinstance(opened, LakeError):
                raise opened
            content = _only_inline(access, opened)
            if content is None:
                target = NewBytes(opened.stat.size_bytes)
                targets.append((opened, target.view))
                contents.append(target)
            else:
                contents.append(content)
        yield from _fill(access, targets)
        return [content if isinstance(content, bytes) else content.take() for content in contents]
    finally:
        yield from _close_all(opened_batch)


def get_many_into(access: Access, names: Sequence[Name], targets: Sequence[memoryview]) -> Steps[list[int]]:
    """Read whole contents of many objects, each into memory of the caller; return their lengths.

    Names are opened a batch at a time, and no byte of a batch is moved before all of its names were opened and found
    to fit.  After an error any of the memory may hold anything.
    """
    sizes: list[int] = []
    for start in range(0, len(names), GET_MANY_BATCH):
        end = start + GET_MANY_BATCH
        read = partial(_get_batch_into, access, names[start:end], targets[start:end])
        sizes += yield from _unleased_first(access, read)
    return sizes


def _get_batch_into(
    access: Access, names: Sequence[Name], targets: Sequence[memoryview], lease_from: int
) -> Steps[list[int]]:
    opened_batch = yield from open_objects(access, names, inline_bytes=GET_MANY_INLINE_BYTES, lease_from=lease_from)
    try:
        fitting: list[tuple[Opened, memoryview]] = []
        for opened, target in zip(opened_batch, targets, strict=True):
            if isinstance(opened, LakeError):
                raise opened
            fitting.append((opened, _fitting(opened, target)))
        yield from _fill(access, fitting)
        return [len(target) for _, target in fitting]
    finally:
        yield from _close_all(opened_batch)


def _fill(access: Access, targets: Sequence[tuple[Opened, memoryview]]) -> Steps[None]:
    """Fetch the whole content of each object into memory of its length; short cached content in this thread."""
    room = access.at_once_bytes
    wanted: list[Wanted] = []
    for opened, target in targets:
        length = len(target)
        if length <= room:
            room -= length
            if is_fetched_at_once(access, opened, target):
                access.progress(length, 0)
                continue
        sink = BufferSink(target)
        wanted += [Wanted(opened, piece, sink) for piece in opened.pieces]
    if wanted:
        yield from fetch_wanted(replace(access, at_once_bytes=0), wanted)


def _close_all(opened_batch: Sequence[Opened | LakeError]) -> Steps[None]:
    yield from close_leases([opened.lease for opened in opened_batch if isinstance(opened, Opened)])


def _fitting(opened: Opened, target: memoryview) -> memoryview:
    """Return the part of the target that the object fills.  InvalidArgument when the target is too short."""
    size = opened.stat.size_bytes
    if len(target) < size:
        raise InvalidArgument(
            f"{opened.name} has {size} bytes, the buffer for it only {len(target)}", subject=str(opened.name)
        )
    return target[:size]


def _only_inline(access: Access, opened: Opened) -> bytes | None:
    """Return the content if all of it came inline, else None."""
    if len(opened.pieces) != 1:
        return None
    content = opened.inline.get(opened.pieces[0].chunk)
    if content is not None:
        access.progress(len(content), 0)
    return content


def _opened(access: Access, name: Name, answer: OpenedObject, body: memoryview, epoch: int) -> Steps[Opened]:
    opened = opened_at(name, answer, epoch)
    for chunk, length, grant in zip(answer.chunks, answer.lengths, answer.grants, strict=True):
        if grant.medium in IN_FRAMES:
            payload = body[grant.offset : grant.offset + length]
            if access.check is not Check.NONE and not matches_id(chunk, payload):
                raise damaged(ChunkId(chunk), str(name))
            opened.inline[ChunkId(chunk)] = bytes(payload)
    if answer.stat.size_bytes and not answer.chunks:
        opened.pieces = pieces_of(*(yield from _layout(access, opened)))
    return opened


def _layout(access: Access, opened: Opened) -> Steps[tuple[list[ChunkId], list[int]]]:
    """Read the data chunks of a manifest that was too large for the answer, depth first, left to right."""
    top = chunk_of_stat(opened.stat)
    root = yield from _read_manifest(access, opened, top)
    if root.size_bytes != opened.stat.size_bytes:
        raise InternalError(f"{opened.name}: the manifest's size is not the object's", subject=str(opened.name))
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


def _read_manifest(access: Access, opened: Opened, chunk: ChunkId) -> Steps[Manifest]:
    assert kind_of(chunk) is ChunkKind.MANIFEST
    yield from locate(access, opened, [chunk])
    payload = bytearray(opened.grants[chunk].logical_bytes)
    piece = Piece(chunk, 0, len(payload))
    checking = replace(access, check=Check.BLAKE3)
    yield from fetch_pieces(checking, opened, [piece], BufferSink(memoryview(payload)))
    return parse(payload)
