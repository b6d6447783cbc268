"""All readers of strangers' bytes, each with what must hold whatever the bytes are; in this module the gateway's.

A reader of the gateway takes an input and returns, or raises HttpRefusal or S3Error; anything else is a bug.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.http.framing import ChunkedDecoder, body_framing
from gateway.http.head import HeadWatch, HttpRefusal, RequestHead, head_length, parse_head
from gateway.http.ranges import ByteRange, check_conditions, parse_http_date, range_holds, select_range
from gateway.s3.protocol import bodies
from gateway.s3.protocol.attributes import tags_of_header
from gateway.s3.protocol.aws_chunked import AwsChunkedDecoder
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import Payload, Signature
from gateway.s3.protocol.sigv4 import authenticate
from gateway.s3.protocol.targets import parse_copy_source, parse_target
from lakefs.limits import S3_KEY_BYTES_MAX
from tests.fuzz.setting_targets import SETTING_TARGETS
from tests.fuzz.signed import CHAINED, CHUNKED, HEADS, NOW_S, PAYLOAD, PAYLOADS, SEEDS
from tests.fuzz.store_targets import STORE_TARGETS
from tests.fuzz.target import REFUSALS, Target
from tests.fuzz.wire_targets import WIRE_TARGETS
from tests.unit.support.signed_heads import KEY, REGION

_OBJECT_BYTES: Final = 1000


# --- HTTP ----------------------------------------------------------------------------------------------


def _head(data: bytes) -> RequestHead | None:
    length = head_length(data)
    return parse_head(data[:length]) if length else None


def read_head(data: bytes) -> None:
    """Read a head: what is understood has the form that its readers rely on, and in pieces it is the same."""
    length = head_length(data)
    _watched(data[: length - 1] if length else data)
    head = _head(data)
    if head is None:
        return
    assert head.path[:1] == b"/"
    assert head.target.isascii()
    assert head.version in ((1, 0), (1, 1))
    for name, value in head.headers.items():
        assert name == name.lower().strip()
        assert name
        assert value == value.strip(b" \t")
        assert not any(byte < 32 and byte != 9 for byte in value), value
    assert (body_framing(head) or 0) >= 0


def _watched(data: bytes) -> None:
    """Check that a head that is refused while it arrives is refused as a whole too, and however it is cut."""
    refused = _refused_in_pieces(data, len(data) or 1)
    assert refused == _refused_in_pieces(data, max(1, len(data) // 64))
    if not refused:
        return
    try:
        parse_head(data + b"\r\n\r\n")
    except HttpRefusal:
        return
    raise AssertionError("a head that was refused in pieces was read as a whole")


def _refused_in_pieces(data: bytes, step: int) -> bool:
    watch = HeadWatch()
    try:
        for start in range(0, len(data), step):
            watch.feed(data[start : start + step])
    except HttpRefusal:
        return True
    return False


def read_chunked(data: bytes) -> None:
    """Read a chunked body: byte by byte and whole it is the same, and no more than arrived."""
    whole = _decoded(data, len(data) or 1)
    assert whole == _decoded(data, 1 if len(data) < 2000 else 977)
    assert whole is None or len(whole) <= len(data)


def _decoded(data: bytes, step: int) -> bytes | None:
    decoder = ChunkedDecoder()
    found = b""
    try:
        for start in range(0, len(data), step):
            piece = memoryview(data)[start : start + step]
            while len(piece) and not decoder.done:
                pieces, used = decoder.feed(piece)
                found += b"".join(pieces)
                piece = piece[used:]
    except HttpRefusal:
        return None
    return found


# --- S3 ------------------------------------------------------------------------------------------------


def read_aws_chunked(data: bytes) -> None:
    """Read an aws-chunked body; the first byte is its kind.  A signed one is what was signed, or refused."""
    kind = PAYLOADS[data[0] % len(PAYLOADS)] if data else Payload.STREAMING_SIGNED
    headers = {b"x-amz-decoded-content-length": b"%d" % len(PAYLOAD)}
    if kind is not Payload.STREAMING_SIGNED:
        headers[b"x-amz-trailer"] = b"x-amz-checksum-crc32"
    signature = msgspec.structs.replace(SEEDS[kind], payload=kind)
    whole = _payload(signature, headers, data[1:], len(data))
    assert whole == _payload(signature, headers, data[1:], 1 if len(data) < 500 else 97)
    if whole is not None:
        assert len(whole) == len(PAYLOAD)
        assert kind not in CHAINED or whole == PAYLOAD, "a signature was forged"


def _payload(signature: Signature, headers: dict[bytes, bytes], data: bytes, step: int) -> bytes | None:
    decoder = AwsChunkedDecoder(signature, headers)
    found = b""
    try:
        for start in range(0, len(data), max(1, step)):
            found += b"".join(decoder.feed(memoryview(data)[start : start + step]))
        decoder.finish()
    except REFUSALS:
        return None
    return found


def read_signed(data: bytes) -> None:
    """Read a signed head: it is refused, or says what one of those that were signed says."""
    head = _head(data)
    if head is None:
        return
    signature = authenticate(head, region=REGION, now_s=NOW_S, find_key=lambda name: _KEYS.get(name))
    if signature is not None:
        meaning = _meaning(head)
        assert meaning is None or meaning in _MEANINGS, "a signature was forged"


_KEYS: Final = {KEY.access_key: KEY}


def _meaning(head: RequestHead) -> tuple[object, ...] | None:
    """Return what a request asks for, and what S3 signs of it, however it is spelled; None when it asks for nothing."""
    try:
        target = parse_target(head)
    except S3Error:
        return None
    amz = sorted((name, b" ".join(value.split())) for name, value in head.headers.items() if name[:6] == b"x-amz-")
    return head.method, target, head.authority, amz


_HEADER: Final = re.compile(rb"x-amz-[^\x00-\x20:\x7f-\xff]*:[^\x00-\x08\x0a-\x1f\x7f]*")


def read_target(data: bytes) -> None:
    """Read a head as what it asks for: a bucket and a key that the store may have."""
    head = _head(data)
    if head is None:
        return
    for domains in ((), ("lake", "s3.lake.example")):
        try:
            target = parse_target(head, domains)
        except S3Error:
            continue
        assert len(target.bucket) <= 63
        assert "/" not in target.bucket
        _check_key(target.key)
        for name, value in target.moved.items():
            assert _HEADER.fullmatch(name + b":" + value), "a parameter became what no header can be"
    source = head.headers.get(b"x-amz-copy-source")
    if source is not None:
        bucket, key, _ = parse_copy_source(source)
        assert "/" not in bucket
        assert key
        _check_key(key)


def _check_key(key: str) -> None:
    assert len(key.encode()) <= S3_KEY_BYTES_MAX
    assert "\0" not in key


def read_xml(data: bytes) -> None:
    """Read XML with each of its readers."""
    for read in _XML_READERS:
        try:
            read(data)
        except S3Error:
            continue


_XML_READERS: Final[tuple[Callable[[bytes], object], ...]] = (
    bodies.read_create_bucket,
    bodies.read_delete,
    bodies.read_complete,
    bodies.read_tagging,
    bodies.read_versioning,
)


def read_range(data: bytes) -> None:
    """Read Range, conditions and dates: a range lies in the object."""
    selected = select_range(data, _OBJECT_BYTES)
    if isinstance(selected, ByteRange):
        assert 0 <= selected.first < selected.stop <= _OBJECT_BYTES
    for name in (b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since"):
        check_conditions({name: data}, "etag", NOW_S)
    range_holds(data, "etag", NOW_S)
    date = parse_http_date(data[:64])
    assert date is None or 0 <= date < 1 << 40


def read_tags(data: bytes) -> None:
    """Read tags of a header: few and short."""
    tags = tags_of_header({b"x-amz-tagging": data})
    assert len(tags) <= 10
    assert all(0 < len(key) <= 128 and len(value) <= 256 for key, value in tags.items())


_LINES: Final = (b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b";", b",", b"\0", b"\r\n ", b"\r\n\r\n")
_HEAD_TOKENS: Final = (
    *_LINES,
    *(b"GET ", b"PUT ", b"POST ", b" HTTP/1.1", b" HTTP/1.0", b"http://", b"//", b"?", b"#", b"%", b"&"),
    *(b"Host:", b"Content-Length:", b"Transfer-Encoding:", b"chunked", b"Connection:", b"close", b"Expect:"),
    *(b"Range:", b"%00", b"%2F", b"%2e", b"%ff", b"/../", b"+", b"\xc3\xa9"),
)
_S3_TOKENS: Final = (
    *_HEAD_TOKENS,
    *(b"x-amz-date:", b"x-amz-content-sha256:", b"Authorization:", b"AWS4-HMAC-SHA256", b"Credential="),
    *(b"SignedHeaders=", b"Signature=", b"host;", b"X-Amz-Signature=", b"X-Amz-Expires=", b"UNSIGNED-PAYLOAD"),
    *(b"x-amz-copy-source:", b"x-amz-meta-a:", b"uploads", b"uploadId=", b"partNumber=1", b"acl", b"versionId="),
    *(b"tagging", b"delete", b"list-type=2", b"prefix=", b"lake", b"s3.lake.example", b"bucket."),
)
_XML_GOOD: Final = (
    b"<CreateBucketConfiguration><LocationConstraint>eu-lake-1</LocationConstraint></CreateBucketConfiguration>",
    b"<Delete><Quiet>true</Quiet><Object><Key>a&amp;b</Key><VersionId>null</VersionId></Object></Delete>",
    b'<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Part><PartNumber>1</PartNumber>'
    b"<ETag>&quot;e&quot;</ETag><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></CompleteMultipartUpload>",
    b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>",
    b'<?xml version="1.0" encoding="UTF-8"?>\n<VersioningConfiguration><Status>Enabled</Status>'
    b"</VersioningConfiguration>",
)
_XML_TOKENS: Final = (
    *(b"<", b">", b"</", b"/>", b"<a>", b"</a>", b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<?", b"?>", b"&", b";"),
    *(b"<!DOCTYPE a [", b"<!ENTITY e 'x'>", b"&e;", b"&#0;", b"&#x41;", b"&#1114112;", b"]>", b"SYSTEM", b"xmlns="),
    *(b"<Key>", b"<Object>", b"<Part>", b"<Tag>", b"<Delete>", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80"),
)
_RANGES: Final = (
    b"bytes=0-1",
    b"bytes=5-",
    b"bytes=-7",
    b"bytes=0-1,4-5",
    b"Sun, 06 Nov 1994 08:49:37 GMT",
    b"Sunday, 06-Nov-94 08:49:37 GMT",
    b"Sun Nov  6 08:49:37 1994",
    b'W/"etag", "a"',
    b'"etag"',
)
GATEWAY_TARGETS: Final = (
    Target("head", read_head, HEADS, _HEAD_TOKENS),
    Target(
        "chunked",
        read_chunked,
        (b"5\r\nhello\r\n0\r\n\r\n", b"a;b=c\r\n0123456789\r\n1\r\nx\r\n00\r\nT: u\r\n\r\nGET"),
        (*_LINES, b"0\r\n\r\n", b"1\r\nx\r\n", b"f" * 15, b"f" * 16, b"T: u\r\n", b';e="f"'),
    ),
    Target(
        "aws-chunked",
        read_aws_chunked,
        CHUNKED,
        (*_LINES, b";chunk-signature=", b"x-amz-checksum-crc32:", b"x-amz-trailer-signature:", b"0\r\n"),
    ),
    Target("signed", read_signed, HEADS, _S3_TOKENS),
    Target("target", read_target, HEADS, _S3_TOKENS),
    Target("xml", read_xml, _XML_GOOD, _XML_TOKENS),
    Target("range", read_range, _RANGES, (b"bytes", b"=", b"-", b",", b" ", b"*", b"W/", b'"', b" GMT", b"Feb", b"31")),
    Target(
        "tags", read_tags, (b"a=1&b+c=%C3%A9&d", b"key=value"), (b"=", b"&", b"%", b"%ff", b"+", b"aws:", b"k" * 129)
    ),
)
TARGETS: Final = (*GATEWAY_TARGETS, *WIRE_TARGETS, *STORE_TARGETS, *SETTING_TARGETS)
_MEANINGS: Final = [_meaning(head) for head in map(_head, HEADS) if head is not None]
