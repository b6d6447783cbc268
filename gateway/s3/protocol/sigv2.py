"""Authentication: Signature Version 2 of S3, in the Authorization header or in the query.  Pure.

Source: "Signing and Authenticating REST Requests (AWS signature version 2)" of the S3 manual.  It is accepted only
where `s3_signature_v2` says so: it covers neither the body nor other parameters than those of a list.

Rules kept here:
- The signature covers method, path, the sub-resources among the parameters, Content-MD5, Content-Type, every x-amz-*
  header, and a time: Date, x-amz-date, or in the query the end of its validity.
- A hash of the body in x-amz-content-sha256 is compared as for version 4; chunks have no signatures.
- Comparison is in constant time.  `sigv4` has all other rules of both.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

from gateway.http.head import RequestHead
from gateway.http.ranges import header_date
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import AccessKey, Payload, Signature, SigningKey
from gateway.s3.protocol.sigv4 import epoch_of_stamp, known_key, no_tokens, payload_of
from gateway.s3.protocol.targets import OF_SIGNATURE_V2, bucket_of_host
from lakefs.limits import S3_CLOCK_SKEW_S, S3_QUERY_PARAMETERS_MAX

_PREFIX: Final = b"AWS "
_AUTHORIZATION: Final = re.compile(rb"AWS ([!-9;-~]{1,128}):([A-Za-z0-9+/=]{28})")
_EXPIRES: Final = re.compile(rb"[0-9]{1,10}")
_SIGNED_PARAMETERS: Final = frozenset({
    b"accelerate", b"acl", b"analytics", b"cors", b"delete", b"inventory", b"lifecycle", b"location", b"logging",
    b"metrics", b"notification", b"object-lock", b"partNumber", b"policy", b"replication", b"requestPayment",
    b"response-cache-control", b"response-content-disposition", b"response-content-encoding",
    b"response-content-language", b"response-content-type", b"response-expires", b"restore", b"select",
    b"select-type", b"storageClass", b"tagging", b"torrent", b"uploadId", b"uploads", b"versionId", b"versioning",
    b"versions", b"website",
})  # fmt: skip
_OF_QUERY: Final = frozenset(name.encode() for name in OF_SIGNATURE_V2)
_STAMP_BYTES_KEPT: Final = 17
"""One more than a time has; only this much of a longer value is cached."""
_NO_KEY: Final = SigningKey(b"")
"""No chunk is signed with version 2."""


def is_version_2(head: RequestHead) -> bool:
    """Return True if a request carries a signature of version 2."""
    authorization = head.headers.get(b"authorization")
    if authorization is not None:
        return authorization.startswith(_PREFIX)
    if not all(name.encode() in head.query for name in OF_SIGNATURE_V2):
        return False
    return _parameters(head.query).keys() >= _OF_QUERY


def authenticate_v2(
    head: RequestHead, *, domains: tuple[str, ...], now_s: float, find_key: Callable[[str], AccessKey | None]
) -> Signature:
    """Check and return the signature of a request that carries one.  S3Error has S3's code for the failure."""
    parameters = _parameters(head.query)
    headers = _amz_headers(head.headers, parameters)
    if b"x-amz-security-token" in headers:
        raise no_tokens()
    authorization = head.headers.get(b"authorization")
    if authorization is not None:
        match = _AUTHORIZATION.fullmatch(authorization)
        if match is None:
            raise S3Error(400, "InvalidArgument", "the authorization header is not: AWS AccessKeyId:Signature")
        access_key, given, expires_s = match[1], match[2], 0
        when, signed_s = _time_of_header(head.headers, now_s)
    else:
        access_key, given, when = (parameters[name.encode()] for name in OF_SIGNATURE_V2)
        given = given.replace(b" ", b"+")  # some write Base64 as it is
        signed_s, expires_s = 0, _checked_end(when, now_s)
    key = known_key(access_key.decode("latin-1"), find_key)
    texts = _texts(head, headers, parameters, when, domains)
    secret, digest = key.secret_key.encode(), _decoded(given)
    if not any(hmac.compare_digest(hmac.digest(secret, text, "sha1"), digest) for text in texts):
        raise S3Error(
            403,
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided. "
            "Check your key and signing method.",
        )
    content = head.headers.get(b"x-amz-content-sha256", b"UNSIGNED-PAYLOAD")
    payload = payload_of(content)
    if payload in (Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER):
        raise S3Error(400, "InvalidRequest", "chunks are signed with version 4 only; sign the request with it")
    content_sha256 = content.decode() if payload is Payload.HASH else ""
    return Signature(key, payload, content_sha256, "", _NO_KEY, "", "", signed_s=signed_s, expires_s=expires_s)


def _parameters(query: bytes) -> dict[bytes, bytes]:
    """Return the decoded parameters, with the values that `targets.parse_query` returns.  S3Error for too many."""
    pairs = [pair.partition(b"=") for pair in query.split(b"&") if pair]
    if len(pairs) > S3_QUERY_PARAMETERS_MAX:
        raise S3Error(400, "InvalidArgument", f"the query has more than {S3_QUERY_PARAMETERS_MAX} parameters")
    return {_decoded_text(name): _decoded_text(value) for name, _, value in pairs}


def _decoded_text(raw: bytes) -> bytes:
    return unquote_to_bytes(raw.replace(b"+", b" "))


def _amz_headers(headers: Mapping[bytes, bytes], parameters: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the x-amz-* headers, also those that were moved into the query."""
    moved = {name.lower(): value for name, value in parameters.items() if name[:6].lower() == b"x-amz-"}
    return moved | {name: value for name, value in headers.items() if name[:6] == b"x-amz-"}


def _time_of_header(headers: Mapping[bytes, bytes], now_s: float) -> tuple[bytes, int]:
    """Return the time as it is signed, and in seconds since 1970.  S3Error for none, or one that is far off."""
    sent = headers.get(b"x-amz-date") or headers.get(b"date", b"")
    signed_s = header_date(sent.replace(b"+0000", b"GMT")) or epoch_of_stamp(sent[:_STAMP_BYTES_KEPT])
    if signed_s is None:
        raise S3Error(403, "AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    if abs(now_s - signed_s) > S3_CLOCK_SKEW_S:
        raise S3Error(
            403, "RequestTimeTooSkewed", "The difference between the request time and the current time is too large."
        )
    return b"" if b"x-amz-date" in headers else sent, signed_s


def _checked_end(when: bytes, now_s: float) -> int:
    """Return the end of a URL's validity, in seconds since 1970.  S3Error if it is none, or is over."""
    if not _EXPIRES.fullmatch(when):
        raise S3Error(403, "AccessDenied", "Invalid date (should be seconds since epoch)")
    if now_s > int(when):
        raise S3Error(403, "AccessDenied", "Request has expired")
    return int(when)


def _texts(
    head: RequestHead,
    headers: Mapping[bytes, bytes],
    parameters: Mapping[bytes, bytes],
    when: bytes,
    domains: tuple[str, ...],
) -> list[bytes]:
    """Return the text that is signed; of a bucket also the form that ends its path with `/`, as botocore does."""
    bucket = bucket_of_host(head.authority, domains)
    resource = (b"/" + bucket.encode() if bucket else b"") + head.path
    resources = [resource] if resource.count(b"/") > 1 else [resource, resource + b"/"]
    signed = [
        name + b"=" + value if value else name
        for name, value in sorted(parameters.items())
        if name in _SIGNED_PARAMETERS
    ]
    query = b"?" + b"&".join(signed) if signed else b""
    lines = [b"%b:%b\n" % (name, b" ".join(value.split())) for name, value in sorted(headers.items())]
    kinds = [head.headers.get(name) or parameters.get(name, b"") for name in (b"content-md5", b"content-type")]
    begin = b"\n".join([head.method.encode(), *kinds, when, b"".join(lines)])
    return [begin + resource + query for resource in resources]


def _decoded(given: bytes) -> bytes:
    """Return a signature's bytes; none of the right length if it is malformed."""
    try:
        return b64decode(given, validate=True)
    except ValueError:
        return b""
