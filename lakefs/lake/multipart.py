"""Multipart uploads as steps: begin, store parts, complete without copying payload, abort, list.

A part is cut from its own start, every 4 MiB, and stored like any blob.  The completed object is a manifest of cut kind
PARTS over the parts' chunks: a completion reads layouts and writes manifests, whatever the object's length.

Rules kept here:
- A part is durable when its put returns, and so is the object when its completion returns.  Until then the name is not
  changed.
- A completion holds in memory one page of layouts, one open manifest for each level, and the number and ETag of each
  listed part.
- If a session is lost (the engine restarted), the operation begins again, at most `ATTEMPTS` times in all; uploads
  outlive the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, Final, NamedTuple, TypeVar

import msgspec

from lakefs.content.chunking import CutPlan
from lakefs.content.manifest import CutKind
from lakefs.errors import (
    ChunkNotFound,
    EngineUnreachable,
    InvalidArgument,
    InvalidPart,
    InvalidPartOrder,
    PreconditionFailed,
    SessionLost,
    UploadNotFound,
)
from lakefs.get.objects import close_object, open_object, read_range
from lakefs.get.opened import Access, Opened, Piece
from lakefs.limits import CHUNK_BYTES, PART_CHUNKS_MAX, STORE_WINDOW
from lakefs.names import Name
from lakefs.put.objects import store_source
from lakefs.put.sources import Source, read_stream
from lakefs.put.upload import (
    ATTEMPTS,
    Transfer,
    Upload,
    abandon_upload,
    finish_manifests,
    only_result,
    open_upload,
    store_manifests,
    store_payloads,
)
from lakefs.steps.steps import Pipeline, Steps, send, work
from lakefs.wire.messages import (
    NO_CONDITION,
    Condition,
    ObjectAttributes,
    ObjectStat,
    Parts,
    PartStat,
    UploadAbort,
    UploadComplete,
    UploadCreate,
    UploadList,
    UploadParts,
    UploadPut,
    Uploads,
    UploadStat,
)

T = TypeVar("T")
_MD5_DIGITS: Final = 32


class UploadName(NamedTuple):
    """An upload to a key of a bucket; `upload` has 16 bytes."""

    bucket: str
    key: str
    upload: bytes


class ListedPart(NamedTuple):
    """A part to complete an upload from: its number, and the ETag (16 bytes) that its put returned."""

    number: int
    etag: bytes


# --- beginning, ending, looking ------------------------------------------------------------------------


def create_upload(
    name: Name, attributes: ObjectAttributes, details: Mapping[str, str] | None = None
) -> Steps[UploadName]:
    """Begin an upload whose object gets these attributes.  Durable on return.

    BucketNotFound, InvalidName, InvalidArgument, RequestTooLarge.
    """
    reply = yield from send(UploadCreate(name.bucket, name.key, attributes, dict(details or {})))
    assert isinstance(reply.message, UploadStat)
    return UploadName(name.bucket, name.key, reply.message.upload)


def abort_upload(upload: UploadName) -> Steps[None]:
    """End an upload and drop its parts; the object at the name stays.  Durable on return.  UploadNotFound."""
    yield from send(UploadAbort(*upload))


def list_uploads(request: UploadList) -> Steps[Uploads]:
    """Return one page of a bucket's unfinished uploads."""
    reply = yield from send(request)
    assert isinstance(reply.message, Uploads)
    return reply.message


def list_parts(upload: UploadName, *, after: int = 0, limit: int = 1000, layouts: bool = False) -> Steps[Parts]:
    """Return one page of an upload's parts by number.  UploadNotFound."""
    reply = yield from send(UploadParts(*upload, after, limit, layouts))
    assert isinstance(reply.message, Parts)
    return reply.message


# --- parts ---------------------------------------------------------------------------------------------


def put_part(
    transfer: Transfer,
    upload: UploadName,
    number: int,
    source: Source,
    *,
    md5: bytes | None = None,
    checksums: Mapping[str, bytes] | None = None,
) -> Steps[PartStat]:
    """Store a source of known length as a part, replacing the part that has its number.  Durable on return.

    `md5` (16 bytes) is the part's ETag; if it is not given, the source is read once more to compute it.
    UploadNotFound, InvalidArgument, RequestTooLarge, SourceChanged, StoreFull, SessionLost (after ATTEMPTS).
    """
    etag = (yield from work(_md5_of, source)) if md5 is None else md5

    def attempt() -> Steps[PartStat]:
        store = yield from open_upload(transfer, CutKind.FIXED)
        plan = CutPlan(source.size_bytes)
        try:
            yield from store_source(store, source, plan)
            source.verify_unchanged()
            return (yield from commit_part(store, upload, number, etag, checksums))
        except BaseException as error:
            yield from _give_up(store, error)
            raise

    return (yield from _again_when_lost(attempt))


def put_part_stream(
    transfer: Transfer,
    upload: UploadName,
    number: int,
    stream: BinaryIO,
    *,
    checksums: Mapping[str, bytes] | None = None,
) -> Steps[PartStat]:
    """Store a stream, read to its end, as a part.

    Errors are those of `put_part`, but SessionLost is raised at once: the stream cannot be read again.
    """
    store = yield from open_upload(transfer, CutKind.FIXED)
    digest = hashlib.md5(usedforsecurity=False)
    try:
        pipeline = Pipeline(STORE_WINDOW)
        while piece := (yield from work(_read_and_hash, stream, digest.update)):
            yield from pipeline.submit(*store_payloads(store, [memoryview(piece)]))
            yield from store_manifests(store, pipeline)
        yield from pipeline.drain()
        return (yield from commit_part(store, upload, number, digest.digest(), checksums))
    except BaseException as error:
        yield from _give_up(store, error)
        raise


def commit_part(
    store: Upload, upload: UploadName, number: int, etag: bytes | None, checksums: Mapping[str, bytes] | None = None
) -> Steps[PartStat]:
    """Bind a part number to the content that a put session stored, and end the session, like `commit_upload`.

    `etag` has 16 bytes: the part's MD5.  If it is None (not known), the first 16 bytes of the blob's digest are used.
    """
    tree = yield from finish_manifests(store)
    tag = tree.blob[1:17] if etag is None else etag
    reply = yield from send(
        UploadPut(store.session, *upload, number, tree.blob, tag, dict(checksums or {}), end_session=True)
    )
    assert isinstance(reply.message, PartStat)
    return reply.message


def copy_part(
    access: Access,
    transfer: Transfer,
    upload: UploadName,
    number: int,
    source: Name,
    *,
    offset: int = 0,
    length: int | None = None,
    if_match: str = "",
    version: str = "",
) -> Steps[PartStat]:
    """Make a range of an object, or of one version of it, a part.

    Chunks that lie in the range whole are referred to; only the ends are read and stored (all of it, if the range has
    more than `PART_CHUNKS_MAX` chunks).  The part's ETag is the object's MD5 if that is known and the range is the
    whole object; else it is made from the blob's id.
    `if_match`: the source's ETag must be this one.  KeyNotFound, PreconditionFailed, InvalidArgument (the range).
    """

    def attempt() -> Steps[PartStat]:
        opened = yield from open_object(access, source, inline_bytes=0, version=version)
        try:
            return (yield from _copy_opened(access, transfer, upload, number, opened, offset, length, if_match))
        finally:
            yield from close_object(opened)

    return (yield from _again_when_lost(attempt))


def _copy_opened(
    access: Access,
    transfer: Transfer,
    upload: UploadName,
    number: int,
    opened: Opened,
    offset: int,
    length: int | None,
    if_match: str,
) -> Steps[PartStat]:
    stat = opened.stat
    if if_match and stat.etag != if_match:
        raise PreconditionFailed(f"{opened.name} has the ETag {stat.etag}, not {if_match}", subject=str(opened.name))
    wanted = stat.size_bytes - offset if length is None else length
    if offset < 0 or wanted < 0 or offset + wanted > stat.size_bytes:
        raise InvalidArgument(
            f"{opened.name} has {stat.size_bytes} bytes; {wanted} from {offset} on are not all in it",
            subject=str(opened.name),
        )
    store = yield from open_upload(transfer, CutKind.FIXED)
    try:
        pieces = opened.overlapping(offset, wanted)
        if len(pieces) > PART_CHUNKS_MAX:
            yield from _move_range(access, store, opened, offset, wanted)
        else:
            yield from _take_over(access, store, opened, pieces, offset, offset + wanted)
        etag = _md5_of_stat(stat) if wanted == stat.size_bytes else None
        return (yield from commit_part(store, upload, number, etag))
    except BaseException as error:
        yield from _give_up(store, error)
        raise


def _take_over(
    access: Access, store: Upload, opened: Opened, pieces: Sequence[Piece], begin: int, end: int
) -> Steps[None]:
    """Refer to the chunks that lie in [begin, end) whole; read and store the rest of the range, at its ends."""
    pipeline = Pipeline(STORE_WINDOW)
    for piece in pieces:
        first, last = max(begin, piece.offset), min(end, piece.offset + piece.length)
        if last - first == piece.length:
            store.stored([piece.chunk], [piece.length], [False])
            yield from store_manifests(store, pipeline)
        else:
            content = yield from read_range(access, opened, first, last - first)
            yield from pipeline.submit(*store_payloads(store, [memoryview(content)]))
            yield from pipeline.drain()
    yield from pipeline.drain()


def _move_range(access: Access, store: Upload, opened: Opened, offset: int, length: int) -> Steps[None]:
    """Read and store a range that has more chunks than a part may have."""
    pipeline = Pipeline(STORE_WINDOW)
    for start in range(offset, offset + length, CHUNK_BYTES):
        content = yield from read_range(access, opened, start, min(CHUNK_BYTES, offset + length - start))
        yield from pipeline.submit(*store_payloads(store, [memoryview(content)]))
    yield from pipeline.drain()


# --- completing ----------------------------------------------------------------------------------------


def complete_upload(
    transfer: Transfer,
    upload: UploadName,
    parts: Sequence[ListedPart],
    *,
    checksums: Mapping[str, bytes] | None = None,
    condition: Condition = NO_CONDITION,
) -> Steps[ObjectStat]:
    """Make the listed parts, in ascending order of numbers, the object; drop the others.  Durable on return.

    A second completion with the same parts returns what the first returned, if the name still has that object.
    UploadNotFound, InvalidPart, InvalidPartOrder, PartTooSmall, PreconditionFailed, SessionLost (after ATTEMPTS).
    """
    request = UploadComplete(
        b"",
        *upload,
        b"",
        [part.number for part in parts],
        [part.etag for part in parts],
        dict(checksums or {}),
        condition,
        end_session=True,
    )

    def attempt() -> Steps[ObjectStat]:
        store = yield from open_upload(transfer, CutKind.PARTS)
        try:
            yield from _add_layouts(store, upload, parts)
            tree = yield from finish_manifests(store)
            whole = msgspec.structs.replace(request, session=store.session, blob=tree.blob)
            return only_result((yield from send(whole)))
        except BaseException as error:
            yield from _give_up(store, error)
            raise

    try:
        return (yield from _again_when_lost(attempt))
    except UploadNotFound:
        return only_result((yield from send(request)))  # perhaps it was completed before


def _add_layouts(store: Upload, upload: UploadName, parts: Sequence[ListedPart]) -> Steps[None]:
    """Add the chunks of the listed parts to the manifests, page by page.  InvalidPart, InvalidPartOrder.

    The engine checks the parts again when it binds the name: one may be replaced until then.
    """
    missing = {part.number: part.etag for part in parts}
    pipeline = Pipeline(STORE_WINDOW)
    after = 0
    while True:
        page = yield from list_parts(upload, after=after, layouts=True)
        for part in page.parts:
            if missing.get(part.number) == part.etag:
                del missing[part.number]
                store.stored(part.chunks, part.lengths, [False] * len(part.chunks))
                yield from store_manifests(store, pipeline)
        after = page.next_after
        if not after:
            break
    yield from pipeline.drain()
    numbers = [part.number for part in parts]
    if numbers != sorted(set(numbers)):
        raise InvalidPartOrder(f"{_shown(upload)}: list its parts in ascending order, each once")
    if missing:
        raise InvalidPart(
            f"{_shown(upload)}: part {min(missing)} was not uploaded, or its ETag is not the one that is listed"
        )


def _shown(upload: UploadName) -> str:
    return f"upload {upload.upload.hex()} to {upload.bucket}/{upload.key}"


# --- shared --------------------------------------------------------------------------------------------


def _again_when_lost(attempt: Callable[[], Steps[T]]) -> Steps[T]:
    """Run an attempt; again if the session was lost, or if gc freed a chunk of a part or object replaced during it."""
    for count in range(1, ATTEMPTS + 1):
        try:
            return (yield from attempt())
        except (SessionLost, ChunkNotFound):
            if count == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _give_up(store: Upload, error: BaseException) -> Steps[None]:
    """End the session of a failed operation; if the engine cannot be reached, the session ends by itself."""
    if isinstance(error, SessionLost):
        store.untell()
    if not isinstance(error, EngineUnreachable):
        yield from abandon_upload(store)


def _md5_of(source: Source) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for offset in range(0, source.size_bytes, CHUNK_BYTES):
        digest.update(source.read_at(offset, min(CHUNK_BYTES, source.size_bytes - offset)))
    return digest.digest()


def _read_and_hash(stream: BinaryIO, update: Callable[[bytes], None]) -> bytes:
    piece = read_stream(stream, CHUNK_BYTES)
    update(piece)
    return piece


def _md5_of_stat(stat: ObjectStat) -> bytes | None:
    """Return the MD5 of the content, if the ETag is one."""
    return bytes.fromhex(stat.etag) if len(stat.etag) == _MD5_DIGITS else None
