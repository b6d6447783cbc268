"""GET, HEAD and DELETE of objects.

A small object comes whole with the answer to one request.  A larger one is held by a lease while it is sent, in pieces
of 1 MiB, the next read while one goes out.  Every byte is checked here before it leaves: the whole payload of a small
object, granules of 64 KiB of others, by CRC32C.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from gateway.http.messages import Response, ResponseSender
from gateway.http.ranges import (
    ByteRange,
    Condition,
    NoRange,
    check_conditions,
    content_range,
    range_holds,
    select_range,
)
from gateway.s3.attributes import OVERRIDES, object_headers
from gateway.s3.call import Call, Lakes
from gateway.s3.errors import S3Error
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.getting import Opened, close_leases, open_object, read_range
from lakefs.limits import SMALL_PAYLOAD_BYTES
from lakefs.names import Name
from lakefs.wire.messages import DeleteNames, NameResults, ObjectStat, StatNames

_log: Final = structlog.get_logger(__name__)
_PIECE_BYTES: Final = 1 << 20
_NS: Final = 1_000_000_000


async def get_object(call: Call) -> Response:
    """The content, or one range of it, under the request's conditions."""
    _refuse_versions(call)
    opened = await _opened(call, lease=False)
    if not opened.lease and len(opened.inline) != len(opened.pieces):
        opened = await _opened(call, lease=True)  # too large to come along
    try:
        return await _answer(call, opened)
    except BaseException:
        await call.lakes.lake.run(close_leases([opened.lease]))
        raise


async def head_object(call: Call) -> Response:
    """What GET would answer, without the content."""
    _refuse_versions(call)
    stat = await call.ask_one(StatNames([(call.bucket, call.key)]))
    if stat.kind == 1 and not (stat.blob and call.key.endswith("/")):
        raise _no_such_key(call)
    refused = _condition_refusal(call, stat)
    if refused is not None:
        return refused
    selected = _selected(call, stat)
    status, headers, chosen = _headers(call, stat, selected)
    return Response(status, headers, length=chosen.stop - chosen.first)


async def delete_object(call: Call) -> Response:
    """204, whether it was there or not."""
    _refuse_versions(call)
    await call.ask(DeleteNames([(call.bucket, call.key)]), NameResults)
    return Response(204)


async def _opened(call: Call, *, lease: bool) -> Opened:
    lake = call.lakes.lake
    name = Name(call.bucket, call.key)
    return await lake.run(
        open_object(lake.steps.access(None), name, lease=lease, inline_bytes=SMALL_PAYLOAD_BYTES)
    )


async def _answer(call: Call, opened: Opened) -> Response:
    stat = opened.stat
    refused = _condition_refusal(call, stat)
    if refused is not None:
        await call.lakes.lake.run(close_leases([opened.lease]))
        return refused
    status, headers, chosen = _headers(call, stat, _selected(call, stat))
    if not opened.lease:
        content = b"".join(opened.inline[piece.chunk] for piece in opened.pieces)
        return Response(status, headers, [memoryview(content)[chosen.first : chosen.stop]])
    sending = _Sending(call.lakes, opened, chosen)
    return Response(status, headers, length=chosen.stop - chosen.first, stream=sending.run)


class _Sending:
    """The content of one opened object on its way out."""

    def __init__(self, lakes: Lakes, opened: Opened, chosen: ByteRange) -> None:
        self._lakes = lakes
        self._opened = opened
        self._chosen = chosen
        self._failure: LakeError | None = None

    async def run(self, sender: ResponseSender) -> None:
        """Send it; the lease is given back however that ends.

        EngineUnreachable when the client is gone, or nothing more can be read: the answer is cut short then.
        """
        pieces_out, pieces_in = trio.open_memory_channel[bytes](0)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, pieces_out)
                try:
                    async for piece in pieces_in:
                        await sender.send([piece])
                except EngineUnreachable as error:
                    self._failure = error
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._lakes.lake.run(close_leases([self._opened.lease]))
        if self._failure is not None:
            raise EngineUnreachable("an answer was cut short") from self._failure

    async def _read(self, pieces: trio.MemorySendChannel[bytes]) -> None:
        access = self._lakes.lake.steps.access(None)
        async with pieces:
            try:
                for at in range(self._chosen.first, self._chosen.stop, _PIECE_BYTES):
                    length = min(_PIECE_BYTES, self._chosen.stop - at)
                    await pieces.send(
                        await self._lakes.lake.run(read_range(access, self._opened, at, length))
                    )
            except LakeError as error:
                _log.error("an answer was cut short", name=str(self._opened.name), error=error.message)
                self._failure = error


def _selected(call: Call, stat: ObjectStat) -> ByteRange | NoRange:
    headers = call.headers
    if not range_holds(headers.get(b"if-range"), stat.etag, stat.mtime_ns // _NS):
        return NoRange.WHOLE
    return select_range(headers.get(b"range"), stat.size_bytes)


def _condition_refusal(call: Call, stat: ObjectStat) -> Response | None:
    """304, or S3Error 412, when the request's conditions do not hold."""
    match check_conditions(call.headers, stat.etag, stat.mtime_ns // _NS):
        case Condition.FAILED:
            raise S3Error(
                412,
                "PreconditionFailed",
                "At least one of the pre-conditions you specified did not hold",
            )
        case Condition.NOT_MODIFIED:
            return Response(304, object_headers(stat, with_checksums=False))
    return None


def _headers(
    call: Call, stat: ObjectStat, selected: ByteRange | NoRange
) -> tuple[int, list[tuple[bytes, bytes]], ByteRange]:
    """Status, headers, and the bytes to answer.  S3Error InvalidRange."""
    if selected is NoRange.UNSATISFIABLE:
        raise S3Error(
            416,
            "InvalidRange",
            "The requested range is not satisfiable",
            headers={"Content-Range": content_range(selected, stat.size_bytes)},
            details={"ActualObjectSize": str(stat.size_bytes)},
        )
    is_whole = not isinstance(selected, ByteRange)
    with_checksums = is_whole and call.header(b"x-amz-checksum-mode").upper() == "ENABLED"
    headers = object_headers(stat, with_checksums=with_checksums)
    if call.target.parameters:
        headers = _overridden(call, headers)
    if isinstance(selected, ByteRange):
        headers.append((b"Content-Range", content_range(selected, stat.size_bytes).encode()))
        return 206, headers, selected
    return 200, headers, ByteRange(0, stat.size_bytes)


def _overridden(call: Call, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """response-* parameters in the place of what is kept; only for who has signed, as S3 has it."""
    given = {
        name: call.parameter(parameter) for parameter, name in OVERRIDES.items() if call.parameter(parameter)
    }
    if not given:
        return headers
    if call.signature is None:
        raise S3Error(
            400,
            "InvalidRequest",
            "Request specific response headers cannot be used for anonymous GET requests.",
        )
    if any(character < " " for value in given.values() for character in value):
        raise S3Error(400, "InvalidArgument", "a response header has no control characters")
    kept = [(name, value) for name, value in headers if name not in given]
    return kept + [(name, value.encode("latin-1", "replace")) for name, value in given.items()]


def _refuse_versions(call: Call) -> None:
    version = call.parameter("versionId")
    if version not in ("", "null"):
        raise S3Error(404, "NoSuchVersion", "The specified version does not exist.")


def _no_such_key(call: Call) -> S3Error:
    return S3Error(404, "NoSuchKey", "The specified key does not exist.", details={"Key": call.key})
