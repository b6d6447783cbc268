"""GET and HEAD of objects.

Content is read, checked and sent by `gateway.s3.request.content`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gateway.http.messages import Response
from gateway.http.ranges import (
    ByteRange,
    Condition,
    NoRange,
    check_conditions,
    content_range,
    range_holds,
    select_range,
    stated_range,
)
from gateway.s3.operations.object_parts import AskedPart, asked_part
from gateway.s3.operations.versions import asked_stat, asked_version
from gateway.s3.protocol.attributes import OVERRIDES, object_headers
from gateway.s3.protocol.errors import S3Error, no_such_key, precondition_failed
from gateway.s3.request.call import Call
from lakefs.get.opened import Opened
from lakefs.names import Name
from lakefs.wire.messages import ObjectStat

_NS: Final = 1_000_000_000


async def get_object(call: Call) -> Response:
    """Return the content, or one range of it, under the request's conditions."""
    version = asked_version(call)
    contents, name = call.lakes.contents, Name(call.bucket, call.key)
    opened = await contents.open(name, stated_range(call.headers.get(b"range")), version)
    response = await _answered(call, opened)
    if response is None:  # neither in memory nor leased
        response = await _answered(call, await contents.open_leased(name, version))
    assert response is not None
    return response


async def head_object(call: Call) -> Response:
    """Return the answer of GET without the content."""
    stat = await asked_stat(call)
    if stat.kind == 1 and not (stat.blob and call.key.endswith("/")):
        raise no_such_key(call.key)
    refused = _condition_refusal(call, stat)
    if refused is not None:
        return refused
    part = await asked_part(call, stat)
    status, headers, chosen = _headers(call, stat, part)
    return Response(status, headers, length=chosen.stop - chosen.first)


async def _answered(call: Call, opened: Opened) -> Response | None:
    """Return the answer, which closes `opened`; None if the object must be opened with a lease."""
    response: Response | None = None
    try:
        part = await asked_part(call, opened.stat)
        response = _answer(call, opened, part)
    finally:
        if opened.lease and (response is None or response.stream is None):
            await call.lakes.contents.close(opened)
    return response


def _answer(call: Call, opened: Opened, part: AskedPart | None) -> Response | None:
    stat = opened.stat
    refused = _condition_refusal(call, stat)
    if refused is not None:
        return refused
    contents = call.lakes.contents
    status, headers, chosen = _headers(call, stat, part)
    content = contents.at_hand(opened, chosen)
    if content is not None:
        return Response(status, headers, [content])
    if not opened.lease:
        return None
    return Response(
        status,
        headers,
        length=chosen.stop - chosen.first,
        stream=partial(contents.send, opened, chosen),
        done=partial(contents.close, opened),
    )


def _selected(call: Call, stat: ObjectStat) -> ByteRange | NoRange:
    headers = call.headers
    if not range_holds(headers.get(b"if-range"), stat.etag, stat.mtime_ns // _NS):
        return NoRange.WHOLE
    return select_range(headers.get(b"range"), stat.size_bytes)


def _condition_refusal(call: Call, stat: ObjectStat) -> Response | None:
    """Return a 304, or raise S3Error 412, if the request's conditions do not hold."""
    match check_conditions(call.headers, stat.etag, stat.mtime_ns // _NS):
        case Condition.FAILED:
            raise precondition_failed()
        case Condition.NOT_MODIFIED:
            return Response(304, object_headers(stat, with_checksums=False))
    return None


def _headers(call: Call, stat: ObjectStat, part: AskedPart | None) -> tuple[int, list[tuple[bytes, bytes]], ByteRange]:
    """Return status, headers, and the bytes to answer.  S3Error InvalidRange."""
    selected = _selected(call, stat) if part is None else part.selected
    if selected is NoRange.UNSATISFIABLE:
        raise S3Error(
            416,
            "InvalidRange",
            "The requested range is not satisfiable",
            headers={"Content-Range": content_range(selected, stat.size_bytes)},
            details={"ActualObjectSize": str(stat.size_bytes)},
        )
    is_whole = part is None and not isinstance(selected, ByteRange)
    with_checksums = is_whole and call.header(b"x-amz-checksum-mode").upper() == "ENABLED"
    headers = object_headers(stat, with_checksums=with_checksums)
    if part is not None:
        headers += part.headers
    if call.target.parameters:
        headers = _overridden(call, headers)
    if isinstance(selected, ByteRange):
        headers.append((b"Content-Range", content_range(selected, stat.size_bytes).encode()))
        return 206, headers, selected
    return 200, headers, ByteRange(0, stat.size_bytes)


def _overridden(call: Call, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Replace headers by response-* parameters; only in a signed request, as S3 has it."""
    given = {name: call.parameter(parameter) for parameter, name in OVERRIDES.items() if call.parameter(parameter)}
    if not given:
        return headers
    if call.signature is None:
        raise S3Error(
            400, "InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests."
        )
    if any(character < " " for value in given.values() for character in value):
        raise S3Error(400, "InvalidArgument", "a response header has no control characters")
    kept = [(name, value) for name, value in headers if name not in given]
    return kept + [(name, value.encode("latin-1", "replace")) for name, value in given.items()]
