"""Signed S3 requests, made before they are timed: Signature Version 4 in the header, payload signed or not.

A request is the bytes of its head, and its body, ready to be sent.  Its signature is valid for 15 minutes, so
requests are made for one round at a time, and reads may be sent again and again.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import Final
from urllib.parse import quote

from lakefs.ids import Buffer

BUCKET: Final = "bench"
REGION: Final = "us-east-1"
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_EMPTY: Final = sha256(b"").hexdigest()


@dataclass(frozen=True)
class Endpoint:
    """A server's port on loopback, and the key pair to sign with; without one requests are unsigned."""

    port: int
    access_key: str = ""
    secret_key: str = ""

    @property
    def host(self) -> str:
        """The value of the Host header."""
        return f"127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and its expected status and length of the answer's body; None: not compared."""

    head: bytes
    body: Buffer = b""
    status: int = 200
    answer_bytes: int | None = None


class Signer:
    """Makes requests for one server.  The date, and so the signing key, is that of the signer's creation."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._scope = f"{self._when[:8]}/{REGION}/s3/aws4_request"
        key = b"AWS4" + endpoint.secret_key.encode()
        for part in self._scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._key = key

    def request(
        self,
        method: str,
        path: str,
        *,
        query: str = "",
        body: Buffer = b"",
        payload_hash: str = "",
        extra: str = "",
        status: int = 200,
        answer_bytes: int | None = None,
    ) -> Request:
        """Return a request for `/BUCKET/KEY`.

        `query`: encoded, its parameters in order.  `payload_hash`: of the body, or UNSIGNED; empty: that of no body.
        `extra`: lines of headers that are not signed, each with its line end.
        """
        path = quote(path, safe="/~")
        lines = [f"{method} {path}{'?' + query if query else ''} HTTP/1.1", f"Host: {self._endpoint.host}"]
        if self._endpoint.access_key:
            lines += self._signed(method, path, query, payload_hash or _EMPTY)
        if method in ("PUT", "POST"):
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join(lines) + "\r\n" + extra + "\r\n"
        return Request(head.encode(), body, status, answer_bytes)

    def _signed(self, method: str, path: str, query: str, payload_hash: str) -> list[str]:
        names = "host;x-amz-content-sha256;x-amz-date"
        signed = f"host:{self._endpoint.host}\nx-amz-content-sha256:{payload_hash}\nx-amz-date:{self._when}\n\n{names}"
        canonical = f"{method}\n{path}\n{query}\n{signed}\n{payload_hash}"
        digest = sha256(canonical.encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{self._when}\n{self._scope}\n{digest}"
        signature = hmac.digest(self._key, to_sign.encode(), "sha256").hex()
        credential = f"{self._endpoint.access_key}/{self._scope}"
        return [
            f"x-amz-date: {self._when}",
            f"x-amz-content-sha256: {payload_hash}",
            f"Authorization: AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}",
        ]
