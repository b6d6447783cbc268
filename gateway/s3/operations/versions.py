"""Versions of objects: a bucket's versioning, the ids of versions in requests and answers, and lists of versions.

A list has the newest version of a key first.  A page begins behind the last entry of the one before; no state
is kept here.  A delimiter other than `/` is rolled up here, from a list of every version.  A `key-marker` inside a
group lists the group, if it has versions behind that; one that is the name of a group passes over it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.http.messages import Response
from gateway.http.ranges import format_http_date
from gateway.s3.door.teaching import Seen
from gateway.s3.operations.buckets import iso_time
from gateway.s3.operations.list_objects import (
    KEYS_MAX,
    STORE_DELIMITERS,
    checksum_kinds,
    group_of,
    max_keys,
    shown_names,
)
from gateway.s3.protocol.bodies import read_versioning
from gateway.s3.protocol.errors import S3Error, invalid_argument
from gateway.s3.protocol.xml import OWNER, document, element
from gateway.s3.request.call import Call, stat_of, xml_response
from gateway.s3.request.payload import read_proven_xml
from lakefs.wire.messages import (
    BucketList,
    Buckets,
    BucketSet,
    ListedVersions,
    ListVersions,
    NameResults,
    ObjectStat,
    StatNames,
    VersionEntry,
)

PARAMETER: Final = "versionId"
VERSION_HEADER: Final = b"x-amz-version-id"
MARKER_HEADER: Final = (b"x-amz-delete-marker", b"true")
_ID: Final = re.compile(r"null|[0-9a-f]{16}")


# --- ids -------------------------------------------------------------------------------------------------


def asked_version(call: Call) -> str:
    """Return the version that a request names, "" for the one that the key is bound to.  S3Error if it is no id."""
    if PARAMETER not in call.target.parameters:
        return ""
    return checked_version(call.parameter(PARAMETER))


def checked_version(version: str) -> str:
    """Check a version's id as clients send it, and return it.  S3Error."""
    if not version:
        raise invalid_argument("Version id cannot be the empty string", PARAMETER, version)
    if not _ID.fullmatch(version):
        raise invalid_argument("Invalid version id specified", PARAMETER, version[:64])
    return version


def version_headers(stat: ObjectStat, name: bytes = VERSION_HEADER) -> list[tuple[bytes, bytes]]:
    """Return the header with the id of a version; none in a bucket that never kept versions."""
    return [(name, stat.version.encode())] if stat.version else []


def refuse_marker(stat: ObjectStat) -> None:
    """Raise S3Error MethodNotAllowed for a delete marker that was named by its id."""
    if stat.is_marker:
        raise S3Error(
            405,
            "MethodNotAllowed",
            "The specified method is not allowed against this resource.",
            headers={
                "Allow": "DELETE",
                "x-amz-delete-marker": "true",
                "x-amz-version-id": stat.version,
                "Last-Modified": format_http_date(stat.last_modified_ns // 1_000_000_000),
            },
        )


async def asked_stat(call: Call) -> ObjectStat:
    """Return the stat of the version that a request names.  S3Error also for a delete marker."""
    return (await asked_stat_seen(call))[0]


async def asked_stat_seen(call: Call) -> tuple[ObjectStat, Seen]:
    """Return the stat of the version that a request names, and what it was read from.  S3Error as `asked_stat`."""
    request = StatNames([(call.bucket, call.key)], versions=[asked_version(call)], stamps=call.lakes.wants_stamps())
    epoch = call.lakes.engine.epoch
    result = (await call.ask(request, NameResults)).results[0]
    stat = stat_of(result, call.key)
    refuse_marker(stat)
    return stat, Seen(result.stamps, epoch)


# --- the setting -----------------------------------------------------------------------------------------


async def get_bucket_versioning(call: Call) -> Response:
    """Return Enabled, Suspended, or nothing for a bucket that never kept versions."""
    (bucket,) = (await call.ask(BucketList(call.bucket), Buckets)).buckets
    status = element("Status", bucket.versioning.capitalize()) if bucket.versioning else ""
    return xml_response(document("VersioningConfiguration", status))


async def put_bucket_versioning(call: Call) -> Response:
    """Set the versioning of a bucket.  Durable on return.  MFA delete is not offered."""
    status = await read_proven_xml(call, read_versioning)
    if not status:
        raise S3Error(400, "IllegalVersioningConfigurationException", "The Versioning element must be specified")
    await call.ask(BucketSet(call.bucket, versioning=status.lower()), Buckets)
    return Response(200)


# --- the list --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ListParameters:
    """Parameters of one list request."""

    prefix: str
    key_marker: str
    version_marker: str
    delimiter: str
    limit: int
    shown: Callable[[str], str]


async def list_object_versions(call: Call) -> Response:
    """Return a page of versions and delete markers, newest first for each key."""
    asked = _list_parameters(call)
    if not asked.limit:
        await _listed(call, asked, "", "", "", 1)  # the bucket must exist
        page = ListedVersions([])
    elif asked.delimiter in STORE_DELIMITERS:
        page = await _rolled_up_by_store(call, asked)
    else:
        page = await _rolled_up(call, asked)
    fields = [
        element("Name", call.bucket),
        element("Prefix", asked.shown(asked.prefix)),
        element("KeyMarker", asked.shown(asked.key_marker)),
        element("VersionIdMarker", asked.version_marker),
    ]
    if page.next_after:
        fields.append(element("NextKeyMarker", asked.shown(page.next_after)))
    if page.next_version:
        fields.append(element("NextVersionIdMarker", page.next_version))
    fields.append(element("MaxKeys", asked.limit))
    if asked.delimiter:
        fields.append(element("Delimiter", asked.shown(asked.delimiter)))
    if call.parameter("encoding-type"):
        fields.append(element("EncodingType", "url"))
    fields.append(element("IsTruncated", bool(page.next_after)))
    fields += [_entry(entry, asked.shown) for entry in page.entries]
    return xml_response(document("ListVersionsResult", "".join(fields)))


def _list_parameters(call: Call) -> _ListParameters:
    shown = shown_names(call)
    key_marker, version_marker = call.parameter("key-marker"), call.parameter("version-id-marker")
    if version_marker and not key_marker:
        raise invalid_argument(
            "A version-id marker cannot be specified without a key marker.", "version-id-marker", version_marker[:64]
        )
    if version_marker and not _ID.fullmatch(version_marker):
        raise invalid_argument("Invalid version id specified", "version-id-marker", version_marker[:64])
    return _ListParameters(
        call.parameter("prefix"), key_marker, version_marker, call.parameter("delimiter"), max_keys(call), shown
    )


async def _listed(
    call: Call, asked: _ListParameters, after: str, after_version: str, delimiter: str, limit: int, prefix: str = ""
) -> ListedVersions:
    request = ListVersions(call.bucket, prefix or asked.prefix, after, after_version, delimiter, limit)
    return await call.ask(request, ListedVersions)


async def _rolled_up_by_store(call: Call, asked: _ListParameters) -> ListedVersions:
    """Return a page that the store has rolled up; it passes over the group that the marker is in."""
    after, after_version, delimiter = asked.key_marker, asked.version_marker, asked.delimiter
    group = group_of(after, asked.prefix, delimiter)
    if not group:
        return await _listed(call, asked, after, after_version, delimiter, asked.limit)
    begun: list[VersionEntry] = []
    if group != after and (await _listed(call, asked, after, after_version, "", 1, prefix=group)).entries:
        begun = [VersionEntry(group, is_prefix=True)]
    listed = await _listed(call, asked, group, "", delimiter, max(1, asked.limit - len(begun)))
    entries = begun + listed.entries
    if not listed.next_after and len(entries) <= asked.limit:
        return ListedVersions(entries)
    last = entries[: asked.limit][-1]
    return ListedVersions(entries[: asked.limit], last.key, last.version)


async def _rolled_up(call: Call, asked: _ListParameters) -> ListedVersions:
    """Like `_listed`, for a delimiter that the store does not know: reads every version."""
    entries: list[VersionEntry] = []
    after, after_version = asked.key_marker, asked.version_marker
    while True:
        page = await _listed(call, asked, after, after_version, "", KEYS_MAX)
        for entry in page.entries:
            common = group_of(entry.key, asked.prefix, asked.delimiter)
            if common:
                if common == asked.key_marker or (entries and entries[-1].key == common):
                    continue
                entry = VersionEntry(common, is_prefix=True)
            if len(entries) == asked.limit:
                return ListedVersions(entries, entries[-1].key, entries[-1].version)
            entries.append(entry)
        after, after_version = page.next_after, page.next_version
        if not after:
            break
    return ListedVersions(entries)


def _entry(entry: VersionEntry, shown: Callable[[str], str]) -> str:
    key = shown(entry.key)
    if entry.is_prefix:
        return f"<CommonPrefixes>{element('Prefix', key)}</CommonPrefixes>"
    fields = (
        f"{element('Key', key)}{element('VersionId', entry.version)}{element('IsLatest', entry.is_latest)}"
        f"<LastModified>{iso_time(entry.last_modified_ns)}</LastModified>"
    )
    if entry.is_marker:
        return f"<DeleteMarker>{fields}{OWNER}</DeleteMarker>"
    return (
        f"<Version>{fields}<ETag>&quot;{entry.etag}&quot;</ETag>{checksum_kinds(entry.checksum_names)}"
        f"<Size>{entry.size_bytes}</Size>{OWNER}"
        "<StorageClass>STANDARD</StorageClass></Version>"
    )
