"""Authentication: AWS Signature Version 4 for S3, in the Authorization header or in the query.  Pure.

Source: "Authenticating Requests (AWS Signature Version 4)" of the S3 API reference.

Rules kept here:
- The signature covers method, path, query, the signed headers (Host and every x-amz-* sent are among them), and
  the payload's hash or its kind.  The path is encoded once and never normalised.
- The time of a signature in a header is x-amz-date, or the Date header without one.  It is part of what is signed.
- A client may encode a path or query otherwise than S3 does (`@` for `%40`): both the canonical form and the bytes as
  received are tried.  Either binds the bytes that are served.
- Comparison is in constant time.  Secret and signing keys are in no message and no repr.
- A key's rights are not checked here.

Parsed Authorization headers (without their signature) and signing keys are cached; both caches are bounded and hold
nothing that decides: `find_key` is called each time.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from gateway.http.head import RequestHead
from gateway.http.ranges import epoch_of, header_date
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import AccessKey, Payload, Signature, SigningKey
from lakefs.limits import (
    S3_AUTHORIZATIONS_CACHED,
    S3_CLOCK_SKEW_S,
    S3_PRESIGN_S_MAX,
    S3_QUERY_PARAMETERS_MAX,
    S3_SIGNING_KEYS_CACHED,
)

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
_CONTENT_SHA256: Final = b"x-amz-content-sha256"
_EMPTY_SHA256: Final = sha256(b"").hexdigest().encode()
_SIGNATURE_BYTES: Final = 64
_HEX_64: Final = re.compile(rb"[0-9a-f]{64}")
_AUTHORIZATION: Final = re.compile(
    rb"AWS4-HMAC-SHA256[ \t]+Credential=([\x21-\x7e]+?)[ \t]*,[ \t]*"
    rb"SignedHeaders=([\x21-\x2b\x2d-\x7e]+)[ \t]*,[ \t]*Signature="
)
_CREDENTIAL: Final = re.compile(r"([!-~]{1,128}?)/([0-9]{8})/([^/]*)/([^/]*)/([^/]*)")
_TIMESTAMP_BYTES_KEPT: Final = 17
"""One more than a time has: a longer value is no time, and only this much of it is cached."""
_TIMESTAMP: Final = re.compile(rb"([0-9]{4})([0-9]{2})([0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})Z")
_PLAIN_VALUE: Final = re.compile(rb"[-A-Za-z0-9._~]*")
_QUERY_AUTH: Final = re.compile(rb"(?:^|&)X-Amz-(?:Signature|Algorithm|Credential)=")
_OLD_QUERY_AUTH: Final = re.compile(rb"(?:^|&)(?:AWSAccessKeyId|Signature)=")


_PAYLOADS: Final = {payload.value.encode(): payload for payload in Payload if payload is not Payload.HASH} | {
    _EMPTY_SHA256: Payload.HASH  # of every GET
}


class _Claim(NamedTuple):
    """The access key that a request claims, its scope, and the signed headers.

    `lines` takes the headers' values by `%`; the result is their part of the canonical request.
    """

    access_key: str
    date: str
    region: str
    scope: str
    signed: tuple[bytes, ...]
    signed_set: frozenset[bytes]
    lines: bytes


def authenticate(
    head: RequestHead, *, region: str, now_s: float, find_key: Callable[[str], AccessKey | None]
) -> Signature | None:
    """Check and return the signature of a request; None if it carries none (anonymous).

    `region`: the one that must have been signed for.  `find_key` returns the key pair of an access key, or None.
    S3Error has S3's code for the failure.
    """
    authorization = head.headers.get(b"authorization")
    query = head.query
    in_query = bool(query) and _QUERY_AUTH.search(query) is not None
    if authorization is not None:
        if in_query:
            raise S3Error(400, "InvalidArgument", "sign in the Authorization header or in the query, not in both")
        return _by_header(head, authorization, region, now_s, find_key)
    if in_query:
        return _by_query(head, region, now_s, find_key)
    if query and _OLD_QUERY_AUTH.search(query):
        raise _wrong_mechanism()
    return None


def _by_header(
    head: RequestHead, authorization: bytes, region: str, now_s: float, find_key: Callable[[str], AccessKey | None]
) -> Signature:
    read_claim = _cached_claim if len(authorization) <= _CACHED_AUTHORIZATION_BYTES else _claim_of_header
    claim = read_claim(authorization[:-_SIGNATURE_BYTES])
    given = authorization[-_SIGNATURE_BYTES:]
    headers = head.headers
    if b"x-amz-security-token" in headers:
        raise no_tokens()
    timestamp = headers.get(b"x-amz-date") or _stamp_of_date(headers.get(b"date"))
    if timestamp is None:
        raise S3Error(403, "AccessDenied", "a signed request needs an x-amz-date or a Date header")
    signed_s = epoch_of_stamp(timestamp[:_TIMESTAMP_BYTES_KEPT])
    if signed_s is None or timestamp[:8].decode() != claim.date:
        raise S3Error(403, "AccessDenied", "x-amz-date is not a time on the day of the credential's scope")
    if claim.region != region:
        raise _wrong_region(400, "AuthorizationHeaderMalformed", claim.region, region)
    content = _content_of_header(headers, claim)
    payload = payload_of(content)
    if abs(now_s - signed_s) > S3_CLOCK_SKEW_S:
        raise S3Error(
            403, "RequestTimeTooSkewed", "The difference between the request time and the current time is too large."
        )
    key = known_key(claim.access_key, find_key)
    return _proven(head, claim, key, head.query, timestamp, payload, content, given, signed_s)


def _stamp_of_date(date: bytes | None) -> bytes | None:
    """Return a Date header in the form that is signed, in which it may also come; None without one."""
    epoch_s = header_date(date)
    return date if epoch_s is None else time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch_s)).encode()


def _content_of_header(headers: Mapping[bytes, bytes], claim: _Claim) -> bytes:
    """Return the hash or kind of the body that the signature covers.  Clients that sign by hand, as older curls do,
    leave the header out: without a body only one value is possible."""
    content = headers.get(_CONTENT_SHA256)
    if content is not None:
        return content
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
    if has_body or _CONTENT_SHA256 in claim.signed_set:
        raise S3Error(400, "InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    return _EMPTY_SHA256


def _by_query(head: RequestHead, region: str, now_s: float, find_key: Callable[[str], AccessKey | None]) -> Signature:
    parameters, unsigned_query = _presigned_parameters(head.query)
    try:
        credential, timestamp, expires_text, signed, given = (
            parameters[name]
            for name in ("X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Signature")
        )
    except KeyError as error:
        raise _query_refused(f"a presigned request needs the query parameter {error.args[0]}") from None
    if parameters.get("X-Amz-Algorithm", b"") != ALGORITHM:
        raise _query_refused("X-Amz-Algorithm only supports AWS4-HMAC-SHA256")
    claim = _claim(credential, signed, "AuthorizationQueryParametersError")
    signed_s = epoch_of_stamp(timestamp[:_TIMESTAMP_BYTES_KEPT])
    if signed_s is None or timestamp[:8].decode() != claim.date:
        raise _query_refused("X-Amz-Date is not a time on the day of the credential's scope")
    if claim.region != region:
        raise _wrong_region(400, "AuthorizationQueryParametersError", claim.region, region)
    if not re.fullmatch(rb"[0-9]{1,9}", expires_text) or not 1 <= int(expires_text) <= S3_PRESIGN_S_MAX:
        raise _query_refused(f"X-Amz-Expires must be a number of seconds from 1 to {S3_PRESIGN_S_MAX}")
    if now_s < signed_s - S3_CLOCK_SKEW_S:
        raise S3Error(403, "AccessDenied", "Request is not yet valid")
    if now_s > signed_s + int(expires_text):
        raise S3Error(403, "AccessDenied", "Request has expired")
    if "X-Amz-Security-Token" in parameters:
        raise no_tokens()
    content = head.headers.get(_CONTENT_SHA256) or parameters.get("X-Amz-Content-Sha256", b"UNSIGNED-PAYLOAD")
    key = known_key(claim.access_key, find_key)
    payload = payload_of(content)
    expires_s = int(expires_text)
    return _proven(head, claim, key, unsigned_query, timestamp, payload, content, given, signed_s, expires_s)


def known_key(access_key: str, find_key: Callable[[str], AccessKey | None]) -> AccessKey:
    """Return the key pair of an access key.  S3Error InvalidAccessKeyId."""
    key = find_key(access_key)
    if key is None:
        raise S3Error(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
    return key


def _proven(
    head: RequestHead,
    claim: _Claim,
    key: AccessKey,
    query: bytes,
    timestamp: bytes,
    payload: Payload,
    content: bytes,
    given: bytes,
    signed_s: int,
    expires_s: int = 0,
) -> Signature:
    """Return the signature, or raise a 403: the same for a wrong path, query, header, date, scope or key."""
    signing_key = _signing_key(key.secret_key, claim.date, claim.region)
    signed_headers = _signed_headers(head.headers, claim)
    method, path, when = head.method.encode(), head.path, timestamp.decode()

    def signature_over(path: bytes, query: bytes) -> str:
        canonical = b"\n".join((method, path, query, signed_headers, content))
        to_sign = f"AWS4-HMAC-SHA256\n{when}\n{claim.scope}\n{sha256(canonical).hexdigest()}"
        return signing_key.sign(to_sign.encode())

    pairs = _pairs(query) if query else []
    signed_path, signed_query = path, _joined(pairs)  # as received: most clients sign that
    seed = signature_over(signed_path, signed_query)
    if not hmac.compare_digest(seed.encode(), given):
        signed_path = quote_from_bytes(unquote_to_bytes(path), b"/~").encode()
        signed_query = _joined([(_encoded(name), _encoded(value)) for name, value in pairs])
        seed = signature_over(signed_path, signed_query)
        if not hmac.compare_digest(seed.encode(), given):
            raise S3Error(
                403,
                "SignatureDoesNotMatch",
                "The request signature we calculated does not match the signature you provided. "
                "Check your key and signing method.",
            )
    return Signature(
        key,
        payload,
        content.decode() if payload is Payload.HASH else "",
        seed,
        signing_key,
        claim.scope,
        when,
        b"%b\n%b" % (signed_path, signed_query),
        claim.signed,
        signed_s,
        expires_s,
    )


def _pairs(query: bytes) -> list[tuple[bytes, bytes]]:
    parts = (pair.partition(b"=") for pair in query.split(b"&") if pair)
    return [(name, value) for name, _, value in parts]


def _joined(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Return parameters in order of their names, then values, each with its "="."""
    return b"&".join([b"%b=%b" % pair for pair in sorted(pairs)])


def _encoded(text: bytes) -> bytes:
    """Return a name or value of a query as S3 encodes it; a client may encode it otherwise, also a space as `+`."""
    if _PLAIN_VALUE.fullmatch(text):
        return text
    return quote_from_bytes(unquote_to_bytes(text.replace(b"+", b" ")), b"~").encode()


def _signed_headers(headers: Mapping[bytes, bytes], claim: _Claim) -> bytes:
    """Return `name:value LF` of each signed header, an empty line, their names.  S3Error if one is missing, or an
    x-amz-* header was not signed."""
    signed_set = claim.signed_set
    for name in headers:
        if name not in signed_set and name[:6] == b"x-amz-":
            raise S3Error(
                403, "AccessDenied", f"There were headers present in the request which were not signed: {name.decode()}"
            )
    try:
        values = [headers[name] for name in claim.signed]
    except KeyError as error:
        missing = error.args[0].decode("latin-1")
        raise S3Error(403, "AccessDenied", f"the signed header {missing} did not come") from None
    joined = claim.lines % tuple(values)
    if b" " not in joined and b"\t" not in joined:
        return joined
    return claim.lines % tuple(b" ".join(value.split()) for value in values)


def _claim_of_header(before_signature: bytes) -> _Claim:
    match = _AUTHORIZATION.fullmatch(before_signature)
    if match is None:
        if not before_signature.startswith(ALGORITHM + b" "):
            raise _wrong_mechanism()
        raise S3Error(
            400,
            "AuthorizationHeaderMalformed",
            "The authorization header is malformed; it needs Credential, SignedHeaders and Signature, in this order.",
        )
    return _claim(match[1], match[2], "AuthorizationHeaderMalformed")


_cached_claim: Final = lru_cache(maxsize=S3_AUTHORIZATIONS_CACHED)(_claim_of_header)
_CACHED_AUTHORIZATION_BYTES: Final = 768
"""Longer headers are parsed anew each time, so that strangers cannot fill the cache with their own."""


def _claim(credential: bytes, signed: bytes, code: str) -> _Claim:
    match = _CREDENTIAL.fullmatch(credential.decode("latin-1"))
    if match is None:
        raise S3Error(400, code, "the Credential is not KEY/YYYYMMDD/REGION/s3/aws4_request")
    access_key, date, region, service, terminator = match.groups()
    if (service, terminator) != ("s3", "aws4_request"):
        raise S3Error(400, code, "the credential's scope must end with /s3/aws4_request")
    names = tuple(signed.split(b";"))
    if b"host" not in names or list(names) != sorted(set(names)) or signed != signed.lower():
        raise S3Error(400, code, "SignedHeaders must name host, in lower case, in order and once each")
    lines = b"".join(name.replace(b"%", b"%%") + b":%b\n" for name in names) + b"\n" + signed.replace(b"%", b"%%")
    return _Claim(access_key, date, region, f"{date}/{region}/s3/aws4_request", names, frozenset(names), lines)


def _presigned_parameters(query: bytes) -> tuple[dict[str, bytes], bytes]:
    """Return the X-Amz-* parameters, decoded, and the query without the signature."""
    parameters: dict[str, bytes] = {}
    kept = []
    pairs = query.split(b"&")
    if len(pairs) > S3_QUERY_PARAMETERS_MAX:
        raise _query_refused(f"the query has more than {S3_QUERY_PARAMETERS_MAX} parameters")
    for pair in pairs:
        raw_name, _, raw_value = pair.partition(b"=")
        name = unquote_to_bytes(raw_name).decode("latin-1")
        if name.startswith("X-Amz-"):
            if name in parameters:
                raise _query_refused(f"the query parameter {name} may not be repeated")
            parameters[name] = unquote_to_bytes(raw_value)
        if name != "X-Amz-Signature":
            kept.append(pair)
    return parameters, b"&".join(kept)


def payload_of(content: bytes) -> Payload:
    """Return the kind of a body that x-amz-content-sha256 states.  S3Error."""
    payload = _PAYLOADS.get(content)
    if payload is not None:
        return payload
    if _HEX_64.fullmatch(content):
        return Payload.HASH
    raise S3Error(
        400,
        "InvalidArgument",
        "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, a STREAMING- value or a valid sha256 value.",
    )


@lru_cache(maxsize=S3_SIGNING_KEYS_CACHED)
def _signing_key(secret_key: str, date: str, region: str) -> SigningKey:
    key = b"AWS4" + secret_key.encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return SigningKey(key)


@lru_cache(maxsize=1024)
def epoch_of_stamp(timestamp: bytes) -> int | None:
    """Parse `YYYYMMDDTHHMMSSZ` to seconds since 1970; None if it is no time."""
    match = _TIMESTAMP.fullmatch(timestamp)
    if match is None:
        return None
    return epoch_of(*map(int, match.groups()))


def _query_refused(message: str) -> S3Error:
    return S3Error(400, "AuthorizationQueryParametersError", message)


def _wrong_mechanism() -> S3Error:
    return S3Error(
        400,
        "InvalidRequest",
        "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256: "
        'boto3 and the aws cli presign with it by signature_version="s3v4" (Config(signature_version="s3v4"), '
        "aws configure set default.s3.signature_version s3v4), or where the server's s3_region and theirs is another "
        'than us-east-1; the server accepts version 2 with s3_signature_v2 = "on".',
    )


def _wrong_region(status: int, code: str, given: str, region: str) -> S3Error:
    """Return the refusal; a client reads the region from the header where the answer has no body (HeadBucket)."""
    headers = {"x-amz-bucket-region": region}
    return S3Error(
        status, code, f"the region {given!r} is wrong; expecting {region!r}", "", headers, {"Region": region}
    )


def no_tokens() -> S3Error:
    """Return the refusal of a session token."""
    return S3Error(400, "InvalidToken", "this store gives out no session tokens; use an access key of its own")
