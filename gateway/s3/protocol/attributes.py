"""Attributes and tags of objects: from S3's headers to the store's record of a name, and back.  Pure.

An object has at most 10 tags.  A key has 1 to 128 characters, a value at most 256 (of UTF-16, as S3 counts them), of
letters, digits, spaces and `+ - = . _ : / @`; keys differ, and do not begin with `aws:`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gateway.http.ranges import format_http_date
from gateway.s3.protocol import checksums
from gateway.s3.protocol.aws_chunked import without_coding
from gateway.s3.protocol.checksums import Algorithm
from gateway.s3.protocol.errors import S3Error, invalid_argument
from gateway.s3.protocol.targets import parse_query
from gateway.s3.protocol.xml import element
from lakefs.limits import S3_TAGS_MAX
from lakefs.wire.messages import ObjectAttributes, ObjectStat

DEFAULT_CONTENT_TYPE: Final = "binary/octet-stream"
BUCKET_TAGS_MAX: Final = 50
"""S3's limit for the tags of one bucket."""
_META: Final = b"x-amz-meta-"
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CLEAN: Final = bytes(32 if byte < 32 or byte == 127 else byte for byte in range(256))
_META_BYTES_MAX: Final = 2048
MTIME: Final = "mtime"
"""Name of the user's metadata in which rclone, s3fs and others keep a file's modification time."""
_MTIME: Final = re.compile(r"(-?)([0-9]{1,10})(?:\.([0-9]{0,32}))?", re.ASCII)
_MTIME_LIMIT_NS: Final = 1 << 63
"""The store has times of 64 bits in ns, to the year 2262."""
_NS: Final = 1_000_000_000
_OBJECT: Final = 2
"""Kind of a stat."""
KEPT: Final = {
    b"cache-control": "Cache-Control",
    b"content-disposition": "Content-Disposition",
    b"content-encoding": "Content-Encoding",
    b"content-language": "Content-Language",
    b"expires": "Expires",
}
"""Headers that are answered as they were given, Content-Encoding less `aws-chunked`."""
_CODED: Final = b"content-encoding"
OVERRIDES: Final = {
    "response-cache-control": b"Cache-Control",
    "response-content-disposition": b"Content-Disposition",
    "response-content-encoding": b"Content-Encoding",
    "response-content-language": b"Content-Language",
    "response-content-type": b"Content-Type",
    "response-expires": b"Expires",
}
_ELEMENT_OF_HEADER: Final = {checksums.HEADERS[algorithm]: checksums.ELEMENTS[algorithm] for algorithm in Algorithm}
_TAGGING: Final = b"x-amz-tagging"
_DIRECTIVE: Final = b"x-amz-tagging-directive"
_KEY_UNITS_MAX: Final = 128
_VALUE_UNITS_MAX: Final = 256
_PUNCTUATION: Final = frozenset("+-=._:/@")
_OF_S3: Final = "aws:"


def attributes_of(
    headers: Mapping[bytes, bytes], *, etag_kind: int = 0, etag: bytes = b"", sums: Mapping[str, bytes] = {}
) -> ObjectAttributes:
    """Return the attributes that a PUT's headers set.  S3Error if the metadata are too large, or tags are invalid.

    The modification time is the one of x-amz-meta-mtime; without one, the time at which the store binds the name.
    """
    metadata = {
        name[len(_META) :].decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if name.startswith(_META)
    }
    if sum(len(name) + len(value) for name, value in metadata.items()) > _META_BYTES_MAX:
        raise S3Error(
            400,
            "MetadataTooLarge",
            "Your metadata headers exceed the maximum allowed metadata size",
            details={"MaxSizeAllowed": str(_META_BYTES_MAX)},
        )
    kept = {shown: headers[name].decode("latin-1") for name, shown in KEPT.items() if name in headers}
    if _CODED in headers:
        coding = without_coding(headers[_CODED]).decode("latin-1")
        kept |= {KEPT[_CODED]: coding}
        if not coding:
            del kept[KEPT[_CODED]]
    return ObjectAttributes(
        mtime_ns=read_mtime(metadata[MTIME]) or 0 if MTIME in metadata else 0,
        content_type=headers.get(b"content-type", DEFAULT_CONTENT_TYPE.encode()).decode("latin-1"),
        user_metadata=metadata,
        headers=kept,
        etag_kind=etag_kind,
        etag=etag,
        checksums=dict(sums),
        tags=tags_of_header(headers),
    )


def object_headers(stat: ObjectStat) -> list[tuple[bytes, bytes]]:
    """Return the headers of GET and HEAD for an object, without length and checksums."""
    headers = [
        (b"Last-Modified", format_http_date(stat.last_modified_ns // 1_000_000_000).encode()),
        (b"ETag", b'"%b"' % stat.etag.encode()),
        (b"Accept-Ranges", b"bytes"),
        (b"Content-Type", header_text(stat.content_type or DEFAULT_CONTENT_TYPE)),
    ]
    if stat.version:
        headers.append((b"x-amz-version-id", stat.version.encode()))
    headers += [(header_text(name), header_text(value)) for name, value in stat.headers.items()]
    headers += [(_META + header_text(name), header_text(value)) for name, value in _shown_metadata(stat).items()]
    if stat.tags:
        headers.append((b"x-amz-tagging-count", b"%d" % len(stat.tags)))
    return headers


def _shown_metadata(stat: ObjectStat) -> Mapping[str, str]:
    """Return the user's metadata, with the modification time if a client of any kind has set it, and it is not there.

    One that was sent is shown as it was sent, unless the time was changed since, as by the mount.
    """
    if not stat.bound_ns or stat.kind != _OBJECT:
        return stat.user_metadata
    sent = stat.user_metadata.get(MTIME)
    if sent is not None and read_mtime(sent) == stat.mtime_ns:
        return stat.user_metadata
    return {**stat.user_metadata, MTIME: mtime_text(stat.mtime_ns)}


def read_mtime(text: str) -> int | None:
    """Parse seconds since 1970 with a fraction, as rclone writes them, to ns; None for any other text."""
    match = _MTIME.fullmatch(text)
    if match is None:
        return None
    sign, seconds, fraction = match.groups()
    time_ns = int(seconds) * _NS + int((fraction or "")[:9].ljust(9, "0"))
    if time_ns >= _MTIME_LIMIT_NS:
        return None
    return -time_ns if sign else time_ns


def mtime_text(time_ns: int) -> str:
    """Return a time as rclone writes it: `1354040105.123456789`, without zeros at the end."""
    seconds, rest_ns = divmod(abs(time_ns), _NS)
    sign = "-" if time_ns < 0 else ""
    return f"{sign}{seconds}.{rest_ns:09}".rstrip("0").removesuffix(".") if rest_ns else f"{sign}{seconds}"


def kept_composite(algorithm: Algorithm, text: str) -> dict[str, bytes]:
    """Return the record of a composite checksum: under the algorithm's name and the number of parts."""
    digest, _, count = text.rpartition("-")
    return {f"{algorithm.value}/{count}": checksums.decoded(algorithm, digest.encode())}


def is_composite(names: Iterable[str]) -> bool:
    """Return True if the checksum kept under these names is that of the parts' digests."""
    return any("/" in name for name in names)


def checksum_type(names: Iterable[str]) -> str:
    """Return S3's name of the type of the checksum kept under these names."""
    return "COMPOSITE" if is_composite(names) else "FULL_OBJECT"


def checksum_elements(sums: Mapping[str, bytes]) -> str:
    """Return the checksum of a whole object, and its type, as XML; "" for none."""
    found = checksum_headers(sums)
    return "".join(element(_ELEMENT_OF_HEADER.get(name, "ChecksumType"), value.decode()) for name, value in found)


def checksum_headers(sums: Mapping[str, bytes], *, is_of_composite: bool = False) -> list[tuple[bytes, bytes]]:
    """Return x-amz-checksum-* headers.  `is_of_composite`: for a part of an object whose checksum is composite."""
    found: list[tuple[bytes, bytes]] = []
    for name, digest in sums.items():
        algorithm, _, count = name.partition("/")
        value = checksums.encoded(digest) + (f"-{count}" if count else "")
        found.append((checksums.HEADERS[Algorithm(algorithm)], value.encode()))
        found.append((b"x-amz-checksum-type", b"COMPOSITE" if count or is_of_composite else b"FULL_OBJECT"))
    return found


def header_text(text: str) -> bytes:
    """Encode a value that another face of the store may have set; bytes that end the line or are not Latin-1 are
    replaced."""
    encoded = text.encode("latin-1", "replace")
    return encoded.translate(_CLEAN) if _CONTROL.search(encoded) else encoded


def tags_of_header(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the tags of x-amz-tagging, `key=value&key=value`, percent-encoded; none without one.  S3Error."""
    text = headers.get(_TAGGING)
    if not text:
        return {}
    try:
        return checked_tags(list(parse_query(text).items()))
    except S3Error as error:
        if error.code in ("InvalidTag", "BadRequest"):
            raise
        raise invalid_argument(
            "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag "
            "name duplicates.",
            _TAGGING.decode(),
            text[:256].decode("latin-1"),
        ) from None


def tags_of_copy(headers: Mapping[bytes, bytes]) -> dict[str, str] | None:
    """Return the tags for a copy; None: those of its source.  S3Error."""
    directive = headers.get(_DIRECTIVE, b"COPY").decode("latin-1")
    if directive not in ("COPY", "REPLACE"):
        raise invalid_argument("Unknown tagging directive.", _DIRECTIVE.decode(), directive[:64])
    return tags_of_header(headers) if directive == "REPLACE" else None


def checked_tags(tags: Sequence[tuple[str, str]], most: int = S3_TAGS_MAX) -> dict[str, str]:
    """Check tags.  S3Error BadRequest for more than `most`, InvalidTag for a key or value that no tag has."""
    if len(tags) > most:
        kind = "Object" if most == S3_TAGS_MAX else "Bucket"
        raise S3Error(400, "BadRequest", f"{kind} tags cannot be greater than {most}")
    checked: dict[str, str] = {}
    for key, value in tags:
        if not key or not _is_text(key, _KEY_UNITS_MAX):
            raise _invalid_tag("The TagKey you have provided is invalid")
        if key.startswith(_OF_S3):
            raise _invalid_tag("System tags cannot be added/updated by requester")
        if not _is_text(value, _VALUE_UNITS_MAX):
            raise _invalid_tag("The TagValue you have provided is invalid")
        if key in checked:
            raise _invalid_tag("Cannot provide multiple Tags with the same key")
        checked[key] = value
    return checked


def _is_text(text: str, units_max: int) -> bool:
    """Return True if a tag may have that text: letters, digits and spaces of any script, and some ASCII."""
    if len(text) > units_max or sum(1 + (character > "\uffff") for character in text) > units_max:
        return False
    return all(character in _PUNCTUATION or unicodedata.category(character)[0] in "LNZ" for character in text)


def _invalid_tag(message: str) -> S3Error:
    return S3Error(400, "InvalidTag", message)
