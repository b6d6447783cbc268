"""One part of an object: `?partNumber=N` of GET and HEAD, as S3 has it.

An object from a multipart upload has the parts that it was completed from, under their numbers, for as long as it
exists.  Any other object, a copy too, is one part.  The engine is asked only when a request names a part.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.http.ranges import ByteRange, NoRange
from gateway.s3.protocol.attributes import checksum_headers, is_composite
from gateway.s3.protocol.errors import S3Error, invalid_argument
from gateway.s3.request.call import Call
from lakefs.limits import S3_PARTS_MAX
from lakefs.wire.messages import ObjectParts, ObjectStat, UploadedParts

PARAMETER: Final = "partNumber"
NO_PARTS: Final = ObjectParts(0, [])


class AskedPart(NamedTuple):
    """The bytes of a part, and the headers that describe it."""

    selected: ByteRange | NoRange
    headers: list[tuple[bytes, bytes]]


async def asked_part(call: Call, stat: ObjectStat) -> AskedPart | None:
    """Return the part that a request names; None if it names none.

    S3Error InvalidRequest beside a Range, InvalidArgument for no number, InvalidPartNumber if no such part exists.
    """
    if PARAMETER not in call.target.parameters:
        return None
    if b"range" in call.headers:
        raise S3Error(400, "InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    number = _number(call.parameter(PARAMETER))
    with_checksums = call.header(b"x-amz-checksum-mode").upper() == "ENABLED"
    known = await known_parts(call, stat, number - 1, 1)
    if not known.part_count:
        if number != 1:
            raise _no_such_part()
        headers = checksum_headers(stat.checksums) if with_checksums else []
        return AskedPart(_bytes(0, stat.size_bytes), headers)
    if not known.parts or known.parts[0].number != number:
        raise _no_such_part()
    part = known.parts[0]
    headers = [(b"x-amz-mp-parts-count", b"%d" % known.part_count)]
    if with_checksums:
        headers += checksum_headers(part.checksums, is_of_composite=is_composite(stat.checksums))
    return AskedPart(_bytes(part.offset, part.size_bytes), headers)


async def known_parts(call: Call, stat: ObjectStat, after: int, limit: int) -> ObjectParts:
    """Return an object's parts with numbers above `after`; none if it was not uploaded in parts."""
    if not stat.upload:
        return NO_PARTS
    return await call.ask(UploadedParts(stat.upload, after, limit), ObjectParts)


def _bytes(offset: int, size_bytes: int) -> ByteRange | NoRange:
    return ByteRange(offset, offset + size_bytes) if size_bytes else NoRange.WHOLE


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= S3_PARTS_MAX):
        raise invalid_argument(
            f"Part number must be an integer between 1 and {S3_PARTS_MAX}, inclusive", PARAMETER, text[:64]
        )
    return int(text)


def _no_such_part() -> S3Error:
    return S3Error(416, "InvalidPartNumber", "The requested partnumber is not satisfiable")
