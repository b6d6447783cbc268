"""PUT of an object: received, proven, stored, named; the name changes at once or not at all.

A payload of one chunk is stored with one request.  A longer one is cut as a put of a file cuts it (a safetensors file
at its tensors) and stored while it comes, at most `WINDOW` chunks at a time in memory of the gateway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import trio

from gateway.http.messages import Response
from gateway.s3.attributes import attributes_of, checksum_headers
from gateway.s3.call import Call, stat_of
from gateway.s3.errors import S3Error, not_implemented
from gateway.s3.payload import Incoming
from lakefs.chunking import CutPlan, plan
from lakefs.ids import Buffer, ChunkKind
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES
from lakefs.safetensors import SMALLEST_FILE_BYTES, header_bytes
from lakefs.uploading import Upload, abandon_upload, commit_upload, open_upload
from lakefs.wire.messages import (
    Condition,
    NameChange,
    NameResults,
    ObjectStat,
    PutObjects,
    StoreChunks,
    Stored,
)

WINDOW: Final = 3
_ETAG_MD5: Final = 1


async def put_object(call: Call) -> Response:
    """Durable on return."""
    condition = write_condition(call)
    incoming = Incoming(call)
    if incoming.length_bytes > BLOB_BYTES_MAX:
        raise S3Error(400, "EntityTooLarge", "Your proposed upload exceeds the maximum allowed object size.")
    if incoming.length_bytes <= CHUNK_BYTES:
        stat = await _put_one_chunk(call, incoming, condition)
    else:
        stat = await _put_chunks(call, incoming, condition)
    return Response(200, [(b"ETag", b'"%b"' % stat.etag.encode()), *checksum_headers(stat.checksums)])


def write_condition(call: Call) -> Condition:
    """If-Match and If-None-Match of a request that writes.  S3Error for what S3 does not have there."""
    match, none_match = call.headers.get(b"if-match"), call.headers.get(b"if-none-match")
    if none_match not in (None, b"*"):
        raise not_implemented("If-None-Match with anything but * on a write")
    etags = [] if match is None else [tag.strip().strip('"') for tag in match.decode("latin-1").split(",")]
    return Condition(absent=none_match is not None, etags=etags)


async def _put_one_chunk(call: Call, incoming: Incoming, condition: Condition) -> ObjectStat:
    payload = memoryview(bytearray(incoming.length_bytes))
    await incoming.fill(payload)
    change = await _proven_change(call, incoming, condition)
    message = (await call.lakes.engine.call(PutObjects([len(payload)], [change]), [payload])).message
    assert isinstance(message, NameResults)
    return stat_of(message.results[0], call.key)


async def _put_chunks(call: Call, incoming: Incoming, condition: Condition) -> ObjectStat:
    lake = call.lakes.lake
    prefix, cuts = await _planned(incoming)
    upload = await lake.run(open_upload(lake.steps.transfer(None), cuts.cut_kind))
    try:
        await store_chunks(call, incoming, upload, prefix, cuts.lengths())
        change = await _proven_change(call, incoming, condition)
        return (await lake.run(commit_upload(upload, change))).stat
    except BaseException:
        with trio.CancelScope(shield=True):
            await lake.run(abandon_upload(upload))
        raise


async def _proven_change(call: Call, incoming: Incoming, condition: Condition) -> NameChange:
    sums = await incoming.finish()
    attributes = attributes_of(
        call.headers, time.time_ns(), etag_kind=_ETAG_MD5, etag=incoming.md5, sums=sums
    )
    return NameChange(call.bucket, call.key, b"", attributes, condition)


async def _planned(incoming: Incoming) -> tuple[memoryview, CutPlan]:
    """The first bytes, at least as many as tell where a payload of that length is cut; and where it is."""
    size_bytes = incoming.length_bytes
    prefix = memoryview(bytearray(min(size_bytes, CHUNK_BYTES)))
    await incoming.fill(prefix)
    needed = header_bytes(prefix, size_bytes) if size_bytes >= SMALLEST_FILE_BYTES else None
    if needed is None:
        return prefix, CutPlan(size_bytes)
    if needed > len(prefix):
        longer = memoryview(bytearray(needed))
        longer[: len(prefix)] = prefix
        await incoming.fill(longer[len(prefix) :])
        prefix = longer
    return prefix, await incoming.offload.run(plan, prefix, size_bytes)


async def store_chunks(
    call: Call, incoming: Incoming, upload: Upload, prefix: memoryview, lengths: Iterator[int]
) -> None:
    """Store a payload's chunks while they come, `prefix` first; they are noted in the upload, in order."""
    storing = _Storing(call, upload)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(storing.run, incoming, prefix, lengths, nursery)
    if storing.failure is not None:
        raise storing.failure


class _Storing:
    """Chunks on their way to the store; they are noted in the blob's order."""

    def __init__(self, call: Call, upload: Upload) -> None:
        self.failure: Exception | None = None
        """Raised by the caller: not wrapped in the nursery's group."""
        self._engine = call.lakes.engine
        self._upload = upload
        self._window = trio.Semaphore(WINDOW)

    async def run(
        self, incoming: Incoming, prefix: memoryview, lengths: Iterator[int], nursery: trio.Nursery
    ) -> None:
        """Receive, and begin to store."""
        before = trio.Event()
        before.set()
        try:
            for length in lengths:
                await self._window.acquire()
                chunk, prefix = await _next_chunk(incoming, prefix, length)
                noted = trio.Event()
                nursery.start_soon(self._store, chunk, before, noted, nursery.cancel_scope)
                before = noted
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self._fail(error, nursery.cancel_scope)

    async def _store(
        self, chunk: memoryview, before: trio.Event, noted: trio.Event, scope: trio.CancelScope
    ) -> None:
        try:
            stored = await self._send(ChunkKind.DATA, chunk)
            await before.wait()
            self._upload.stored(stored.chunks, [len(chunk)], stored.fresh)
            while self._upload.manifests:
                _, payload = self._upload.manifests.pop(0)
                await self._send(ChunkKind.MANIFEST, payload)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self._fail(error, scope)
        noted.set()
        self._window.release()

    async def _send(self, kind: ChunkKind, payload: Buffer) -> Stored:
        request = StoreChunks(self._upload.session, [int(kind)], [len(payload)])
        message = (await self._engine.call(request, [payload])).message
        assert isinstance(message, Stored)
        return message

    def _fail(self, error: Exception, scope: trio.CancelScope) -> None:
        self.failure = self.failure or error
        scope.cancel()


async def _next_chunk(incoming: Incoming, prefix: memoryview, length: int) -> tuple[memoryview, memoryview]:
    """The next chunk, and what is left of what had been received before."""
    if len(prefix) >= length:
        return prefix[:length], prefix[length:]
    chunk = memoryview(bytearray(length))
    chunk[: len(prefix)] = prefix
    await incoming.fill(chunk[len(prefix) :])
    return chunk, prefix[:0]
