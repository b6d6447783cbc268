"""Put: bytes -> chunks -> manifest -> name, written once as steps.

Shapes of a put, by what is cheapest for the engine and the wire:
- one chunk: `PutObjects`, one round trip, one journal group;
- a file, and a stream that carries descriptors: the engine reads the file itself (`StoreFromSource`);
- anything else: chunks in bodies; where the wire is a network their ids are offered first.

Rules kept here:
- A name appears whole at `Commit` or not at all; a source that changed meanwhile is never committed.
- When a session is lost (engine restart), the put begins again, at most `ATTEMPTS` times.
- Memory: at most `WINDOW_BYTES` of payload in flight, and one open manifest per level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

from lakefs.chunking import CutPlan, iter_extents, plan_file
from lakefs.errors import EngineUnreachable, LakeError, SessionLost, from_wire
from lakefs.ids import BlobId, ChunkId, ChunkKind, SessionId, data_chunk_id
from lakefs.limits import CHUNK_BYTES
from lakefs.manifest import CutKind, ManifestBuilder, ManifestTree
from lakefs.names import Name
from lakefs.service import Reply
from lakefs.sources import BufferSource, Source, read_stream
from lakefs.steps import Pipeline, Send, Steps, Work, send, work
from lakefs.wire.messages import (
    NO_CONDITION,
    Commit,
    Condition,
    NameChange,
    NameResult,
    NameResults,
    ObjectAttributes,
    ObjectStat,
    Offer,
    Offered,
    PutObjects,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    SourceClose,
    SourceOpen,
    SourceOpened,
    StoreChunks,
    Stored,
    StoreFromSource,
)

ATTEMPTS = 3
STORE_CHUNKS_PER_REQUEST = 2
"""8 MiB a request: large enough that a request's overhead vanishes, small enough to overlap hash and disk."""
WINDOW_REQUESTS = 6
"""Requests in flight: 48 MiB of payload, under the engine's pool of 60 MiB."""


@dataclass(frozen=True)
class Transfer:
    """How a client moves bytes: what its connection can do, and who is told of progress.

    `progress(bytes_done, bytes_already_there)` is called with increments, from the driver's own thread; negative
    ones when a put begins again.
    """

    descriptors: bool
    network: bool = False
    progress: Callable[[int, int], None] = lambda done, present: None


@dataclass(frozen=True)
class PutResult:
    """What a put did.  `new_bytes`: payload that the store did not have before."""

    stat: ObjectStat
    size_bytes: int
    new_bytes: int


@dataclass
class _Upload:
    """One put in progress."""

    transfer: Transfer
    session: SessionId
    builder: ManifestBuilder
    new_bytes: int = 0
    manifests: list[tuple[ChunkId, bytes]] = field(default_factory=list)
    told_done: int = 0
    told_there: int = 0

    def stored(self, ids: list[bytes], lengths: list[int], fresh: list[bool]) -> None:
        """Note data chunks, in order."""
        for identifier, length, is_fresh in zip(ids, lengths, fresh, strict=True):
            self.manifests.extend(self.builder.add(ChunkId(identifier), length))
            self.new_bytes += length if is_fresh else 0
            self._tell(length, 0 if is_fresh else length)

    def untell(self) -> None:
        """Take back what was told of progress: the put begins again."""
        self._tell(-self.told_done, -self.told_there)

    def _tell(self, done: int, there: int) -> None:
        self.told_done += done
        self.told_there += there
        self.transfer.progress(done, there)


def put(
    transfer: Transfer,
    name: Name,
    source: Source,
    attributes: ObjectAttributes,
    *,
    condition: Condition = NO_CONDITION,
    create_bucket: bool = True,
) -> Steps[PutResult]:
    """Store a source of known length under a name.  Durable on return.

    SourceChanged, PreconditionFailed, StoreFull, SessionLost (after ATTEMPTS), and what names raise.
    """
    change = NameChange(name.bucket, name.key, b"", attributes, condition, create_bucket)
    plan = yield from work(
        plan_file, lambda offset, length: bytes(source.read_at(offset, length)), source.size_bytes
    )
    head = list(islice(plan.lengths(), 2))
    if len(head) <= 1:
        return (yield from _put_one_chunk(transfer, change, source))
    for attempt in range(ATTEMPTS):
        try:
            return (yield from _put_many_chunks(transfer, change, source, plan))
        except SessionLost:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def put_stream(
    transfer: Transfer,
    name: Name,
    stream: BinaryIO,
    attributes: ObjectAttributes,
    *,
    condition: Condition = NO_CONDITION,
    create_bucket: bool = True,
) -> Steps[PutResult]:
    """Store what a stream gives until its end, cut every 4 MiB.  Durable on return.

    A lost session cannot be begun again: the stream is spent, so SessionLost is raised.
    """
    change = NameChange(name.bucket, name.key, b"", attributes, condition, create_bucket)
    first = yield from work(read_stream, stream, CHUNK_BYTES)
    second = (yield from work(read_stream, stream, CHUNK_BYTES)) if len(first) == CHUNK_BYTES else b""
    if not second:
        return (yield from _put_one_chunk(transfer, change, BufferSource(first)))
    upload = yield from _open_upload(transfer, CutKind.FIXED)
    try:
        pipeline = Pipeline(WINDOW_REQUESTS)
        piece = first
        following = second
        while piece:
            yield from pipeline.submit(*_store_payloads(upload, [memoryview(piece)]))
            yield from _store_manifests(upload, pipeline)
            piece = following
            following = (
                (yield from work(read_stream, stream, CHUNK_BYTES)) if len(piece) == CHUNK_BYTES else b""
            )
        yield from pipeline.drain()
        return (yield from _commit(upload, change))
    except EngineUnreachable:
        raise  # it was waited for already, and the session ends by itself
    except BaseException:
        yield from _abandon(upload)
        raise


def result_of(item: NameResult) -> ObjectStat:
    """The stat of a batch's item, or its error raised."""
    if item.failure is not None:
        raise from_wire(item.failure.wire_code, item.failure.message, item.failure.subject)
    assert item.stat is not None
    return item.stat


def only_result(reply: Reply) -> ObjectStat:
    """The stat of a batch of one, or its error raised."""
    assert isinstance(reply.message, NameResults)
    (item,) = reply.message.results
    return result_of(item)


def _put_one_chunk(transfer: Transfer, change: NameChange, source: Source) -> Steps[PutResult]:
    payload = yield from work(source.read_at, 0, source.size_bytes)
    source.verify_unchanged()
    reply = yield from send(PutObjects([len(payload)], [change]), body=[payload])
    stat = only_result(reply)
    transfer.progress(len(payload), 0)
    return PutResult(stat, len(payload), len(payload))


def _put_many_chunks(
    transfer: Transfer, change: NameChange, source: Source, plan: CutPlan
) -> Steps[PutResult]:
    upload = yield from _open_upload(transfer, plan.cut_kind)
    try:
        if transfer.descriptors and source.descriptor is not None:
            yield from _store_by_descriptor(upload, source, plan)
        else:
            yield from _store_by_body(upload, source, plan)
        source.verify_unchanged()
        return (yield from _commit(upload, change))
    except EngineUnreachable:
        raise  # it was waited for already, and the session ends by itself
    except SessionLost:
        upload.untell()
        raise
    except BaseException:
        yield from _abandon(upload)
        raise


def _open_upload(transfer: Transfer, cut_kind: CutKind) -> Steps[_Upload]:
    reply = yield from send(SessionOpen())
    assert isinstance(reply.message, SessionOpened)
    return _Upload(transfer, SessionId(reply.message.session), ManifestBuilder(cut_kind))


def _abandon(upload: _Upload) -> Steps[None]:
    """End the session after a failure; when the engine is gone the session ends by itself."""
    yield from _forget(SessionEnd(upload.session))


def _forget(request: SessionEnd | SourceClose) -> Steps[None]:
    """Give something back after a failure, which is what is raised."""
    try:
        yield from send(request)
    except LakeError:
        return


def _batches(plan: CutPlan) -> Iterator[list[tuple[int, int]]]:
    extents = iter_extents(plan.lengths())
    while batch := list(islice(extents, STORE_CHUNKS_PER_REQUEST)):
        yield batch


def _store_by_descriptor(upload: _Upload, source: Source, plan: CutPlan) -> Steps[None]:
    """The engine reads the source itself; nothing passes through this process."""
    assert source.descriptor is not None
    reply = yield from send(SourceOpen(), descriptors=[source.descriptor])
    assert isinstance(reply.message, SourceOpened)
    number = reply.message.source
    pipeline = Pipeline(WINDOW_REQUESTS)
    try:
        for batch in _batches(plan):
            offsets = [offset for offset, _ in batch]
            lengths = [length for _, length in batch]
            request = StoreFromSource(upload.session, number, offsets, lengths)
            yield from pipeline.submit(Send(request), _note_stored(upload, lengths))
            yield from _store_manifests(upload, pipeline)
        yield from pipeline.drain()
    except EngineUnreachable:
        raise  # the source ends with the connection
    except BaseException:
        yield from _forget(SourceClose(number))
        raise
    yield from send(SourceClose(number))


def _store_by_body(upload: _Upload, source: Source, plan: CutPlan) -> Steps[None]:
    pipeline = Pipeline(WINDOW_REQUESTS)
    for batch in _batches(plan):
        payloads: list[memoryview] = []
        for offset, length in batch:
            payloads.append((yield from work(source.read_at, offset, length)))
        if upload.transfer.network:
            yield from pipeline.submit(*_offer_payloads(upload, payloads, pipeline))
        else:
            yield from pipeline.submit(*_store_payloads(upload, payloads))
        yield from _store_manifests(upload, pipeline)
    yield from pipeline.drain()


def _note_stored(upload: _Upload, lengths: list[int]) -> Callable[[Reply], None]:
    def done(reply: Reply) -> None:
        assert isinstance(reply.message, Stored)
        upload.stored(reply.message.chunks, lengths, reply.message.fresh)

    return done


def _store_payloads(upload: _Upload, payloads: list[memoryview]) -> tuple[Send, Callable[[Reply], None]]:
    lengths = [len(payload) for payload in payloads]
    kinds = [int(ChunkKind.DATA)] * len(payloads)
    request = StoreChunks(upload.session, kinds, lengths)
    return Send(request, body=payloads), _note_stored(upload, lengths)


def _offer_payloads(
    upload: _Upload, payloads: list[memoryview], pipeline: Pipeline
) -> tuple[Work, Callable[[list[ChunkId]], Steps[None]]]:
    """Hash in a thread, offer the ids, send only what the engine lacks.

    Everything waits in the pipeline's order, so chunks are noted in the blob's order.
    """

    def hashed(ids: list[ChunkId]) -> Steps[None]:
        reply = yield from send(Offer(upload.session, [bytes(identifier) for identifier in ids]))
        assert isinstance(reply.message, Offered)
        present = reply.message.present
        missing = [payload for payload, there in zip(payloads, present, strict=True) if not there]
        if missing:
            effect, _ = _store_payloads(upload, missing)
            stored = yield from send(effect.request, body=effect.body)
            assert isinstance(stored.message, Stored)
        upload.stored(
            [bytes(identifier) for identifier in ids],
            [len(payload) for payload in payloads],
            [not there for there in present],
        )

    return Work(_hash_all, (payloads,)), hashed


def _hash_all(payloads: list[memoryview]) -> list[ChunkId]:
    return [data_chunk_id(payload) for payload in payloads]


def _store_manifests(upload: _Upload, pipeline: Pipeline) -> Steps[None]:
    """Send manifests that became full, so that a huge put holds one open manifest per level."""
    while upload.manifests:
        _, payload = upload.manifests.pop(0)
        request = StoreChunks(upload.session, [int(ChunkKind.MANIFEST)], [len(payload)])
        yield from pipeline.submit(Send(request, body=[payload]), lambda reply: None)


def _finish_manifests(upload: _Upload) -> Steps[ManifestTree]:
    tree = upload.builder.finish()
    upload.manifests.extend(tree.manifests)
    pipeline = Pipeline(1)
    yield from _store_manifests(upload, pipeline)
    yield from pipeline.drain()
    return tree


def _commit(upload: _Upload, change: NameChange) -> Steps[PutResult]:
    tree = yield from _finish_manifests(upload)
    bound = _with_blob(change, tree.blob)
    reply = yield from send(Commit(upload.session, [bound], end_session=True))
    return PutResult(only_result(reply), tree.size_bytes, upload.new_bytes)


def _with_blob(change: NameChange, blob: BlobId) -> NameChange:
    return NameChange(
        change.bucket, change.key, blob, change.attributes, change.condition, change.create_bucket
    )
