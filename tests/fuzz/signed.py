"""Good requests, signed once and for all: heads, and aws-chunked bodies of each kind."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Final
from urllib.parse import quote

from gateway.s3.protocol.signing import Payload, Signature, SigningKey
from tests.unit.support.signed_heads import KEY, REGION

NOW_S: Final = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
_STAMP: Final = "20261121T120000Z"
_SCOPE: Final = f"{_STAMP[:8]}/{REGION}/s3/aws4_request"
_HOST: Final = "lake:9000"
PAYLOAD: Final = b"the payload that was signed, and no other"
CHAINED: Final = (Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER)
"""Kinds of bodies whose chunks are signed."""
PAYLOADS: Final = (*CHAINED, Payload.STREAMING_UNSIGNED_TRAILER, Payload.UNSIGNED, Payload.HASH)
_EMPTY: Final = sha256(b"").hexdigest()


def _signing_key() -> bytes:
    key = b"AWS4" + KEY.secret_key.encode()
    for part in (_STAMP[:8], REGION, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


_KEY: Final = _signing_key()
_sign: Final = partial(hmac.digest, _KEY, digest="sha256")


def _signature(canonical: str) -> str:
    text = f"AWS4-HMAC-SHA256\n{_STAMP}\n{_SCOPE}\n{sha256(canonical.encode()).hexdigest()}"
    return _sign(text.encode()).hex()


def _head(method: str, path: str, query: str, headers: Mapping[str, str], payload: str) -> bytes:
    sent = {"host": _HOST, "x-amz-content-sha256": payload, "x-amz-date": _STAMP, **headers}
    names = sorted(sent)
    lines = "".join(f"{name}:{sent[name]}\n" for name in names)
    canonical = f"{method}\n{path}\n{query}\n{lines}\n{';'.join(names)}\n{payload}"
    sent["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY.access_key}/{_SCOPE},SignedHeaders={';'.join(names)},"
        f"Signature={_signature(canonical)}"
    )
    return _text(method, f"{path}?{query}" if query else path, sent)


def _presigned(method: str, path: str, moved: Mapping[str, str] = {}) -> bytes:
    """Return a presigned request.  `moved`: headers that are in the query; they sort after the signature's own."""
    parameters = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{KEY.access_key}/{_SCOPE}",
        "X-Amz-Date": _STAMP,
        "X-Amz-Expires": "600",
        "X-Amz-SignedHeaders": "host",
        **moved,
    }
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
    canonical = f"{method}\n{path}\n{query}\nhost:{_HOST}\n\nhost\nUNSIGNED-PAYLOAD"
    return _text(method, f"{path}?{query}&X-Amz-Signature={_signature(canonical)}", {"host": _HOST})


def _text(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


HEADS: Final = (
    _head("GET", "/bucket/key", "", {"range": "bytes=0-1"}, _EMPTY),
    _head("PUT", "/bucket/a%20b/%C3%A9", "", {"x-amz-meta-a": "b c", "content-length": "5"}, "UNSIGNED-PAYLOAD"),
    _head("PUT", "/bucket/k", "partNumber=1&uploadId=ab", {"content-length": "5"}, "UNSIGNED-PAYLOAD"),
    _head("PUT", "/bucket/copy", "", {"x-amz-copy-source": "/bucket/k%20k?versionId=null"}, _EMPTY),
    _head("GET", "/bucket", "list-type=2&prefix=a%2F", {}, _EMPTY),
    _head("POST", "/bucket", "delete=", {"transfer-encoding": "chunked"}, "UNSIGNED-PAYLOAD"),
    _presigned("GET", "/bucket/key"),
    _presigned("PUT", "/bucket/key", {"x-amz-copy-source": "/bucket/k%20k", "x-amz-meta-a": "b c"}),
    b"GET http://lake:9000/bucket/key?x=1 HTTP/1.1\r\nHost: lake:9000\r\nConnection: close\r\n\r\n",
    b"GET /key HTTP/1.1\r\nHost: bucket.s3.lake.example\r\nIf-Match: a\r\nIf-Match: b\r\n\r\n",
)


def _seed(kind: Payload) -> Signature:
    return Signature(KEY, kind, "", "0" * 64, SigningKey(_KEY), _SCOPE, _STAMP)


SEEDS: Final = {kind: _seed(kind) for kind in PAYLOADS}


def _body(number: int, kind: Payload, cuts: tuple[int, ...]) -> bytes:
    is_signed = kind in CHAINED
    previous = SEEDS[kind].seed
    found = bytes([number])
    edges = (0, *cuts, len(PAYLOAD))
    pieces = [PAYLOAD[first:last] for first, last in pairwise(edges)]
    for piece in (*pieces, b""):
        line = b"%x" % len(piece)
        if is_signed:
            previous = _link("PAYLOAD", previous, f"{_EMPTY}\n{sha256(piece).hexdigest()}")
            line += b";chunk-signature=" + previous.encode()
        found += line + b"\r\n" + (piece + b"\r\n" if piece else b"")
    if kind is not Payload.STREAMING_SIGNED:
        found += b"x-amz-checksum-crc32:AAAAAA==\r\n"
    if kind is Payload.STREAMING_SIGNED_TRAILER:
        digest = sha256(b"x-amz-checksum-crc32:AAAAAA==\n").hexdigest()
        found += b"x-amz-trailer-signature:" + _link("TRAILER", previous, digest).encode() + b"\r\n"
    return found + b"\r\n"


def _link(kind: str, previous: str, hashes: str) -> str:
    text = f"AWS4-HMAC-SHA256-{kind}\n{_STAMP}\n{_SCOPE}\n{previous}\n{hashes}"
    return _sign(text.encode()).hex()


CHUNKED: Final = tuple(_body(number, kind, cuts) for number, kind in enumerate(PAYLOADS) for cuts in ((), (5, 17)))
