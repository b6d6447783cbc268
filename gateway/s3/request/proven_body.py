"""A small body, read whole and proven: the XML input of an operation.

Rules kept here:
- Nothing is returned before the body was compared with the signature, Content-MD5 and the checksums: an operation must
  not use XML that an attacker put in the place of the signed body.
- Memory: at most `limit_bytes`, and the little that an aws-chunked body has beside its payload.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import Final, TypeVar

from gateway.http.messages import RequestBody
from gateway.s3.protocol import checksums
from gateway.s3.protocol.aws_chunked import AwsChunkedDecoder
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import Payload
from gateway.s3.request.call import Call
from lakefs.limits import S3_XML_BODY_BYTES_MAX

T = TypeVar("T")
_FRAMING_BYTES_MAX: Final = 64 << 10
_PIECE_BYTES: Final = 64 << 10
_INLINE_BYTES: Final = 64 << 10
_WHOLE: Final = (Payload.HASH, Payload.UNSIGNED)


async def read_proven_xml(call: Call, read: Callable[[bytes], T], *, has_checksum: bool = True) -> T:
    """Return `read(body)`; for a long body in a thread, since 10,000 parts take it 0.1 s.  Errors as below."""
    content = await read_proven_body(call, has_checksum=has_checksum)
    if len(content) <= _INLINE_BYTES:
        return read(content)
    return await call.lakes.offload.run(read, content)


async def read_proven_body(call: Call, limit_bytes: int = S3_XML_BODY_BYTES_MAX, *, has_checksum: bool = True) -> bytes:
    """Return all of a request's body.  S3Error if it is too long, or does not match the request's headers.

    `has_checksum` false: the x-amz-checksum-* headers are not the body's (CompleteMultipartUpload: the object's).
    """
    signature = call.signature
    expected = checksums.expected_checksum(call.headers) if has_checksum else None
    expected_md5 = checksums.expected_md5(call.headers)
    if signature is None or signature.payload in _WHOLE:
        content = await _received(call.request.body, limit_bytes)
        if signature is not None and signature.payload is Payload.HASH:
            _check_sha256(content, signature.payload_sha256)
    else:
        decoder = AwsChunkedDecoder(signature, call.headers)
        if decoder.decoded_bytes > limit_bytes:
            raise _too_long(limit_bytes)
        raw = await _received(call.request.body, limit_bytes + _FRAMING_BYTES_MAX)
        content = b"".join(decoder.feed(memoryview(raw)))
        trailers = decoder.finish()
        if has_checksum and expected is None:
            expected = checksums.expected_checksum(trailers)
    if has_checksum and expected is None and checksums.announced_trailer(call.headers):
        raise S3Error(400, "InvalidRequest", "the trailer that x-amz-trailer announces did not come")
    if expected_md5 is not None:
        digest = checksums.start_md5()
        digest.update(content)
        if digest.digest() != expected_md5:
            raise S3Error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
    if expected is not None:
        running = checksums.start(expected.algorithm)
        running.update(content)
        if running.digest() != expected.digest:
            raise checksums.mismatch(expected.algorithm.value)
    return content


async def _received(body: RequestBody, limit_bytes: int) -> bytes:
    if body.length is not None and body.length > limit_bytes:
        raise _too_long(limit_bytes)
    content = bytearray()
    piece = memoryview(bytearray(min(_PIECE_BYTES, body.length or _PIECE_BYTES)))
    while count := await body.receive_into(piece):
        content += piece[:count]
        if len(content) > limit_bytes:
            raise _too_long(limit_bytes)
    return bytes(content)


def _check_sha256(content: bytes, expected_hex: str) -> None:
    if not hmac.compare_digest(sha256(content).hexdigest(), expected_hex):
        raise S3Error(
            400,
            "XAmzContentSHA256Mismatch",
            "The provided 'x-amz-content-sha256' header does not match what was computed.",
        )


def _too_long(limit_bytes: int) -> S3Error:
    return S3Error(400, "MaxMessageLengthExceeded", f"Your request was longer than {limit_bytes} bytes.")
