"""Lists of objects, version 1 and 2: pages in byte order, each begins strictly behind the last name of the one before.

So a name that exists all the time is listed once, whatever is put and removed during the listing.  The continuation
token is that last name, in base64: no state here, and any gateway takes it.

A place to begin (`start-after`, `marker`) is one among the keys: a group with keys behind it is listed, also if it has
others before it.  A page that continues behind a group, whose name is then the token or the marker, passes over it.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.http.messages import Response
from gateway.s3.operations.buckets import iso_time
from gateway.s3.protocol.attributes import checksum_type
from gateway.s3.protocol.errors import invalid_argument
from gateway.s3.protocol.xml import OWNER, document, element, url_encoded
from gateway.s3.request.call import Call, whole_number, xml_response
from lakefs.wire.messages import Listed, ListEntry, ListNames

KEYS_MAX: Final = 1000
STORE_DELIMITERS: Final = ("", "/")
"""Delimiters that the store rolls up at itself."""


@dataclass(frozen=True)
class Page:
    """One answer's names.  `last` is the name behind which the next page begins, "" on the last page."""

    entries: list[ListEntry]
    last: str


async def list_objects(call: Call) -> Response:
    """Return a page of version 1: begins behind `marker`."""
    marker = call.parameter("marker")
    page, limit, shown = await _page(call, marker, passed=marker)
    fields = [element("Marker", shown(marker)), element("MaxKeys", limit)]
    if page.last:
        fields.append(element("NextMarker", shown(page.last)))
    return _answer(call, page, fields, shown, with_owner=True)


async def list_objects_v2(call: Call) -> Response:
    """Return a page of version 2: continues at `continuation-token`, else begins behind `start-after`."""
    if call.parameter("list-type") != "2":
        raise invalid_argument("Invalid List Type specified in Request", "list-type", call.parameter("list-type"))
    token, start_after = call.parameter("continuation-token"), call.parameter("start-after")
    last = _name_of(token) if token else ""
    page, limit, shown = await _page(call, last or start_after, passed=last)
    fields = [element("MaxKeys", limit), element("KeyCount", len(page.entries))]
    if token:
        fields.append(element("ContinuationToken", token))
    if start_after:
        fields.append(element("StartAfter", shown(start_after)))
    if page.last:
        fields.append(element("NextContinuationToken", _token_of(page.last)))
    return _answer(call, page, fields, shown, with_owner=call.parameter("fetch-owner") == "true")


async def _page(call: Call, after: str, passed: str) -> tuple[Page, int, Callable[[str], str]]:
    """Return the page behind `after`, without the group called `passed`, with its limit and the encoding of names."""
    limit, shown = max_keys(call), shown_names(call)
    delimiter = call.parameter("delimiter")
    if not limit:
        await _listed(call, after, "", 1)  # the bucket must exist
        page = Page([], "")
    elif delimiter in STORE_DELIMITERS:
        page = await _rolled_up_by_store(call, after, passed, delimiter, limit)
    else:
        page = await _rolled_up(call, after, passed, delimiter, limit)
    return page, limit, shown


async def _listed(call: Call, after: str, delimiter: str, limit: int, prefix: str | None = None) -> Listed:
    prefix = call.parameter("prefix") if prefix is None else prefix
    return await call.ask(ListNames(call.bucket, prefix, after, delimiter, limit), Listed)


async def _rolled_up_by_store(call: Call, after: str, passed: str, delimiter: str, limit: int) -> Page:
    """Return a page that the store has rolled up; it passes over the group that `after` is in."""
    begun: list[ListEntry] = []
    group = group_of(after, call.parameter("prefix"), delimiter)
    if group and group != passed and (await _listed(call, after, "", 1, prefix=group)).entries:
        begun = [ListEntry(group, is_prefix=True)]
    listed = await _listed(call, group or after, delimiter, max(1, limit - len(begun)))
    entries = begun + listed.entries
    is_last = not listed.next_after and len(entries) <= limit
    return Page(entries[:limit], "" if is_last else entries[:limit][-1].key)


def group_of(key: str, prefix: str, delimiter: str) -> str:
    """Return the group of a key: the key up to the first delimiter behind the prefix; "" if it is in none."""
    if not delimiter or not key.startswith(prefix):
        return ""
    end = key.find(delimiter, len(prefix))
    return key[: end + len(delimiter)] if end >= 0 else ""


async def _rolled_up(call: Call, after: str, passed: str, delimiter: str, limit: int) -> Page:
    """Like `_rolled_up_by_store`, for a delimiter that the store does not know: reads every name."""
    prefix = call.parameter("prefix")
    entries: list[ListEntry] = []
    at = after
    while True:
        listed = await _listed(call, at, "", KEYS_MAX)
        for entry in listed.entries:
            common = group_of(entry.key, prefix, delimiter)
            if common:
                if common == passed or (entries and entries[-1].key == common):
                    continue
                entry = ListEntry(common, is_prefix=True)
            if len(entries) == limit:
                return Page(entries, entries[-1].key)
            entries.append(entry)
        at = listed.next_after
        if not at:
            break
    return Page(entries, "")


def _answer(call: Call, page: Page, fields: list[str], shown: Callable[[str], str], *, with_owner: bool) -> Response:
    delimiter = call.parameter("delimiter")
    head = [element("Name", call.bucket), element("Prefix", shown(call.parameter("prefix"))), *fields]
    if delimiter:
        head.append(element("Delimiter", shown(delimiter)))
    if call.parameter("encoding-type"):
        head.append(element("EncodingType", "url"))
    head.append(element("IsTruncated", bool(page.last)))
    owner = OWNER if with_owner else ""
    names = [_entry(entry, shown, owner) for entry in page.entries]
    return xml_response(document("ListBucketResult", "".join(head + names)))


def _entry(entry: ListEntry, shown: Callable[[str], str], owner: str) -> str:
    key = shown(entry.key)
    if entry.is_prefix:
        return f"<CommonPrefixes>{element('Prefix', key)}</CommonPrefixes>"
    return (
        f"<Contents>{element('Key', key)}<LastModified>{iso_time(entry.last_modified_ns)}</LastModified>"
        f"<ETag>&quot;{entry.etag}&quot;</ETag>{checksum_kinds(entry.checksum_names)}<Size>{entry.size_bytes}</Size>"
        f"{owner}<StorageClass>STANDARD</StorageClass></Contents>"
    )


def checksum_kinds(names: Sequence[str]) -> str:
    """Return ChecksumAlgorithm and ChecksumType of the checksums that are kept with an object; "" for none."""
    if not names:
        return ""
    algorithms = "".join(element("ChecksumAlgorithm", name.partition("/")[0]) for name in names)
    return algorithms + element("ChecksumType", checksum_type(names))


def shown_names(call: Call) -> Callable[[str], str]:
    """Return the encoding of names in the answer, by `encoding-type`.  S3Error."""
    encoding = call.parameter("encoding-type")
    if encoding not in ("", "url"):
        raise invalid_argument("Invalid Encoding Method specified in Request", "encoding-type", encoding)
    return url_encoded if encoding else str


def max_keys(call: Call) -> int:
    """Return the most names of a page, by `max-keys`.  S3Error."""
    return min(whole_number("max-keys", call.parameter("max-keys"), KEYS_MAX, 9_999_999_999), KEYS_MAX)


def _token_of(name: str) -> str:
    return urlsafe_b64encode(name.encode()).decode()


def _name_of(token: str) -> str:
    try:
        return urlsafe_b64decode(token.encode()).decode()
    except (binascii.Error, ValueError):
        raise invalid_argument("The continuation token provided is incorrect", "continuation-token", token) from None
