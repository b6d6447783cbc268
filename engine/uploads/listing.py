"""Pages of a bucket's unfinished uploads, in byte order of (key, upload id), as in S3's ListMultipartUploads.

Elements are uploads to keys with the prefix; with a delimiter all whose keys have it behind the prefix become
one element, the key up to it.  A page costs its own elements.  Exception: uploads to long keys that agree in their
first 480 bytes are all read and sorted; at most a page of them is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from engine.format.layouts import Table
from engine.format.records import UploadRecord
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import lookup_path
from engine.tables.views import View
from engine.uploads.keys import (
    BEHIND_WHOLE,
    KEY_BYTES_KEPT,
    UPLOAD_ID_BYTES,
    bucket_prefix,
    is_cut,
    key_prefix,
    upload_of,
)
from engine.uploads.lifecycle import unpack_upload
from lakefs.errors import InvalidArgument
from lakefs.limits import LIST_PAGE_MAX
from lakefs.wire.messages import UploadEntry, UploadList, Uploads


class _Found(NamedTuple):
    """An upload; compares by key, then by id."""

    path: bytes
    upload: bytes
    record: UploadRecord


class _Start(NamedTuple):
    """A page's start: behind an upload, behind all of a key (no id), or (`below`) behind all that begin with it."""

    path: bytes
    upload: bytes = b""
    below: bool = False

    def passed(self, path: bytes, upload: bytes) -> bool:
        """Return True if an upload is behind this place."""
        if self.below:
            return path > self.path and not path.startswith(self.path)
        return (path, upload) > (self.path, self.upload) if self.upload else path > self.path

    def first_key(self, bucket: BucketRef) -> bytes:
        """Return a key of the table that nothing behind this place is before."""
        kept = bucket_prefix(bucket.node) + self.path[:KEY_BYTES_KEPT]
        if len(self.path) > KEY_BYTES_KEPT:
            return key_prefix(bucket.node, self.path)
        if not self.path:
            return kept
        if self.below:
            return _behind_all(kept)
        return key_prefix(bucket.node, self.path) + self.upload if self.upload else kept + BEHIND_WHOLE


def list_uploads(view: View, bucket: BucketRef, request: UploadList) -> Uploads:
    """Return one page.  Raises InvalidArgument for a bad id, and for a limit under 1."""
    if request.limit < 1:
        raise InvalidArgument(f"a page of {request.limit} uploads; ask for 1 to {LIST_PAGE_MAX}")
    if len(request.after_upload) not in (0, UPLOAD_ID_BYTES):
        raise InvalidArgument(f"an upload's id has {UPLOAD_ID_BYTES} bytes, not {len(request.after_upload)}")
    limit = min(request.limit, LIST_PAGE_MAX)
    page = list(islice(_elements(view, bucket, request, limit + 1), limit + 1))
    if len(page) <= limit:
        return Uploads(page)
    page.pop()
    return Uploads(page, page[-1].key, page[-1].upload)


def _elements(view: View, bucket: BucketRef, request: UploadList, count: int) -> Iterator[UploadEntry]:
    """Yield the elements of a page, at most about `count` of them."""
    prefix, after = lookup_path(request.prefix), lookup_path(request.after)
    delimiter = lookup_path(request.delimiter)
    below = after != b"" and not request.after_upload and _rolled_up(after, prefix, delimiter) == after
    start = _Start(after, request.after_upload, below)
    while True:
        common = b""
        for found in _uploads_behind(view, bucket, prefix, start, count):
            common = _rolled_up(found.path, prefix, delimiter)
            if common:
                break
            record = found.record
            yield UploadEntry(record.key, False, found.upload, record.created_ns, record.details)
        if not common:
            return
        yield UploadEntry(common.decode(), is_prefix=True)
        start = _Start(common, below=True)


def _rolled_up(path: bytes, prefix: bytes, delimiter: bytes) -> bytes:
    """Return the key up to the end of the first delimiter behind the prefix; empty if there is none."""
    if not delimiter or not path.startswith(prefix):
        return b""
    begin = path.find(delimiter, len(prefix))
    return path[: begin + len(delimiter)] if begin >= 0 else b""


def _uploads_behind(view: View, bucket: BucketRef, prefix: bytes, start: _Start, count: int) -> Iterator[_Found]:
    """Yield uploads with the prefix behind `start`, in order; of each group of cut keys at most `count`."""
    kept = prefix[:KEY_BYTES_KEPT]
    first = max(bucket_prefix(bucket.node) + kept, start.first_key(bucket))
    end = bucket_prefix(bucket.node) + _behind_all(kept) if kept else _behind_all(bucket_prefix(bucket.node))
    scan = view.scan(Table.UPLOADS, first, end)
    entry = next(scan, None)
    while entry is not None:
        key, value = entry
        if not is_cut(key):
            found = _found(key, value)
            if start.passed(found.path, found.upload) and found.path.startswith(prefix):
                yield found
            entry = next(scan, None)
            continue
        group = key[:-UPLOAD_ID_BYTES]
        cut = (_found(*one) for one in view.scan(Table.UPLOADS, group, _behind_all(group)))
        wanted = (f for f in cut if start.passed(f.path, f.upload) and f.path.startswith(prefix))
        yield from heapq.nsmallest(count, wanted, key=lambda found: found[:2])
        scan = view.scan(Table.UPLOADS, _behind_all(group), end)
        entry = next(scan, None)


def _found(key: bytes, value: bytes) -> _Found:
    record = unpack_upload(value)
    return _Found(record.key.encode(), upload_of(key), record)


def _behind_all(prefix: bytes) -> bytes:
    """Return the least key behind all that begin with the prefix."""
    stripped = prefix.rstrip(b"\xff")
    assert stripped, "neither a prefix of the table nor UTF-8 text is all 255"
    return stripped[:-1] + bytes([stripped[-1] + 1])
