"""Pages of the versions of a bucket's keys, as in S3's ListObjectVersions.

Elements are versions: keys in byte order; of each key the present version first, then the former ones, newest first.
With the delimiter `/` all keys that have one behind the prefix become one element: the key up to that delimiter.

Two walks are merged: that of the names, as in `key_listing`, and that of the keys that have former versions.  A page
costs its own elements.  Exception: of long keys that agree in their first 470 bytes all are read, and sorted.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import Final, NamedTuple

from engine.format.layouts import NodeKind, Table
from engine.namespace.buckets import BucketRef
from engine.namespace.key_listing import walk_names
from engine.namespace.keys import lookup_path
from engine.namespace.names import resolve
from engine.namespace.object_stat import etag_of
from engine.namespace.tree import Resolved, load_node
from engine.namespace.version_keys import (
    KEY_BYTES_KEPT,
    behind,
    behind_below,
    cut_groups,
    end_of,
    first_key,
    group_of,
    group_of_key,
    path_of,
)
from engine.namespace.versions import (
    checked_version,
    find_old,
    is_version,
    node_of,
    old_versions,
    shown_version,
    unpack_version,
)
from engine.tables.views import View
from lakefs.errors import InvalidArgument
from lakefs.ids import NodeId
from lakefs.limits import LIST_PAGE_MAX
from lakefs.wire.messages import ListedVersions, ListVersions, VersionEntry

_SEPARATOR: Final = b"/"


class _Key(NamedTuple):
    """A key with its present node and the group of its former versions, or a rolled-up prefix (neither)."""

    path: bytes
    node: NodeId | None = None
    group: bytes = b""


def list_versions(view: View, bucket: BucketRef, request: ListVersions) -> ListedVersions:
    """Return one page.  Raises InvalidArgument for a delimiter but "" and "/", a bad version id, a limit under 1."""
    if request.delimiter not in ("", "/"):
        raise InvalidArgument(f"delimiter {request.delimiter!r} is not supported; use '/' or none")
    if request.limit < 1:
        raise InvalidArgument(f"a page of {request.limit} versions; ask for 1 to {LIST_PAGE_MAX}")
    limit = min(request.limit, LIST_PAGE_MAX)
    with closing(_elements(view, bucket, request, limit + 1)) as elements:
        page = list(islice(elements, limit + 1))
    if len(page) <= limit:
        return ListedVersions(page)
    page.pop()
    return ListedVersions(page, page[-1].key, page[-1].version)


def _elements(view: View, bucket: BucketRef, request: ListVersions, count: int) -> Generator[VersionEntry, None, None]:
    prefix, after = lookup_path(request.prefix), lookup_path(request.after)
    roll_up = request.delimiter == "/"
    if request.after_version:
        number = checked_version(request.after_version)
        if after.startswith(prefix) and not (roll_up and _rolled_up(after, prefix)):
            yield from _rest_of(view, bucket, request.after, number)
    names = _bound(view, bucket, prefix, after, roll_up)
    groups = _kept(view, bucket, prefix, after, roll_up, count) if bucket.versioning else iter(())
    for key in _merged(names, groups):
        if key.node is None and not key.group:
            yield VersionEntry(key.path.decode(), is_prefix=True)
        else:
            yield from _versions_of(view, bucket, key)


def _merged(names: Iterator[_Key], groups: Iterator[_Key]) -> Iterator[_Key]:
    """Merge both in order; a key in both is yielded once."""
    name, kept = next(names, None), next(groups, None)
    while name is not None or kept is not None:
        if kept is None or (name is not None and name.path < kept.path):
            assert name is not None
            yield name
            name = next(names, None)
        elif name is None or kept.path < name.path:
            yield kept
            kept = next(groups, None)
        else:
            yield _Key(name.path, name.node, kept.group)
            name, kept = next(names, None), next(groups, None)


def _versions_of(view: View, bucket: BucketRef, key: _Key) -> Iterator[VersionEntry]:
    text = key.path.decode()
    bound = None if key.node is None else Resolved(key.node, load_node(view, key.node))
    if bound is not None:
        yield _entry(text, bound, is_latest=True)
    if key.group:
        yield from _old_of(view, text, key.group, bound, 0)


def _old_of(view: View, key: str, group: bytes, bound: Resolved | None, below: int) -> Iterator[VersionEntry]:
    """Yield the versions of an order under `below` (0: all); a `null` beside a bound `null` is shown by its order."""
    beside_null = bound is not None and bound.node.attributes.version <= 0
    is_newest = bound is None and not below
    for old in old_versions(view, group, below):
        found = node_of(view, old, old.record.order if beside_null else 0)
        yield _entry(key, found, is_latest=is_newest and found.node.is_marker)
        is_newest = False


def _rest_of(view: View, bucket: BucketRef, key: str, number: int) -> Iterator[VersionEntry]:
    """Yield the versions of a key behind the given one.  The present version is first, so it is never among them."""
    if not bucket.versioning or key.endswith("/"):
        return
    group = group_of(bucket.node, lookup_path(key))
    bound = resolve(view, bucket, key)
    below = number
    if bound is not None and is_version(bound, number):
        below = 0
    elif not number and (null := find_old(view, bucket, key, 0)) is not None:
        below = null.record.order
    yield from _old_of(view, key, group, bound, below)


def _bound(view: View, bucket: BucketRef, prefix: bytes, after: bytes, roll_up: bool) -> Iterator[_Key]:
    """Yield the names behind `after`, rolled up."""
    for entry in walk_names(view, bucket.node, prefix, after, roll_up, folders=False):
        path = entry.key.encode()
        yield _Key(path) if entry.is_prefix else _Key(path, NodeId(entry.node))


def _kept(view: View, bucket: BucketRef, prefix: bytes, after: bytes, roll_up: bool, count: int) -> Iterator[_Key]:
    """Yield the keys behind `after` with former versions, rolled up; of keys cut alike at most `count` at a time."""
    start, skipped = after, b""
    if roll_up and (common := _rolled_up(after, prefix)):
        start = skipped = common
    while True:
        common = b""
        for key in _groups(view, bucket, prefix, start, skipped, count):
            common = _rolled_up(key.path, prefix) if roll_up else b""
            if common:
                break
            yield key
        if not common:
            return
        yield _Key(common)
        start = skipped = common


def _groups(view: View, bucket: BucketRef, prefix: bytes, after: bytes, skipped: bytes, count: int) -> Iterator[_Key]:
    """Yield keys with the prefix, behind `after` and not below `skipped`, in order."""

    def wanted(path: bytes) -> bool:
        return path > after and path.startswith(prefix) and not (skipped and path.startswith(skipped))

    first = max(first_key(bucket.node, prefix), first_key(bucket.node, after))
    if skipped and len(skipped) <= KEY_BYTES_KEPT:
        first = max(first, behind_below(bucket.node, skipped))
    end = behind(first_key(bucket.node, prefix)) if prefix else end_of(bucket.node)
    while (found := _first_group(view, first, end)) is not None:
        cut = cut_groups(found.group)
        if not cut:
            if wanted(found.path):
                yield found
            first = behind(found.group)
            continue
        alike = (key for key in _cut_alike(view, cut) if wanted(key.path))
        yield from heapq.nsmallest(count, alike)
        first = behind(cut)


def _cut_alike(view: View, cut: bytes) -> Iterator[_Key]:
    first, end = cut, behind(cut)
    while (found := _first_group(view, first, end)) is not None:
        yield found
        first = behind(found.group)


def _first_group(view: View, start: bytes, end: bytes) -> _Key | None:
    for key, value in view.scan(Table.VERSIONS, start, end):
        return _Key(path_of(key) or unpack_version(value).key, None, group_of_key(key))
    return None


def _rolled_up(path: bytes, prefix: bytes) -> bytes:
    """Return the key up to the first delimiter behind the prefix; empty if there is none."""
    if not path.startswith(prefix):
        return b""
    end = path.find(_SEPARATOR, len(prefix))
    return path[: end + 1] if end >= 0 else b""


def _entry(key: str, found: Resolved, *, is_latest: bool) -> VersionEntry:
    node = found.node
    version = shown_version(node) if node.kind is not NodeKind.FOLDER else "null"
    if node.is_marker:
        return VersionEntry(key, False, version, is_latest, True, mtime_ns=node.mtime_ns, node=found.node_id)
    return VersionEntry(
        key,
        version=version,
        is_latest=is_latest,
        size_bytes=node.size_bytes,
        etag=etag_of(node),
        mtime_ns=node.mtime_ns,
        kind=int(node.kind),
        node=found.node_id,
    )
