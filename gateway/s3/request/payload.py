"""The payload of a PUT: received, decoded, digested, and proven before anything is stored under a name.

Rules kept here:
- The payload's length is known before its first byte: the body's, or x-amz-decoded-content-length.
- The caller stores it without a name until `finish` has returned: signatures of chunks, SHA-256 of the body,
  Content-MD5, and the x-amz-checksum-* of header or trailer are all compared there.
- Digests of more than 64 KiB are computed in a thread, in the order of the bytes.
"""

from __future__ import annotations

import hmac
from typing import Final

from gateway.http.messages import RequestBody
from gateway.s3.protocol import checksums
from gateway.s3.protocol.aws_chunked import AwsChunkedDecoder
from gateway.s3.protocol.checksums import Algorithm, Expected
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import Payload
from gateway.s3.request.call import Call
from gateway.s3.request.receiving import Received
from lakefs.ports import Offload

INLINE_DIGEST_BYTES: Final = 64 << 10
_DECODE_BYTES: Final = 256 << 10
_STREAMING: Final = (Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER, Payload.STREAMING_UNSIGNED_TRAILER)


class Incoming:
    """The payload of one request."""

    def __init__(self, call: Call, algorithm: Algorithm | None = None) -> None:
        """`algorithm` is the checksum to compute if the client sends none.

        S3Error if the length is missing or a digest is malformed.
        """
        headers = call.headers
        self.offload: Offload = call.lakes.offload
        self._memory = call.lakes.memory
        self._body = call.request.body
        self._source = _source(call)
        self.length_bytes = self._source.length_bytes
        self._md5 = checksums.start_md5()
        self._expected_md5 = checksums.expected_md5(headers)
        self._expected = checksums.expected_checksum(headers)
        self._announced = None if self._expected else checksums.announced_trailer(headers)
        self._algorithm = self._expected.algorithm if self._expected else self._announced or algorithm
        self._checksum = checksums.start(self._algorithm) if self._algorithm else None
        signature = call.signature
        self._sha256_hex = signature.payload_sha256 if signature else ""
        self._sha256 = checksums.start(Algorithm.SHA256) if self._sha256_hex else None
        self._received_bytes = 0

    @property
    def md5(self) -> bytes:
        """MD5 of the bytes received so far."""
        return self._md5.digest()

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
        self._received_bytes += done
        if done <= INLINE_DIGEST_BYTES:
            self._digest(target)
        else:
            await self.offload.run(self._digest, target)

    async def finish(self) -> dict[str, bytes]:
        """Return the checksums to keep with the object, once all is received and proven.  S3Error: store nothing."""
        trailers = await self._source.finish()
        expected = self._expected
        if self._announced is not None:
            expected = checksums.expected_checksum(trailers)
            if expected is None or expected.algorithm is not self._announced:
                raise S3Error(400, "InvalidRequest", "the trailer that x-amz-trailer announces did not come")
        if self._sha256 is not None and self._sha256.digest().hex() != self._sha256_hex:
            raise S3Error(
                400,
                "XAmzContentSHA256Mismatch",
                "The provided 'x-amz-content-sha256' header does not match what was computed.",
            )
        if self._expected_md5 is not None and not hmac.compare_digest(self._expected_md5, self.md5):
            raise S3Error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        return self._kept_checksum(expected)

    def _kept_checksum(self, expected: Expected | None) -> dict[str, bytes]:
        if self._checksum is None or self._algorithm is None:
            return {}
        digest = self._checksum.digest()
        if expected is not None and digest != expected.digest:
            raise checksums.mismatch(expected.algorithm.value)
        return {self._algorithm.value: digest}

    def _digest(self, data: memoryview) -> None:
        self._md5.update(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._checksum is not None:
            self._checksum.update(data)


def _source(call: Call) -> _Plain | _Decoded:
    signature = call.signature
    body = call.request.body
    if signature is not None and signature.payload in _STREAMING:
        return _Decoded(body, AwsChunkedDecoder(signature, call.headers), call.lakes.offload)
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

    def __init__(self, body: RequestBody, decoder: AwsChunkedDecoder, offload: Offload) -> None:
        self.length_bytes = decoder.decoded_bytes
        self._body = body
        self._decoder = decoder
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
            self._pieces = self._decoder.feed(received)
        else:
            self._pieces = await self._offload.run(self._decoder.feed, received)
        return count
