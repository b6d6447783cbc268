"""aws-chunked bodies, signed or not, in pieces that a test can break one by one."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

from tests.e2e.s3_raw import EMPTY_SHA256, Answer, Signed, Signer

SIGNED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
SIGNED_TRAILER: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
UNSIGNED_TRAILER: Final = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
KINDS: Final = (SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER)


@dataclass(frozen=True)
class Chunked:
    """A PUT whose body is in chunks: lines and payloads, each with its CRLF."""

    request: Signed
    pieces: tuple[bytes, ...]

    def send(self, *, end: bool = False) -> Answer:
        """Send it with a Content-Length that is right; return the answer."""
        body = b"".join(self.pieces)
        headers = {**self.request.headers, "content-length": str(len(body))}
        return replace(self.request, headers=headers, body=body).send(end=end)

    def changed(self, index: int, old: bytes, new: bytes) -> Chunked:
        """Return a copy with other bytes in one of its pieces, which must have the old ones."""
        assert old in self.pieces[index]
        pieces = list(self.pieces)
        pieces[index] = pieces[index].replace(old, new, 1)
        return Chunked(self.request, tuple(pieces))

    def without(self, index: int) -> Chunked:
        """Return a copy without one of its pieces."""
        pieces = list(self.pieces)
        del pieces[index]
        return Chunked(self.request, tuple(pieces))

    def with_piece(self, index: int, piece: bytes) -> Chunked:
        """Return a copy with one more piece, before that one."""
        pieces = list(self.pieces)
        pieces.insert(index, piece)
        return Chunked(self.request, tuple(pieces))


def chunked_put(
    signer: Signer,
    target: str,
    payloads: tuple[bytes, ...],
    kind: str,
    headers: Mapping[str, str] | None = None,
    *,
    trailers: Mapping[str, str] | None = None,
) -> Chunked:
    """Make a PUT in these chunks, whose trailers are a CRC32 unless others are given.

    Pieces: a line and a payload for each chunk, the last line, then for the kinds with trailers one line for each, its
    signature where there is one, and the empty line at the end.
    """
    whole = b"".join(payloads)
    sent = {"x-amz-decoded-content-length": str(len(whole)), "content-encoding": "aws-chunked"}
    if trailers is None:
        trailers = {} if kind == SIGNED else {"x-amz-checksum-crc32": crc32_text(whole)}
    if trailers:
        sent["x-amz-trailer"] = ",".join(trailers)
    request = signer.request("PUT", target, b"", {**sent, **(headers or {})}, payload=kind)
    previous = request.signature
    pieces: list[bytes] = []
    for payload in (*payloads, b""):
        line = b"%x" % len(payload)
        if kind != UNSIGNED_TRAILER:
            hashes = f"{EMPTY_SHA256}\n{hashlib.sha256(payload).hexdigest()}"
            previous = _link(request, "AWS4-HMAC-SHA256-PAYLOAD", previous, hashes)
            line += b";chunk-signature=" + previous.encode()
        pieces.append(line + b"\r\n")
        if payload:
            pieces.append(payload + b"\r\n")
    lines = [f"{name}:{value}" for name, value in sorted(trailers.items())]
    pieces += [line.encode() + b"\r\n" for line in lines]
    if kind == SIGNED_TRAILER:
        digest = hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()
        signature = _link(request, "AWS4-HMAC-SHA256-TRAILER", previous, digest)
        pieces.append(b"x-amz-trailer-signature:" + signature.encode() + b"\r\n")
    return Chunked(request, (*pieces, b"\r\n"))


def crc32_text(content: bytes) -> str:
    """Return a CRC32 as S3's headers have it."""
    return b64encode(crc32(content).to_bytes(4, "big")).decode()


def _link(request: Signed, kind: str, previous: str, hashes: str) -> str:
    signer, stamp = request.signer, request.stamp
    text = f"{kind}\n{stamp}\n{signer.scope(stamp)}\n{previous}\n{hashes}"
    return hmac.new(signer.key(stamp[:8]), text.encode(), "sha256").hexdigest()
