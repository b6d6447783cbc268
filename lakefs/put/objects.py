"""Put: bytes -> chunks -> manifest -> name, written once as steps.

Shapes of a put; the cheapest one for the engine and the wire is chosen:
- one chunk: `PutObjects`, one round trip, one journal group (`PutSlots` from shared memory);
- shared memory that was lent: the engine copies slots of it (`StoreSlots`);
- a file, and a stream that carries descriptors: the engine reads the file itself (`StoreFromSource`);
- anything else: chunks in bodies, or READ by the engine over RDMA; where the wire is a network their ids are offered
  first.

Rules kept here:
- A name appears whole at `Commit` or not at all; a source that changed during the put is never committed.
- When a session is lost (engine restart), the put begins again, at most `ATTEMPTS` times in all.
- Memory: `STORE_WINDOW` requests in flight, and one open manifest per level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import BinaryIO

from lakefs.content.chunking import CutPlan, iter_extents, plan_file
from lakefs.content.manifest import CutKind
from lakefs.content.safetensors import LENGTH_BYTES, header_bytes
from lakefs.errors import BucketNotFound, EngineUnreachable, SessionLost, SourceChanged
from lakefs.limits import CHUNK_BYTES, STORE_REQUEST_CHUNKS, STORE_WINDOW
from lakefs.names import broken_rule, check_new_bucket_name
from lakefs.put.lent import lend, send_slots, store_by_slots
from lakefs.put.remote import put_remotely
from lakefs.put.sources import BufferSource, SlotSource, Source, read_stream
from lakefs.put.upload import (
    ATTEMPTS,
    PutResult,
    Transfer,
    Upload,
    abandon_upload,
    commit_upload,
    forget,
    note_stored,
    offer_payloads,
    only_item,
    open_upload,
    result_of,
    store_manifests,
    store_payloads,
)
from lakefs.steps.steps import Pipeline, Send, Steps, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    BucketList,
    NameChange,
    PutObjects,
    PutSlots,
    SourceClose,
    SourceOpen,
    SourceOpened,
    StoreFromSource,
)


def put(transfer: Transfer, change: NameChange, source: Source) -> Steps[PutResult]:
    """Store a source of known length under the name of `change`, which has no blob yet.  Durable on return.

    SourceChanged, PreconditionFailed, StoreFull, SessionLost (after ATTEMPTS), and errors about names.
    """
    size_bytes = source.size_bytes
    # Nine bytes of memory show that it is no safetensors file; all else is read and planned in a thread.
    is_plain = source.in_memory and header_bytes(source.read_at(0, LENGTH_BYTES + 1), size_bytes) is None
    if is_plain and size_bytes <= CHUNK_BYTES:
        return (yield from _put_one_chunk(transfer, change, source))
    plan = CutPlan(size_bytes) if is_plain else (yield from work(plan_file, _reader(source), size_bytes))
    if len(list(islice(plan.lengths(), 2))) <= 1:
        return (yield from _put_one_chunk(transfer, change, source))
    yield from _check_bucket(change)
    for attempt in range(ATTEMPTS):
        try:
            return (yield from _put_many_chunks(transfer, change, source, plan))
        except SessionLost:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def put_stream(transfer: Transfer, change: NameChange, stream: BinaryIO) -> Steps[PutResult]:
    """Store the bytes of a stream until its end under the name of `change`, cut every 4 MiB.  Durable on return.

    SessionLost when the session is lost: the put cannot begin again, because the stream was consumed.
    """
    first = yield from work(read_stream, stream, CHUNK_BYTES)
    second = (yield from work(read_stream, stream, CHUNK_BYTES)) if len(first) == CHUNK_BYTES else b""
    if not second:
        return (yield from _put_one_chunk(transfer, change, BufferSource(first)))
    yield from _check_bucket(change)
    upload = yield from open_upload(transfer, CutKind.FIXED)
    try:
        pipeline = Pipeline(STORE_WINDOW)
        piece = first
        following = second
        while piece:
            yield from pipeline.submit(*store_payloads(upload, [memoryview(piece)]))
            yield from store_manifests(upload, pipeline)
            piece = following
            following = (yield from work(read_stream, stream, CHUNK_BYTES)) if len(piece) == CHUNK_BYTES else b""
        yield from pipeline.drain()
        return (yield from commit_upload(upload, change))
    except EngineUnreachable:
        raise  # the client has waited for the engine already, and the session ends by itself
    except BaseException:
        yield from abandon_upload(upload)
        raise


def _put_one_chunk(transfer: Transfer, change: NameChange, source: Source) -> Steps[PutResult]:
    reply: Reply | None = None
    if isinstance(source, SlotSource):
        slot = source.slot
        reply = yield from send_slots(
            transfer, slot.memory, lambda number: PutSlots(number, [slot.offset], [slot.length], [change])
        )
    if reply is None:
        payload = yield from _read(source, 0, source.size_bytes)
        if not source.in_memory:
            source.verify_unchanged()
        if transfer.fabric is not None:
            reply = yield from put_remotely(transfer.fabric, [payload], lambda: [change])
    if reply is None:
        reply = yield from send(PutObjects([len(payload)], [change]), body=[payload])
    result = only_item(reply)
    new_bytes = source.size_bytes if result.fresh else 0
    if transfer.progress is not None:
        transfer.progress(source.size_bytes, source.size_bytes - new_bytes)
    return PutResult(result_of(result), source.size_bytes, new_bytes)


def _check_bucket(change: NameChange) -> Steps[None]:
    """Raise BucketNotFound or InvalidName before any bytes are sent that cannot be stored."""
    if change.create_bucket and not broken_rule(change.bucket):
        return
    try:
        yield from send(BucketList(change.bucket))
    except BucketNotFound:
        if change.create_bucket:
            check_new_bucket_name(change.bucket)
        raise


def _put_many_chunks(transfer: Transfer, change: NameChange, source: Source, plan: CutPlan) -> Steps[PutResult]:
    upload = yield from open_upload(transfer, plan.cut_kind)
    try:
        yield from store_source(upload, source, plan)
        source.verify_unchanged()
        return (yield from commit_upload(upload, change))
    except EngineUnreachable:
        raise  # the client has waited for the engine already, and the session ends by itself
    except SessionLost:
        upload.untell()
        yield from abandon_upload(upload)  # the session still exists if only a source, or lent memory, was lost
        raise
    except BaseException:
        yield from abandon_upload(upload)
        raise


def store_source(upload: Upload, source: Source, plan: CutPlan) -> Steps[None]:
    """Store a source's chunks, in the cheapest way that source and connection allow."""
    transfer = upload.transfer
    if isinstance(source, SlotSource):
        number = yield from lend(transfer, source.slot.memory)
        if number is not None:
            yield from store_by_slots(upload, source.slot, number, plan)
            return
    if transfer.offers.sources and source.descriptor is not None and source.size_bytes:
        yield from store_by_descriptor(upload, source, plan)
    else:
        yield from store_by_body(upload, source, plan)


def _read(source: Source, offset: int, length: int) -> Steps[memoryview]:
    """Return bytes of a source: a slice if it is in memory, else read in a thread."""
    if source.in_memory:
        return source.read_at(offset, length)
    return (yield from work(source.read_at, offset, length))


def _reader(source: Source) -> Callable[[int, int], bytes]:
    """Return a call that reads bytes of a source, for `plan_file`."""
    return lambda offset, length: bytes(source.read_at(offset, length))


def _batches(plan: CutPlan) -> Iterator[list[tuple[int, int]]]:
    extents = iter_extents(plan.lengths())
    while batch := list(islice(extents, STORE_REQUEST_CHUNKS)):
        yield batch


def store_by_descriptor(upload: Upload, source: Source, plan: CutPlan) -> Steps[None]:
    """Have the engine read the source itself; no payload passes through this process."""
    assert source.descriptor is not None
    reply = yield from send(SourceOpen(), descriptors=[source.descriptor])
    assert isinstance(reply.message, SourceOpened)
    number = reply.message.source
    pipeline = Pipeline(STORE_WINDOW)
    try:
        for batch in _batches(plan):
            offsets = [offset for offset, _ in batch]
            lengths = [length for _, length in batch]
            request = StoreFromSource(upload.session, number, offsets, lengths)
            yield from pipeline.submit(Send(request), note_stored(upload, lengths))
            yield from store_manifests(upload, pipeline)
        yield from pipeline.drain()
    except EngineUnreachable:
        raise  # the source ends with the connection
    except SourceChanged:
        yield from forget(SourceClose(number))
        source.verify_unchanged()  # the engine noticed first, and does not know the name
        raise
    except BaseException:
        yield from forget(SourceClose(number))
        raise
    yield from send(SourceClose(number))


def store_by_body(upload: Upload, source: Source, plan: CutPlan) -> Steps[None]:
    """Send a source's chunks in bodies; over a network only those that the engine lacks."""
    pipeline = Pipeline(STORE_WINDOW)
    for batch in _batches(plan):
        payloads: list[memoryview] = []
        for offset, length in batch:
            payloads.append((yield from _read(source, offset, length)))
        if upload.transfer.network:
            yield from pipeline.submit(*offer_payloads(upload, payloads, pipeline))
        else:
            yield from pipeline.submit(*store_payloads(upload, payloads))
        yield from store_manifests(upload, pipeline)
    yield from pipeline.drain()
