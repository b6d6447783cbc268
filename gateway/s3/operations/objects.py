"""GET and HEAD of objects, and of one part (`?partNumber=N`); GetObjectAttributes: attributes as XML, without content.

Content is read, checked and sent by `gateway.s3.request.content`.

An object from a multipart upload has the parts that it was completed from, under their numbers, for as long as it
exists.  Any other object, a copy too, is one part.  Parts are requested from the engine only if the client names one,
or lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from gateway.http.messages import Response
from gateway.http.ranges import (
    ByteRange,
    Condition,
    NoRange,
    check_conditions,
    content_range,
    format_http_date,
    range_holds,
    select_range,
    stated_range,
)
from gateway.s3.door.teaching import S3Door, Seen
from gateway.s3.operations.versions import asked_stat, asked_stat_seen, asked_version, version_headers
from gateway.s3.protocol.attributes import OVERRIDES, checksum_headers, is_composite, object_headers
from gateway.s3.protocol.checksums import ELEMENTS, Algorithm, encoded
from gateway.s3.protocol.errors import S3Error, invalid_argument, no_such_key, precondition_failed
from gateway.s3.protocol.xml import document, element
from gateway.s3.request.call import Call, bad_part_number, whole_number, xml_response
from lakefs.get.opened import Opened, Piece
from lakefs.limits import LIST_PAGE_MAX, S3_PARTS_MAX
from lakefs.names import Name
from lakefs.wire.messages import ObjectPart, ObjectParts, ObjectStat, UploadedParts

_NS: Final = 1_000_000_000
_PART: Final = "partNumber"
_ATTRIBUTES: Final = b"x-amz-object-attributes"
_NAMES: Final = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")


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
    stat, seen = await asked_stat_seen(call)
    if stat.kind == 1 and not (stat.blob and call.key.endswith("/")):
        raise no_such_key(call.key)
    refused = _condition_refusal(call, stat)
    if refused is not None:
        return refused
    part = await _asked_part(call, stat)
    status, headers, chosen = _headers(call, stat, seen, part, [])
    return Response(status, headers, length=chosen.stop - chosen.first)


async def get_object_attributes(call: Call) -> Response:
    """Return the requested attributes that the object has.  S3Error if none, or unknown ones, are requested."""
    wanted = _wanted(call)
    stat = await asked_stat(call)
    if not stat.blob:
        raise no_such_key(call.key)
    said = {
        "ETag": element("ETag", stat.etag),
        "Checksum": _checksum(stat),
        "ObjectParts": await _object_parts(call, stat) if "ObjectParts" in wanted else "",
        "StorageClass": element("StorageClass", "STANDARD"),
        "ObjectSize": element("ObjectSize", stat.size_bytes),
    }
    fields = "".join(said[name] for name in _NAMES if name in wanted)
    modified = (b"Last-Modified", format_http_date(stat.last_modified_ns // _NS).encode())
    headers = [modified, *version_headers(stat)]
    return xml_response(document("GetObjectAttributesResponse", fields), headers)


# --- content ---------------------------------------------------------------------------------------------


async def _answered(call: Call, opened: Opened) -> Response | None:
    """Return the answer, which closes `opened`; None if the object must be opened with a lease."""
    response: Response | None = None
    try:
        part = await _asked_part(call, opened.stat)
        response = _answer(call, opened, part)
    finally:
        if opened.lease and (response is None or response.stream is None):
            await call.lakes.contents.close(opened)
    return response


def _answer(call: Call, opened: Opened, part: _AskedPart | None) -> Response | None:
    stat = opened.stat
    refused = _condition_refusal(call, stat)
    if refused is not None:
        return refused
    contents = call.lakes.contents
    status, headers, chosen = _headers(call, stat, Seen(opened.stamps, opened.epoch), part, opened.pieces)
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
    if not range_holds(headers.get(b"if-range"), stat.etag, stat.last_modified_ns // _NS):
        return NoRange.WHOLE
    return select_range(headers.get(b"range"), stat.size_bytes)


def _condition_refusal(call: Call, stat: ObjectStat) -> Response | None:
    """Return a 304, or raise S3Error 412, if the request's conditions do not hold."""
    match check_conditions(call.headers, stat.etag, stat.last_modified_ns // _NS):
        case Condition.FAILED:
            raise precondition_failed()
        case Condition.NOT_MODIFIED:
            return Response(304, object_headers(stat))
    return None


def _headers(
    call: Call, stat: ObjectStat, seen: Seen, part: _AskedPart | None, pieces: Sequence[Piece]
) -> tuple[int, list[tuple[bytes, bytes]], ByteRange]:
    """Return status, headers, and the bytes to answer; teach them to the door.  S3Error InvalidRange."""
    selected = _selected(call, stat) if part is None else part.selected
    if selected is NoRange.UNSATISFIABLE:
        raise S3Error(
            416,
            "InvalidRange",
            "The requested range is not satisfiable",
            headers={"Content-Range": content_range(selected, stat.size_bytes)},
            details={"ActualObjectSize": str(stat.size_bytes)},
        )
    headers = object_headers(stat)
    if call.target.parameters:
        headers = _overridden(call, headers)
    if part is not None:
        headers += part.headers
    elif call.lakes.door is not None:
        _teach(call, call.lakes.door, stat, headers, pieces, seen)
    is_whole = part is None and not isinstance(selected, ByteRange)
    if is_whole and call.header(b"x-amz-checksum-mode").upper() == "ENABLED":
        headers += checksum_headers(stat.checksums)
    if isinstance(selected, ByteRange):
        headers.append((b"Content-Range", content_range(selected, stat.size_bytes).encode()))
        return 206, headers, selected
    return 200, headers, ByteRange(0, stat.size_bytes)


def _teach(
    call: Call, door: S3Door, stat: ObjectStat, lines: list[tuple[bytes, bytes]], pieces: Sequence[Piece], seen: Seen
) -> None:
    """Teach the door an answer: it is the same for every caller with a key that may read it."""
    if call.signature is not None and not call.target.moved:
        door.learn_signature(call.request.head, call.signature)
        door.learn_object(call.request.head, call.target, call.signature, stat, lines, pieces, seen)


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


# --- one part --------------------------------------------------------------------------------------------


class _AskedPart(NamedTuple):
    """The bytes of a part, and the headers that describe it."""

    selected: ByteRange | NoRange
    headers: list[tuple[bytes, bytes]]


async def _asked_part(call: Call, stat: ObjectStat) -> _AskedPart | None:
    """Return the part that a request names; None if it names none.

    S3Error InvalidRequest beside a Range, InvalidArgument for no number, InvalidPartNumber if no such part exists.
    """
    if _PART not in call.target.parameters:
        return None
    if b"range" in call.headers:
        raise S3Error(400, "InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    text = call.parameter(_PART)
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= S3_PARTS_MAX):
        raise bad_part_number(text[:64])
    number = int(text)
    with_checksums = call.header(b"x-amz-checksum-mode").upper() == "ENABLED"
    known = await _known_parts(call, stat, number - 1, 1)
    if not known.part_count:
        if number != 1:
            raise _no_such_part()
        headers = checksum_headers(stat.checksums) if with_checksums else []
        return _AskedPart(_bytes(0, stat.size_bytes), headers)
    if not known.parts or known.parts[0].number != number:
        raise _no_such_part()
    part = known.parts[0]
    headers = [(b"x-amz-mp-parts-count", b"%d" % known.part_count)]
    if with_checksums:
        headers += checksum_headers(part.checksums, is_of_composite=is_composite(stat.checksums))
    return _AskedPart(_bytes(part.offset, part.size_bytes), headers)


async def _known_parts(call: Call, stat: ObjectStat, after: int, limit: int) -> ObjectParts:
    """Return an object's parts with numbers above `after`; none if it was not uploaded in parts."""
    if not stat.upload:
        return ObjectParts(0, [])
    return await call.ask(UploadedParts(stat.upload, after, limit), ObjectParts)


def _bytes(offset: int, size_bytes: int) -> ByteRange | NoRange:
    return ByteRange(offset, offset + size_bytes) if size_bytes else NoRange.WHOLE


def _no_such_part() -> S3Error:
    return S3Error(416, "InvalidPartNumber", "The requested partnumber is not satisfiable")


# --- attributes ------------------------------------------------------------------------------------------


def _wanted(call: Call) -> frozenset[str]:
    text = call.header(_ATTRIBUTES)
    if not text:
        raise S3Error(400, "InvalidRequest", f"Missing required header for this request: {_ATTRIBUTES.decode()}")
    names = frozenset(name.strip() for name in text.split(","))
    if not names <= set(_NAMES):
        raise invalid_argument("Invalid attribute name specified.", _ATTRIBUTES.decode(), text[:256])
    return names


def _checksum(stat: ObjectStat) -> str:
    """Return the checksum of the whole; a composite one without the number of parts, as S3 has it here."""
    if not stat.checksums:
        return ""
    sums = _sums({name.partition("/")[0]: digest for name, digest in stat.checksums.items()})
    kind = "COMPOSITE" if is_composite(stat.checksums) else "FULL_OBJECT"
    return f"<Checksum>{sums}{element('ChecksumType', kind)}</Checksum>"


async def _object_parts(call: Call, stat: ObjectStat) -> str:
    """Return a page of the parts; "" for an object without parts."""
    name = b"x-amz-part-number-marker"
    marker = whole_number(name.decode(), call.header(name), 0, S3_PARTS_MAX)
    name = b"x-amz-max-parts"
    limit = min(whole_number(name.decode(), call.header(name), LIST_PAGE_MAX, 1 << 31), LIST_PAGE_MAX)
    page = await _known_parts(call, stat, marker, max(1, limit))
    if not page.part_count:
        return ""
    parts = page.parts if limit else []
    fields = [
        element("PartsCount", page.part_count),
        element("PartNumberMarker", marker),
        element("NextPartNumberMarker", parts[-1].number if parts else marker),
        element("MaxParts", limit),
        element("IsTruncated", bool(limit and page.next_after)),
        *map(_part, parts),
    ]
    return f"<ObjectParts>{''.join(fields)}</ObjectParts>"


def _part(part: ObjectPart) -> str:
    sizes = element("PartNumber", part.number) + element("Size", part.size_bytes)
    return f"<Part>{sizes}{_sums(part.checksums)}</Part>"


def _sums(checksums: dict[str, bytes]) -> str:
    return "".join(element(ELEMENTS[Algorithm(name)], encoded(digest)) for name, digest in checksums.items())
