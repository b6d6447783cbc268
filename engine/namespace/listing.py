"""Pages of a bucket's keys in byte order, as in S3's ListObjectsV2, and of their versions, as in ListObjectVersions.

Rules kept here for keys:
- The elements of a listing are the keys with the prefix.  With the delimiter `/`, all keys that have one behind the
  prefix become one element: the key up to that delimiter.  Only elements greater than `after` are listed, so a
  rolled-up prefix is skipped as a whole when `after` equals it or lies inside it.
- A page costs its own elements, their folders and the depth of the tree, whatever else the bucket holds: the walk
  starts in the middle, and a rolled-up folder is one record (a folder is never empty, see `tree`).
- A page is one view.  The next page, on a later view, continues behind the last element of this one, so a name that
  exists throughout is listed exactly once whatever else changes.  Delimiters other than `/` are refused.

Rules kept here for versions:
- Elements are versions: keys in byte order; of each key the present version first, then the former ones, newest first.
  With the delimiter they are rolled up as keys are.
- Two walks are merged: that of the names, and that of the keys that have former versions.  A page costs its own
  elements.  Exception: of long keys that agree in their first 470 bytes all are read, and sorted.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import Final, NamedTuple

from engine.format.layouts import NodeKind, Table, node_key, unpack_name
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import behind, is_folder_step, lookup_path, name_key, range_end, split_path
from engine.namespace.names import resolve
from engine.namespace.object_stat import etag_of, to_list_entry
from engine.namespace.tree import Resolved, child, load_node
from engine.namespace.version_keys import (
    KEY_BYTES_KEPT,
    behind_below,
    behind_groups,
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
from lakefs.wire.messages import ListedVersions, ListEntry, ListVersions, VersionEntry

_PARENT_BYTES: Final = 8
_DELIMITER: Final = b"/"

_Level = tuple[bytes, Iterator[tuple[bytes, bytes]]]
"""Path of a node, and the scan of its remaining names."""


# --- keys ----------------------------------------------------------------------------------------------


def list_names(
    view: View,
    bucket: BucketRef,
    prefix: str = "",
    after: str = "",
    delimiter: str = "",
    limit: int = LIST_PAGE_MAX,
    folders: bool = False,
) -> tuple[list[ListEntry], str]:
    """Return at most `limit` elements (never over 1,000) behind `after`, and where to continue: "" at the end.

    With `folders`, implicit folders (no blob of their own) are listed as keys too.  Raises InvalidArgument for a
    delimiter other than "" and "/", and for a negative limit.
    """
    if delimiter not in ("", "/"):
        raise InvalidArgument(f"delimiter {delimiter!r} is not supported; use '/' or none")
    if limit < 0:
        raise InvalidArgument(f"a page of {limit} names was asked for; ask for 0 to {LIST_PAGE_MAX}")
    limit = min(limit, LIST_PAGE_MAX)
    if limit == 0:
        return [], ""
    walk = walk_names(view, bucket.node, lookup_path(prefix), lookup_path(after), delimiter == "/", folders)
    with closing(walk) as elements:
        page = list(islice(elements, limit + 1))
    if len(page) <= limit:
        return page, ""
    page.pop()
    assert page[-1].key > after, "each page ends behind the one before it"
    return page, page[-1].key


def walk_names(
    view: View, top: NodeId, prefix: bytes, after: bytes, roll_up: bool, folders: bool
) -> Generator[ListEntry, None, None]:
    """Yield all elements of a listing behind `after`, in order; see `list_names`."""
    if after > prefix and not after.startswith(prefix):
        return
    steps, rest = split_path(prefix)
    base = top
    for step in steps:
        found = child(view, base, step)
        if found is None:
            return
        base = found
    path = prefix[: len(prefix) - len(rest)]

    if path.endswith(b"/") and not rest and after < prefix:
        node = load_node(view, base)
        if folders or node.blob is not None:
            yield to_list_entry(path.decode(), base, node)

    if after.startswith(prefix):
        levels = _levels_behind(view, base, path, rest, after, roll_up)
    else:
        levels = [(path, view.scan(Table.NAMES, name_key(base, rest), range_end(base, rest)))]
    yield from _walk_levels(view, levels, roll_up, folders)


def _levels_behind(view: View, base: NodeId, path: bytes, rest: bytes, after: bytes, roll_up: bool) -> list[_Level]:
    """Scans of the nodes on the way to `after`, outermost first, each starting behind it.

    The way ends at a step that does not exist: whatever follows it in its parent follows `after` too.
    """
    levels: list[_Level] = []
    node, end = base, range_end(base, rest)
    steps, last = split_path(after[len(path) :])
    for step in steps:
        levels.append((path, view.scan(Table.NAMES, behind(name_key(node, step)), end)))
        found = None if roll_up and is_folder_step(step) else child(view, node, step)
        if found is None:
            return levels
        path += step
        node, end = found, range_end(found, b"")
    levels.append((path, view.scan(Table.NAMES, behind(name_key(node, last)), end)))
    return levels


def _walk_levels(view: View, levels: list[_Level], roll_up: bool, folders: bool) -> Iterator[ListEntry]:
    """Yield elements below the levels, depth first.  The stack is explicit: keys may be deeper than Python's own."""
    while levels:
        path, names = levels[-1]
        found = next(names, None)
        if found is None:
            levels.pop()
            continue
        key, value = found
        kind, node_id = unpack_name(value)
        key = path + key[_PARENT_BYTES:]
        if kind is NodeKind.FOLDER and roll_up:
            yield ListEntry(key=key.decode(), is_prefix=True)
            continue
        if kind is not NodeKind.HIDDEN:
            node = load_node(view, node_id)
            if kind is not NodeKind.FOLDER or folders or node.blob is not None:
                yield to_list_entry(key.decode(), node_id, node)
        if kind is NodeKind.FOLDER or kind is NodeKind.HIDDEN:
            levels.append((key, view.scan(Table.NAMES, node_key(node_id), range_end(node_id, b""))))


# --- versions ------------------------------------------------------------------------------------------


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
        yield _version_entry(text, bound, is_latest=True)
    if key.group:
        yield from _old_of(view, text, key.group, bound, 0)


def _old_of(view: View, key: str, group: bytes, bound: Resolved | None, below: int) -> Iterator[VersionEntry]:
    """Yield the versions of an order under `below` (0: all); a `null` beside a bound `null` is shown by its order."""
    beside_null = bound is not None and bound.node.attributes.version <= 0
    is_newest = bound is None and not below
    for old in old_versions(view, group, below):
        found = node_of(view, old, old.record.order if beside_null else 0)
        yield _version_entry(key, found, is_latest=is_newest and found.node.is_marker)
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
    end = behind_groups(first_key(bucket.node, prefix)) if prefix else end_of(bucket.node)
    while (found := _first_group(view, first, end)) is not None:
        cut = cut_groups(found.group)
        if not cut:
            if wanted(found.path):
                yield found
            first = behind_groups(found.group)
            continue
        alike = (key for key in _cut_alike(view, cut) if wanted(key.path))
        yield from heapq.nsmallest(count, alike)
        first = behind_groups(cut)


def _cut_alike(view: View, cut: bytes) -> Iterator[_Key]:
    first, end = cut, behind_groups(cut)
    while (found := _first_group(view, first, end)) is not None:
        yield found
        first = behind_groups(found.group)


def _first_group(view: View, start: bytes, end: bytes) -> _Key | None:
    for key, value in view.scan(Table.VERSIONS, start, end):
        return _Key(path_of(key) or unpack_version(value).key, None, group_of_key(key))
    return None


def _rolled_up(path: bytes, prefix: bytes) -> bytes:
    """Return the key up to the first delimiter behind the prefix; empty if there is none."""
    if not path.startswith(prefix):
        return b""
    end = path.find(_DELIMITER, len(prefix))
    return path[: end + 1] if end >= 0 else b""


def _version_entry(key: str, found: Resolved, *, is_latest: bool) -> VersionEntry:
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
        checksum_names=list(node.attributes.checksums),
        bound_ns=node.attributes.bound_ns or 0,
    )
