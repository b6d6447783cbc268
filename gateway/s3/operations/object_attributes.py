"""GetObjectAttributes: the attributes of an object, as XML, without its content."""

from __future__ import annotations

from typing import Final

from gateway.http.messages import Response
from gateway.http.ranges import format_http_date
from gateway.s3.operations.object_parts import known_parts
from gateway.s3.operations.versions import asked_stat, version_headers
from gateway.s3.protocol.attributes import is_composite
from gateway.s3.protocol.checksums import ELEMENTS, Algorithm, encoded
from gateway.s3.protocol.errors import S3Error, invalid_argument, no_such_key
from gateway.s3.protocol.xml import document, element
from gateway.s3.request.call import Call, xml_response
from lakefs.limits import LIST_PAGE_MAX, S3_PARTS_MAX
from lakefs.wire.messages import ObjectPart, ObjectStat

_HEADER: Final = b"x-amz-object-attributes"
_NAMES: Final = ("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize")
_NS: Final = 1_000_000_000


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
    modified = (b"Last-Modified", format_http_date(stat.mtime_ns // _NS).encode())
    headers = [modified, *version_headers(stat)]
    return xml_response(document("GetObjectAttributesResponse", fields), headers)


def _wanted(call: Call) -> frozenset[str]:
    text = call.header(_HEADER)
    if not text:
        raise S3Error(400, "InvalidRequest", f"Missing required header for this request: {_HEADER.decode()}")
    names = frozenset(name.strip() for name in text.split(","))
    if not names <= set(_NAMES):
        raise invalid_argument("Invalid attribute name specified.", _HEADER.decode(), text[:256])
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
    marker = _number(call, b"x-amz-part-number-marker", 0, S3_PARTS_MAX)
    limit = min(_number(call, b"x-amz-max-parts", LIST_PAGE_MAX, 1 << 31), LIST_PAGE_MAX)
    page = await known_parts(call, stat, marker, max(1, limit))
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


def _number(call: Call, header: bytes, default: int, limit: int) -> int:
    text = call.header(header)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= limit):
        name = header.decode()
        raise invalid_argument(f"Provided {name} not an integer or within integer range", name, text[:64])
    return int(text)
