"""The target of a request: bucket, key, parameters, and operation.  Pure.

Rules kept here:
- The bucket is the first part of the path, or the Host's labels before a configured suffix (virtual-host style).
- A key is the rest of the path, percent-decoded once to UTF-8.  It is never normalised: `..`, `//` and `%2e%2e` are
  ordinary parts of keys.  A key with NUL, or of more than 1,024 bytes, is refused.
- A sub-resource that this store does not have (`?session`, ...) is 501 before any data is touched.  A request
  that would change something is also 501 if it has any other parameter that its operation does not know: a
  sub-resource unknown today must not overwrite a body.  Reads ignore such parameters, as S3 does.
- A sub-resource of buckets that is asked of a key, or the reverse, is 400: the key's content is no answer to it.
- Parameters `x-...` are the client's own, and change nothing, as in S3 (there its access log shows them).
- `+` in a query and in x-amz-copy-source is a space, in a path it is itself.
- A host with a dot at its end is the host without.
- An x-amz-* parameter is the header of that name, as in S3: SDKs move headers into the query when they presign.  The
  signature's own parameters are not.

Not decided here: that the bucket exists, and the caller's rights.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from gateway.http.head import RequestHead
from gateway.s3.protocol.errors import S3Error, bad_bucket, invalid_argument, not_implemented
from gateway.s3.protocol.operation import BY_ID, SUB_RESOURCES, Level, Operation
from lakefs.limits import S3_KEY_BYTES_MAX, S3_QUERY_PARAMETERS_MAX
from lakefs.names import invalid_bucket_name, is_bucket_name

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]*)(?::[0-9]{0,5})?")
_HOST_BYTES_KEPT: Final = 320
"""A host name has at most 253 bytes; a longer Host names no bucket, and only this much of it is cached."""
_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_NO_HEADER_VALUE: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_OF_SIGNATURES: Final = {
    name.lower(): name
    for name in (
        "X-Amz-Algorithm",
        "X-Amz-Content-Sha256",
        "X-Amz-Credential",
        "X-Amz-Date",
        "X-Amz-Expires",
        "X-Amz-Security-Token",
        "X-Amz-Signature",
        "X-Amz-SignedHeaders",
    )
}
"""Parameters that `gateway.s3.protocol.sigv4` reads, and in no other spelling."""


OF_SIGNATURE_V2: Final = ("AWSAccessKeyId", "Signature", "Expires")
"""Parameters that `gateway.s3.protocol.sigv2` reads; together they are no parameters of an operation."""
_V2: Final = frozenset(OF_SIGNATURE_V2)
_MOVED_BY_V2: Final = ("content-md5", "content-type")
"""Headers that botocore also writes into the query that it signs with version 2."""


class Target(msgspec.Struct, frozen=True):
    """`bucket` "" is the service, `key` "" the bucket itself.  `parameters`: decoded, "" for one without a value.

    `moved`: the headers sent as x-amz-* parameters; none of these is among `parameters`.
    """

    operation: Operation
    bucket: str
    key: str
    parameters: dict[str, str]
    moved: dict[bytes, bytes] = {}


_Choice = tuple[frozenset[str], Operation]


def _when(operation: Operation, *present: str) -> _Choice:
    return frozenset(present), operation


# The first choice whose parameters are all present is taken.
_CHOICES: Final[Mapping[tuple[Level, str], tuple[_Choice, ...]]] = {
    (Level.SERVICE, "GET"): (_when(Operation.LIST_BUCKETS),),
    (Level.BUCKET, "GET"): (
        _when(Operation.GET_BUCKET_LOCATION, "location"),
        _when(Operation.GET_BUCKET_VERSIONING, "versioning"),
        _when(Operation.LIST_OBJECT_VERSIONS, "versions"),
        _when(Operation.LIST_MULTIPART_UPLOADS, "uploads"),
        _when(Operation.LIST_OBJECTS_V2, "list-type"),
        _when(Operation.LIST_OBJECTS),
    ),
    (Level.BUCKET, "HEAD"): (_when(Operation.HEAD_BUCKET),),
    (Level.BUCKET, "PUT"): (_when(Operation.PUT_BUCKET_VERSIONING, "versioning"), _when(Operation.CREATE_BUCKET)),
    (Level.BUCKET, "DELETE"): (_when(Operation.DELETE_BUCKET),),
    (Level.BUCKET, "POST"): (_when(Operation.DELETE_OBJECTS, "delete"),),
    (Level.BUCKET, "OPTIONS"): (_when(Operation.OPTIONS_OBJECT),),
    (Level.OBJECT, "GET"): (
        _when(Operation.GET_OBJECT_ATTRIBUTES, "attributes"),
        _when(Operation.GET_OBJECT_TAGGING, "tagging"),
        _when(Operation.LIST_PARTS, "uploadId"),
        _when(Operation.GET_OBJECT),
    ),
    (Level.OBJECT, "HEAD"): (_when(Operation.HEAD_OBJECT),),
    (Level.OBJECT, "OPTIONS"): (_when(Operation.OPTIONS_OBJECT),),
    (Level.OBJECT, "PUT"): (
        _when(Operation.PUT_OBJECT_TAGGING, "tagging"),
        _when(Operation.UPLOAD_PART, "uploadId", "partNumber"),
        _when(Operation.PUT_OBJECT),
    ),
    (Level.OBJECT, "POST"): (
        _when(Operation.CREATE_MULTIPART_UPLOAD, "uploads"),
        _when(Operation.COMPLETE_MULTIPART_UPLOAD, "uploadId"),
    ),
    (Level.OBJECT, "DELETE"): (
        _when(Operation.DELETE_OBJECT_TAGGING, "tagging"),
        _when(Operation.ABORT_MULTIPART_UPLOAD, "uploadId"),
        _when(Operation.DELETE_OBJECT),
    ),
}
_COPIES: Final = {Operation.PUT_OBJECT: Operation.COPY_OBJECT, Operation.UPLOAD_PART: Operation.UPLOAD_PART_COPY}
"""The operation of a PUT that has a header x-amz-copy-source."""

READING: Final = frozenset(
    operation for (_, method), choices in _CHOICES.items() if method in ("GET", "HEAD") for _, operation in choices
) | frozenset(
    operation
    for of_level in SUB_RESOURCES.values()
    for operations in of_level.values()
    for operation in (operations.get("GET"), BY_ID.get(operations.get("GET", Operation.GET_OBJECT)))
    if operation is not None
)
"""Operations that change nothing: those of GET and HEAD."""
_OF_S3: Final = frozenset({
    "abac", "annotation", "metadataConfiguration", "metadataInventoryTable", "metadataJournalTable", "metadataTable",
    "session", *SUB_RESOURCES[Level.BUCKET], *SUB_RESOURCES[Level.OBJECT],
}) - {"tagging"}  # fmt: skip
"""Sub-resources of S3 that have no other operations here than SUB_RESOURCES names."""
_ELSEWHERE: Final[Mapping[Level, tuple[frozenset[str], str]]] = {
    Level.SERVICE: (frozenset(), ""),
    Level.BUCKET: (frozenset(("attributes", "uploadId")), "A key must be specified"),
    Level.OBJECT: (frozenset(("delete", "location", "uploads", "versioning", "versions")), "Key is not expected"),
}
"""Sub-resources of buckets that no key has, of keys that no bucket has, and what S3 says of them."""
_OWN_PREFIX: Final = "x-"
"""Prefix of the parameters that are the client's own."""
_WRITING: Final = frozenset(("PUT", "POST", "DELETE"))
_OF_VERSIONS: Final = frozenset(
    (Operation.DELETE_OBJECT, Operation.PUT_OBJECT_TAGGING, Operation.DELETE_OBJECT_TAGGING)
)
"""Operations that change one version of an object and so know `versionId`."""


def parse_target(head: RequestHead, domains: tuple[str, ...] = ()) -> Target:
    """Parse the target of a request.

    `domains`: lower-case host suffixes of virtual-host style, `s3.example.com` for `bucket.s3.example.com`.
    S3Error: InvalidURI, InvalidBucketName, KeyTooLongError, NotImplemented, MethodNotAllowed, InvalidArgument.
    """
    path = head.path
    bucket = bucket_of_host(head.authority, domains)
    if bucket:
        raw_key = path[1:]
    else:
        raw_bucket, _, raw_key = path[1:].partition(b"/")
        bucket = _decoded(raw_bucket) if raw_bucket else ""
        if raw_key and not bucket:
            raise bad_bucket(bucket, invalid_bucket_name(bucket))
    if bucket and not is_bucket_name(bucket):
        raise bad_bucket(bucket, invalid_bucket_name(bucket))
    key = _key(raw_key) if raw_key else ""
    sent = parse_query(head.query) if head.query else {}
    also: tuple[str, ...] = ()
    if sent.keys() >= _V2:
        sent = {name: value for name, value in sent.items() if name not in _V2}
        also = _MOVED_BY_V2
    parameters = {name: value for name, value in sent.items() if not (_is_amz(name) or name in also)}
    moved = {} if len(parameters) == len(sent) else _moved_headers(sent, head.headers, also)
    level = Level.OBJECT if key else Level.BUCKET if bucket else Level.SERVICE
    operation = _operation(level, head.method, parameters)
    if b"x-amz-copy-source" in head.headers or b"x-amz-copy-source" in moved:
        operation = _COPIES.get(operation, operation)
    return Target(operation, bucket, key, parameters, moved)


def bucket_of_host(authority: bytes, domains: tuple[str, ...]) -> str:
    """Return the bucket that the Host names before one of the suffixes; "" for none.  S3Error if it is no host."""
    return _bucket_of_host(authority[:_HOST_BYTES_KEPT], domains) if domains else ""


def parse_copy_source(value: bytes) -> tuple[str, str, str]:
    """Parse x-amz-copy-source, `/bucket/key?versionId=V`, to bucket, key and version ("" for none).  S3Error."""
    raw_path, _, query = value.partition(b"?")
    raw_path = raw_path.replace(b"+", b" ")
    raw_bucket, _, raw_key = raw_path.removeprefix(b"/").partition(b"/")
    if not raw_key:
        # Some clients encode the slash between bucket and key too.
        raw_bucket, _, raw_key = unquote_to_bytes(raw_path).removeprefix(b"/").partition(b"/")
        raw_key = raw_key.replace(b"%", b"%25")
    bucket = _decoded(raw_bucket)
    if not raw_key or not is_bucket_name(bucket):
        raise S3Error(
            400, "InvalidArgument", "Copy Source must mention the source bucket and key: sourcebucket/sourcekey"
        )
    return bucket, _key(raw_key), parse_query(query).get("versionId", "")


def parse_query(query: bytes) -> dict[str, str]:
    """Return the decoded parameters; S3Error InvalidArgument if one is repeated or there are too many."""
    parameters: dict[str, str] = {}
    for pair in query.split(b"&"):
        if not pair:
            continue
        raw_name, _, raw_value = pair.partition(b"=")
        name = _decoded(raw_name.replace(b"+", b" "))
        if name in parameters:
            raise S3Error(400, "InvalidArgument", f"the query parameter {name!r} may not be repeated")
        parameters[name] = _decoded(raw_value.replace(b"+", b" ")) if raw_value else ""
    if len(parameters) > S3_QUERY_PARAMETERS_MAX:
        raise S3Error(400, "InvalidArgument", f"the query has more than {S3_QUERY_PARAMETERS_MAX} parameters")
    return parameters


def _is_amz(name: str) -> bool:
    return name[:6].lower() == "x-amz-"


def _moved_headers(sent: Mapping[str, str], headers: Mapping[bytes, bytes], also: Container[str]) -> dict[bytes, bytes]:
    """Return the headers sent as parameters: x-amz-* and those of `also`.

    S3Error for a value that no header has, or a second, different one.
    """
    moved: dict[bytes, bytes] = {}
    for name, text in sent.items():
        if not (_is_amz(name) or name in also) or name in _OF_SIGNATURES.values():
            continue
        header, value = name.lower(), text.strip(" \t")
        if header in _OF_SIGNATURES:
            raise S3Error(400, "InvalidArgument", f"spell the query parameter {header} {_OF_SIGNATURES[header]}")
        if not _HEADER_NAME.fullmatch(header) or _NO_HEADER_VALUE.search(value):
            raise invalid_argument("this query parameter cannot be a header", name[:64], value[:64])
        raw_name, raw_value = header.encode(), value.encode()
        beside = headers.get(raw_name, raw_value) or (raw_value if name in also else b"")  # an empty one of V2 is none
        if moved.get(raw_name, raw_value) != raw_value or beside != raw_value:
            raise S3Error(400, "InvalidArgument", f"{header[:64]} was given twice, with different values")
        moved[raw_name] = raw_value
    return moved


def _operation(level: Level, method: str, parameters: Mapping[str, str]) -> Operation:
    choices = _CHOICES.get((level, method))
    if method == "OPTIONS" and choices is not None:
        return choices[-1][1]  # whatever the request is that it asks for
    if not parameters and choices is not None and not choices[-1][0]:
        return choices[-1][1]
    named = _of_sub_resource(level, method, parameters)
    if named is not None:
        return named
    if choices is None:
        raise _method_refusal(level, method)
    chosen = next((choice for choice in choices if choice[0] <= parameters.keys()), None)
    _check_level(level, method, parameters, chosen)
    if chosen is None:
        raise not_implemented(f"{method} of {level.value} with these parameters")
    needed, operation = chosen
    if method in _WRITING:
        _check_known(operation, parameters, needed | {"versionId"} if operation in _OF_VERSIONS else needed)
    return operation


def _check_level(level: Level, method: str, parameters: Mapping[str, str], chosen: _Choice | None) -> None:
    """Raise S3Error InvalidRequest for a sub-resource that the level does not have."""
    elsewhere, message = _ELSEWHERE[level]
    needed = chosen[0] if chosen is not None else frozenset()
    misplaced = next((name for name in parameters if name in elsewhere and name not in needed), None)
    if misplaced is not None:
        raise S3Error(400, "InvalidRequest", f"{message} for the {method} method ?{misplaced} subresource")


def _of_sub_resource(level: Level, method: str, parameters: Mapping[str, str]) -> Operation | None:
    """Return the operation of the sub-resource that is named, None if none is.  S3Error for one that has none here."""
    known = SUB_RESOURCES[level]
    name = next((name for name in parameters if name in known or name in _OF_S3), None)
    if name is None:
        return None
    operation = known.get(name, {}).get(method)
    if operation is None:
        raise not_implemented(f"{method} of the sub-resource ?{name}")
    if method in _WRITING:
        _check_known(operation, parameters, frozenset((name, "id")))
    return BY_ID.get(operation, operation) if "id" in parameters else operation


def _check_known(operation: Operation, parameters: Mapping[str, str], known: frozenset[str]) -> None:
    """Raise S3Error NotImplemented if a request that changes something has another parameter than these."""
    unknown = [name for name in parameters if name not in known and not name.startswith(_OWN_PREFIX)]
    if unknown:
        raise not_implemented(f"{operation.value} with the query parameter {unknown[0][:64]!r}")


def _method_refusal(level: Level, method: str) -> S3Error:
    if method in ("POST", "OPTIONS"):
        return not_implemented(f"{method} of {level.value}")
    allowed = sorted(name for at, name in _CHOICES if at is level)
    return S3Error(
        405,
        "MethodNotAllowed",
        "The specified method is not allowed against this resource.",
        headers={"Allow": ", ".join(allowed)},
    )


def _key(raw: bytes) -> str:
    key = _decoded(raw)
    length = len(raw) if b"%" not in raw else len(key.encode())
    if length > S3_KEY_BYTES_MAX:
        raise S3Error(
            400,
            "KeyTooLongError",
            "Your key is too long",
            details={"Size": str(length), "MaxSizeAllowed": str(S3_KEY_BYTES_MAX)},
        )
    return key


def _decoded(raw: bytes) -> str:
    """Percent-decode once; the result is UTF-8 without NUL, or S3Error InvalidURI."""
    if b"%" in raw:
        if _BAD_ESCAPE.search(raw):
            raise _bad_uri("a % that begins no escape")
        raw = unquote_to_bytes(raw)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise _bad_uri("it is not UTF-8") from None
    if "\0" in text:
        raise _bad_uri("a NUL")
    return text


@lru_cache(maxsize=1024)
def _bucket_of_host(authority: bytes, domains: tuple[str, ...]) -> str:
    """Return the bucket before one of the suffixes; "" for a host that names none.  S3Error if it is no host at all."""
    match = _HOST.fullmatch(authority.decode("latin-1").lower())
    if match is None:
        raise S3Error(400, "InvalidRequest", "the Host header is not a host with an optional port")
    host = match[1].removesuffix(".")
    if host in domains:
        return ""
    for domain in domains:
        bucket = host.removesuffix("." + domain)
        if bucket != host:
            return bucket
    return ""


def _bad_uri(what: str) -> S3Error:
    return S3Error(400, "InvalidURI", f"Couldn't parse the specified URI: {what}")
