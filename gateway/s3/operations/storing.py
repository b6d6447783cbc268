"""PUT of an object: received, proven, stored, named; the name changes at once or not at all.

A payload of one chunk is stored with one request.  A longer one is cut as a put of a file cuts it (a safetensors file
at its tensors) and stored while it is received, at most `S3_STORE_WINDOW` chunks at a time in the gateway's memory.
The header of a safetensors file, at most 32 MiB, is received whole first: it has the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import trio

from gateway.http.messages import Response
from gateway.s3.operations.versions import version_headers
from gateway.s3.protocol.attributes import attributes_of, checksum_headers
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.headers import write_condition
from gateway.s3.request.call import Call, stat_of
from gateway.s3.request.payload import Incoming
from gateway.s3.request.receiving import Received
from lakefs.content.chunking import CutPlan, plan
from lakefs.content.safetensors import SMALLEST_FILE_BYTES, header_bytes
from lakefs.ids import Buffer, ChunkKind
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES, S3_STORE_WINDOW
from lakefs.put.upload import Upload, abandon_upload, commit_upload, open_upload
from lakefs.wire.messages import Condition, NameChange, NameResults, ObjectStat, PutObjects, StoreChunks, Stored

ETAG_MD5: Final = 1


async def put_object(call: Call) -> Response:
    """Store an object.  Durable on return."""
    condition = write_condition(call.headers)
    incoming = Incoming(call)
    if incoming.length_bytes > BLOB_BYTES_MAX:
        raise S3Error(400, "EntityTooLarge", "Your proposed upload exceeds the maximum allowed object size.")
    if incoming.length_bytes <= CHUNK_BYTES:
        stat = await _put_one_chunk(call, incoming, condition)
    else:
        stat = await _put_chunks(call, incoming, condition)
    if call.lakes.door is not None and call.signature is not None:
        call.lakes.door.learn_signature(call.request.head, call.signature)
    return Response(200, put_headers(stat))


def put_headers(stat: ObjectStat) -> list[tuple[bytes, bytes]]:
    """Return the headers of the answer to a PUT."""
    headers = [(b"ETag", b'"%b"' % stat.etag.encode())]
    if stat.checksums:
        headers += checksum_headers(stat.checksums)
    return headers + version_headers(stat)


async def _put_one_chunk(call: Call, incoming: Incoming, condition: Condition) -> ObjectStat:
    received = await incoming.take(incoming.length_bytes)
    try:
        payload = received.memory
        await incoming.fill(payload)
        change = await _proven_change(call, incoming, condition)
        request = PutObjects([len(payload)], [change])
        message = (await call.lakes.engine.call(request, received.body(payload))).message
    finally:
        received.release()
    assert isinstance(message, NameResults)
    return stat_of(message.results[0], call.key)


async def _put_chunks(call: Call, incoming: Incoming, condition: Condition) -> ObjectStat:
    driver = call.lakes.driver
    first, cuts = await _planned(incoming)
    try:
        upload = await driver.run(open_upload(driver.steps.transfer(None), cuts.cut_kind))
    except BaseException:
        first.release()
        raise
    try:
        await store_chunks(call, incoming, upload, first, cuts.lengths())
        change = await _proven_change(call, incoming, condition)
        return (await driver.run(commit_upload(upload, change))).stat
    except BaseException:
        with trio.CancelScope(shield=True):
            await driver.run(abandon_upload(upload))
        raise


async def _proven_change(call: Call, incoming: Incoming, condition: Condition) -> NameChange:
    sums = await incoming.finish()
    attributes = attributes_of(call.headers, etag_kind=ETAG_MD5, etag=incoming.md5, sums=sums)
    return NameChange(call.bucket, call.key, b"", attributes, condition)


async def _planned(incoming: Incoming) -> tuple[Received, CutPlan]:
    """Receive enough of a payload to know its cuts; return those first bytes, and the cuts."""
    size_bytes = incoming.length_bytes
    first = await incoming.take(min(size_bytes, CHUNK_BYTES))
    try:
        await incoming.fill(first.memory)
        needed = header_bytes(first.memory, size_bytes) if size_bytes >= SMALLEST_FILE_BYTES else None
        if needed is None:
            return first, CutPlan(size_bytes)
        if needed > len(first.memory):
            longer = memoryview(bytearray(needed))
            longer[: len(first.memory)] = first.memory
            first.release()
            first = Received(longer)
            await incoming.fill(longer[CHUNK_BYTES:])
        return first, await incoming.offload.run(plan, first.memory, size_bytes)
    except BaseException:
        first.release()
        raise


async def store_chunks(
    call: Call, incoming: Incoming, upload: Upload, first: Received | None, lengths: Iterator[int]
) -> None:
    """Store a payload's chunks while they are received, and note them in order.  `first` was received before.

    `first` is released, however this ends.
    """
    storing = _Storing(call, upload, incoming, first)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(storing.run, lengths, nursery)
    if storing.failure is not None:
        raise storing.failure


class _Storing:
    """Chunks on their way to the store; they are noted in the blob's order."""

    def __init__(self, call: Call, upload: Upload, incoming: Incoming, first: Received | None) -> None:
        self.failure: Exception | None = None
        """The first error; the caller raises it, so that it is not wrapped in the nursery's group."""
        self._engine = call.lakes.engine
        self._upload = upload
        self._incoming = incoming
        self._received = first or Received(memoryview(b""))
        self._rest = self._received.memory  # the part of it that is not stored yet
        self._window = trio.Semaphore(S3_STORE_WINDOW)

    async def run(self, lengths: Iterator[int], nursery: trio.Nursery) -> None:
        """Receive chunks, and start a task to store each."""
        before = trio.Event()
        before.set()
        try:
            for length in lengths:
                await self._window.acquire()
                if len(self._rest) < length:
                    await self._receive(length)
                chunk, self._rest = self._rest[:length], self._rest[length:]
                noted = trio.Event()
                self._received.retain()
                nursery.start_soon(self._store, self._received, chunk, before, noted, nursery.cancel_scope)
                before = noted
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self._fail(error, nursery.cancel_scope)
        finally:
            self._received.release()

    async def _receive(self, length: int) -> None:
        """Receive the next chunk; its first bytes may have been received already."""
        begun = bytes(self._rest)
        self._received.release()
        self._received = Received(memoryview(b""))
        self._received = await self._incoming.take(length)
        self._rest = self._received.memory
        self._rest[: len(begun)] = begun
        await self._incoming.fill(self._rest[len(begun) :])

    async def _store(
        self, received: Received, chunk: memoryview, before: trio.Event, noted: trio.Event, scope: trio.CancelScope
    ) -> None:
        try:
            stored = await self._send(ChunkKind.DATA, len(chunk), received.body(chunk))
            await before.wait()
            self._upload.stored(stored.chunks, [len(chunk)], stored.fresh)
            while self._upload.manifests:
                _, payload = self._upload.manifests.pop(0)
                await self._send(ChunkKind.MANIFEST, len(payload), [payload])
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self._fail(error, scope)
        finally:
            received.release()
        noted.set()
        self._window.release()

    async def _send(self, kind: ChunkKind, length: int, body: Sequence[Buffer]) -> Stored:
        request = StoreChunks(self._upload.session, [int(kind)], [length])
        message = (await self._engine.call(request, body)).message
        assert isinstance(message, Stored)
        return message

    def _fail(self, error: Exception, scope: trio.CancelScope) -> None:
        self.failure = self.failure or error
        scope.cancel()
