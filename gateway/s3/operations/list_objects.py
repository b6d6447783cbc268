"""Lists of objects, version 1 and 2: pages in byte order, each begins strictly behind the last name of the one before.

So a name that exists all the time is listed once, whatever is put and removed during the listing.  The continuation
token is that last name, in base64: no state here, and any gateway takes it.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.http.messages import Response
from gateway.s3.operations.buckets import iso_time
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
    page, limit, shown = await _page(call, marker)
    fields = [element("Marker", shown(marker)), element("MaxKeys", limit)]
    if page.last:
        fields.append(element("NextMarker", shown(page.last)))
    return _answer(call, page, fields, shown, with_owner=True)


async def list_objects_v2(call: Call) -> Response:
    """Return a page of version 2: continues at `continuation-token`, else begins behind `start-after`."""
    if call.parameter("list-type") != "2":
        raise invalid_argument("Invalid List Type specified in Request", "list-type", call.parameter("list-type"))
    token, start_after = call.parameter("continuation-token"), call.parameter("start-after")
    page, limit, shown = await _page(call, _name_of(token) if token else start_after)
    fields = [element("MaxKeys", limit), element("KeyCount", len(page.entries))]
    if token:
        fields.append(element("ContinuationToken", token))
    if start_after:
        fields.append(element("StartAfter", shown(start_after)))
    if page.last:
        fields.append(element("NextContinuationToken", _token_of(page.last)))
    return _answer(call, page, fields, shown, with_owner=call.parameter("fetch-owner") == "true")


async def _page(call: Call, after: str) -> tuple[Page, int, Callable[[str], str]]:
    limit, shown = max_keys(call), shown_names(call)
    delimiter = call.parameter("delimiter")
    if delimiter in STORE_DELIMITERS:
        listed = await _listed(call, after, delimiter, max(limit, 1))
        page = Page(listed.entries, listed.next_after) if limit else Page([], "")
    else:
        page = await _rolled_up(call, after, delimiter, limit)
    return page, limit, shown


async def _listed(call: Call, after: str, delimiter: str, limit: int) -> Listed:
    request = ListNames(call.bucket, call.parameter("prefix"), after, delimiter, limit)
    return await call.ask(request, Listed)


async def _rolled_up(call: Call, after: str, delimiter: str, limit: int) -> Page:
    """Like `_listed`, for a delimiter that the store does not know: reads every name."""
    begin = len(call.parameter("prefix"))
    entries: list[ListEntry] = []
    at = after
    while limit:
        listed = await _listed(call, at, "", KEYS_MAX)
        for entry in listed.entries:
            end = entry.key.find(delimiter, begin)
            if end >= 0:
                common = entry.key[: end + len(delimiter)]
                if common.encode() <= after.encode() or (entries and entries[-1].key == common):
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
        f"<Contents>{element('Key', key)}<LastModified>{iso_time(entry.mtime_ns)}</LastModified>"
        f"<ETag>&quot;{entry.etag}&quot;</ETag><Size>{entry.size_bytes}</Size>{owner}"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


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
