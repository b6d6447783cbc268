"""Requests signed by botocore, as the head that a server reads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.http.head import RequestHead, parse_head
from gateway.s3.protocol.signing import AccessKey

KEY: Final = AccessKey("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
REGION: Final = "eu-lake-1"


class _BodySays(S3SigV4Auth):  # type: ignore[misc]
    """botocore's signer with a payload line of the test's choice."""

    def __init__(self, payload: str) -> None:
        super().__init__(Credentials(KEY.access_key, KEY.secret_key), "s3", REGION)
        self._says = payload

    def payload(self, request: AWSRequest) -> str:
        return self._says


def signed_head(
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    payload: str = "UNSIGNED-PAYLOAD",
    body: bytes = b"",
) -> RequestHead:
    """Return a signed head.  `url` is percent-encoded.  `payload` "" lets botocore hash the body."""
    request = AWSRequest(method, url, headers=dict(headers or {}), data=body)
    signer = _BodySays(payload) if payload else S3SigV4Auth(Credentials(KEY.access_key, KEY.secret_key), "s3", REGION)
    signer.add_auth(request)
    return head_of(request)


def head_without_hash(url: str, *, method: str = "GET", body: bytes = b"") -> RequestHead:
    """Return a head signed as for other services: no header has the body's hash."""
    request = AWSRequest(method, url, data=body)
    SigV4Auth(Credentials(KEY.access_key, KEY.secret_key), "s3", REGION).add_auth(request)
    return head_of(request)


def presigned_head(
    url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, expires_s: int = 3600
) -> RequestHead:
    """Return the same, signed in the query."""
    request = AWSRequest(method, url, headers=dict(headers or {}))
    S3SigV4QueryAuth(Credentials(KEY.access_key, KEY.secret_key), "s3", REGION, expires_s).add_auth(request)
    return head_of(request)


def head_of(request: AWSRequest) -> RequestHead:
    """Return what our server reads from a request of botocore's."""
    prepared = request.prepare()
    parts = urlsplit(prepared.url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [f"{request.method} {target} HTTP/1.1", f"Host: {parts.netloc}"]
    for name, value in prepared.headers.items():
        lines.append(f"{name}: {value.decode() if isinstance(value, bytes) else value}")
    return parse_head("\r\n".join([*lines, "", ""]).encode())


def signed_at(head: RequestHead) -> float:
    """Return the time that botocore has signed."""
    text = head.headers.get(b"x-amz-date") or head.query.partition(b"X-Amz-Date=")[2][:16]
    return datetime.strptime(text.decode(), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
