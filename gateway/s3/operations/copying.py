"""Copies: another name for the same content; no byte moves."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.http.messages import Response
from gateway.http.ranges import Condition as SourceCondition, check_conditions
from gateway.s3.operations.buckets import iso_time
from gateway.s3.operations.versions import checked_version, version_headers
from gateway.s3.protocol.attributes import attributes_of, checksum_elements, tags_of_copy
from gateway.s3.protocol.checksums import algorithm_named
from gateway.s3.protocol.errors import S3Error, invalid_argument, not_implemented, precondition_failed
from gateway.s3.protocol.headers import write_condition
from gateway.s3.protocol.targets import parse_copy_source
from gateway.s3.protocol.xml import document, element
from gateway.s3.request.authorization import check_bucket
from gateway.s3.request.call import Call, stat_of, xml_response
from lakefs.names import Name
from lakefs.wire.messages import Copy, NameResults, ObjectAttributes, ObjectStat, StatNames

_PREFIX: Final = b"x-amz-copy-source-"
COPIED_VERSION_HEADER: Final = _PREFIX + b"version-id"


async def copy_object(call: Call) -> Response:
    """Copy an object.  The source's metadata are kept, or replaced by the request's; ETag and checksums stay."""
    found = await copy_source(call)
    name, source = found.name, found.stat
    replaced = _is_replaced(call)
    if not replaced and not found.version and name == (call.bucket, call.key):
        raise S3Error(
            400,
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the "
            "object's metadata, storage class, website redirect location or encryption attributes.",
        )
    _check_checksum(call, source)
    attributes = _replacement(call, source) if replaced else None
    tags = tags_of_copy(call.headers)
    condition = write_condition(call.headers)
    copying = Copy(*name, call.bucket, call.key, attributes, condition, tags=tags, version=found.version)
    stat = await call.ask_one(copying)
    fields = element("LastModified", iso_time(stat.last_modified_ns)) + element("ETag", f'"{stat.etag}"')
    fields += checksum_elements(stat.checksums)
    headers = version_headers(stat) + version_headers(source, COPIED_VERSION_HEADER)
    return xml_response(document("CopyObjectResult", fields), headers)


def _check_checksum(call: Call, source: ObjectStat) -> None:
    """Raise S3Error NotImplemented if the copy needs a checksum that its source has not: no byte is read."""
    named = call.header(b"x-amz-checksum-algorithm")
    if named and algorithm_named(named).value not in source.checksums:
        raise not_implemented(f"a copy with a {named.upper()} of an object that is kept without one")


class CopySource(NamedTuple):
    """The source of a copy.  `version` is the request's, "" for the one that the key is bound to."""

    name: Name
    stat: ObjectStat
    version: str


async def copy_source(call: Call) -> CopySource:
    """Return the source of a request, after checking that its key may read it and its conditions hold.  S3Error."""
    bucket, key, version = parse_copy_source(call.headers[b"x-amz-copy-source"])
    if version:
        version = checked_version(version)
    if call.signature is not None:
        check_bucket(call.signature.key, bucket)
    looking = StatNames([(bucket, key)], versions=[version])
    source = stat_of((await call.ask(looking, NameResults)).results[0], key)
    if source.is_marker:
        raise S3Error(
            400,
            "InvalidRequest",
            "The source of a copy request may not specifically refer to a delete marker by version id.",
        )
    modified_s = source.last_modified_ns // 1_000_000_000
    if check_conditions(call.headers, source.etag, modified_s, _PREFIX) is not SourceCondition.PROCEED:
        raise precondition_failed()
    return CopySource(Name(bucket, key), source, version)


def _is_replaced(call: Call) -> bool:
    directive = call.header(b"x-amz-metadata-directive").upper() or "COPY"
    if directive not in ("COPY", "REPLACE"):
        raise invalid_argument("Unknown metadata directive.", "x-amz-metadata-directive", directive)
    return directive == "REPLACE"


def _replacement(call: Call, source: ObjectStat) -> ObjectAttributes:
    kind, etag = _kept_etag(source)
    return attributes_of(call.headers, etag_kind=kind, etag=etag, sums=source.checksums)


def _kept_etag(source: ObjectStat) -> tuple[int, bytes]:
    """Return kind and value of the content's ETag (docs/format.md): derived, an MD5, or that of an upload in parts."""
    if source.etag == f"{source.blob[1:17].hex()}-{source.chunk_count or 1}":
        return 0, b""
    if "-" in source.etag:
        return 2, source.etag.encode()
    return 1, bytes.fromhex(source.etag)
