"""Payloads: the content of a PUT, and small bodies of XML; received, decoded, digested, and proven.

Rules kept here:
- A PUT's length is known before its first byte: the body's, or x-amz-decoded-content-length.
- All that headers and trailers say of a body is checked, whatever x-amz-content-sha256 says.  That hash is of the bytes
  as received; the other digests are of the payload.
- The caller stores it without a name until `finish` has returned: signatures of chunks, SHA-256 of the body,
  Content-MD5, and the x-amz-checksum-* of header or trailer are all compared there.
- A small body is returned only after the same comparisons: an operation must not use XML that an attacker put in the
  place of the signed body.
- Digests of more than 64 KiB of a PUT are computed in a thread, in the order of the bytes.
- A small body has at most S3_XML_BODY_BYTES_MAX; an aws-chunked one also 64 KiB of framing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from gateway.http.messages import RequestBody
from gateway.s3.protocol import checksums
from gateway.s3.protocol.aws_chunked import AwsChunkedDecoder, is_framed
from gateway.s3.protocol.checksums import Algorithm
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import Payload
from gateway.s3.request.call import Call
from gateway.s3.request.receiving import Received
from lakefs.limits import S3_XML_BODY_BYTES_MAX
from lakefs.ports import Offload

T = TypeVar("T")
INLINE_DIGEST_BYTES: Final = 64 << 10
_DECODE_BYTES: Final = 256 << 10
_FRAMING_BYTES_MAX: Final = 64 << 10
_PIECE_BYTES: Final = 64 << 10


class _Proof:
    """The digests of one body, and those that the request's headers promise."""

    def __init__(
        self, call: Call, algorithm: Algorithm | None = None, *, has_checksum: bool = True, keeps_md5: bool = False
    ) -> None:
        """`algorithm` is the checksum to compute if the client sends none; `keeps_md5`: `md5` will be asked for.

        S3Error if a digest is malformed.
        """
        headers = call.headers
        self._expected_md5 = checksums.expected_md5(headers)
        self._md5 = checksums.start_md5() if keeps_md5 or self._expected_md5 is not None else None
        self._expected = checksums.expected_checksum(headers) if has_checksum else None
        self._announced = checksums.announced_trailer(headers) if has_checksum else None
        if self._expected and self._announced:
            raise checksums.several()
        self._algorithm = self._expected.algorithm if self._expected else self._announced or algorithm
        self._checksum = checksums.start(self._algorithm) if self._algorithm else None
        self._sha256_hex = call.signature.payload_sha256 if call.signature else ""
        self._sha256 = checksums.start(Algorithm.SHA256) if self._sha256_hex else None
        self._is_framed = is_framed(_kind(call), headers, call.request.body.length)

    @property
    def md5(self) -> bytes:
        """MD5 of the bytes so far."""
        assert self._md5 is not None, "it is kept"
        return self._md5.digest()

    def update(self, data: checksums.Piece) -> None:
        """Digest the next bytes of the payload."""
        if self._md5 is not None:
            self._md5.update(data)
        if self._sha256 is not None and not self._is_framed:
            self._sha256.update(data)
        if self._checksum is not None:
            self._checksum.update(data)

    def update_received(self, data: checksums.Piece) -> None:
        """Digest the next bytes of a body in chunks, with its framing."""
        if self._sha256 is not None:
            self._sha256.update(data)

    def check(self, trailers: Mapping[bytes, bytes]) -> dict[str, bytes]:
        """Return the checksums to keep with the content, once all of it was digested.  S3Error: use nothing of it."""
        expected = self._expected
        if self._announced is not None:
            expected = checksums.expected_checksum(trailers)
            if expected is None or expected.algorithm is not self._announced:
                raise S3Error(400, "InvalidRequest", "the trailer that x-amz-trailer announces did not come")
        if self._sha256 is not None and not hmac.compare_digest(self._sha256.digest().hex(), self._sha256_hex):
            raise S3Error(
                400,
                "XAmzContentSHA256Mismatch",
                "The provided 'x-amz-content-sha256' header does not match what was computed.",
            )
        if self._expected_md5 is not None and not hmac.compare_digest(self._expected_md5, self.md5):
            raise S3Error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        if self._checksum is None or self._algorithm is None:
            return {}
        digest = self._checksum.digest()
        if expected is not None and digest != expected.digest:
            raise checksums.mismatch(expected.algorithm.value)
        return {self._algorithm.value: digest}


class Incoming:
    """The payload of one PUT."""

    def __init__(self, call: Call, algorithm: Algorithm | None = None) -> None:
        """`algorithm` is the checksum to compute if the client sends none.

        S3Error if the length is missing or a digest is malformed.
        """
        self.offload: Offload = call.lakes.offload
        self._memory = call.lakes.memory
        self._body = call.request.body
        self._proof = _Proof(call, algorithm, keeps_md5=True)
        self._source = _source(call, self._proof)
        self.length_bytes = self._source.length_bytes

    @property
    def md5(self) -> bytes:
        """MD5 of the bytes received so far."""
        return self._proof.md5

    async def take(self, length: int) -> Received:
        """Return memory for the next `length` bytes, at most a chunk; waits while other payloads use all of it."""
        return await self._memory.take(self._body, length)

    async def fill(self, target: memoryview) -> None:
        """Receive the next bytes of the payload into all of `target`, and digest them."""
        done = 0
        while done < len(target):
            count = await self._source.receive_into(target[done:])
            if not count:
                raise S3Error(
                    400,
                    "IncompleteBody",
                    "You did not provide the number of bytes specified by the Content-Length HTTP header.",
                )
            done += count
        if done <= INLINE_DIGEST_BYTES:
            self._proof.update(target)
        else:
            await self.offload.run(self._proof.update, target)

    async def finish(self) -> dict[str, bytes]:
        """Return the checksums to keep with the object, once all is received and proven.  S3Error: store nothing."""
        return self._proof.check(await self._source.finish())


def _kind(call: Call) -> Payload:
    return call.signature.payload if call.signature else Payload.UNSIGNED


def _decoder(call: Call) -> AwsChunkedDecoder | None:
    """Return the decoder of a body in chunks; None for a plain one.  S3Error."""
    signature = call.signature
    if signature is None or not is_framed(signature.payload, call.headers, call.request.body.length):
        return None
    return AwsChunkedDecoder(signature, call.headers)


def _source(call: Call, proof: _Proof) -> _Plain | _Decoded:
    body, decoder = call.request.body, _decoder(call)
    if decoder is not None:
        return _Decoded(body, decoder, proof, call.lakes.offload)
    if body.length is None:
        raise S3Error(411, "MissingContentLength", "You must provide the Content-Length HTTP header.")
    return _Plain(body, body.length)


class _Plain:
    """A body that is the payload itself."""

    def __init__(self, body: RequestBody, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._body = body

    async def receive_into(self, target: memoryview) -> int:
        return await self._body.receive_into(target)

    async def finish(self) -> dict[bytes, bytes]:
        return {}


class _Decoded:
    """The payload of an aws-chunked body."""

    def __init__(self, body: RequestBody, decoder: AwsChunkedDecoder, proof: _Proof, offload: Offload) -> None:
        self.length_bytes = decoder.decoded_bytes
        self._body = body
        self._decoder = decoder
        self._proof = proof
        self._offload = offload
        self._buffer = memoryview(bytearray(min(_DECODE_BYTES, max(1024, decoder.decoded_bytes + 1024))))
        self._pieces: list[memoryview] = []

    async def receive_into(self, target: memoryview) -> int:
        while not self._pieces:
            if not await self._feed():
                return 0
        piece = self._pieces[0]
        count = min(len(piece), len(target))
        target[:count] = piece[:count]
        if count < len(piece):
            self._pieces[0] = piece[count:]
        else:
            self._pieces.pop(0)
        return count

    async def finish(self) -> dict[bytes, bytes]:
        while await self._feed():
            pass
        return self._decoder.finish()

    async def _feed(self) -> int:
        count = await self._body.receive_into(self._buffer)
        received = self._buffer[:count]
        if count <= INLINE_DIGEST_BYTES:
            self._pieces = self._decoded(received)
        else:
            self._pieces = await self._offload.run(self._decoded, received)
        return count

    def _decoded(self, received: memoryview) -> list[memoryview]:
        self._proof.update_received(received)
        return self._decoder.feed(received)


async def read_proven_xml(call: Call, read: Callable[[bytes], T], *, has_checksum: bool = True) -> T:
    """Return `read(body)`; for a long body in a thread, since 10,000 parts take it 0.1 s.

    `has_checksum` false: the x-amz-checksum-* headers are not the body's (CompleteMultipartUpload: the object's).
    S3Error if it is too long, or does not match the request's headers.
    """
    limit_bytes = S3_XML_BODY_BYTES_MAX
    proof, decoder = _Proof(call, has_checksum=has_checksum), _decoder(call)
    trailers: dict[bytes, bytes] = {}
    if decoder is not None:
        if decoder.decoded_bytes > limit_bytes:
            raise _too_long(limit_bytes)
        raw = await _received(call.request.body, limit_bytes + _FRAMING_BYTES_MAX)
        proof.update_received(raw)
        content = b"".join(decoder.feed(memoryview(raw)))
        trailers = decoder.finish()
    else:
        content = await _received(call.request.body, limit_bytes)
    proof.update(content)
    proof.check(trailers)
    return read(content) if len(content) <= INLINE_DIGEST_BYTES else await call.lakes.offload.run(read, content)


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


def _too_long(limit_bytes: int) -> S3Error:
    return S3Error(400, "MaxMessageLengthExceeded", f"Your request was longer than {limit_bytes} bytes.")
