"""LIST: pages of a bucket's keys in byte order, as S3's ListObjectsV2 defines them.

The elements of a listing are the keys with the prefix.  With the delimiter `/`, all keys that have one behind the
prefix become one element: the key up to that delimiter.  Only elements greater than `after` are listed, so a rolled-up
prefix is skipped as a whole when `after` equals it or lies inside it.

A page costs its own elements, their folders and the depth of the tree, whatever else the bucket holds: the walk starts
in the middle, and a rolled-up folder is one record (a folder is never empty, see `tree`).

A page is one view.  The next page, on a later view, continues behind the last element of this one, so a name that
exists throughout is listed exactly once whatever else changes.  Delimiters other than `/` are refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import Final

from engine.format.layouts import NodeKind, Table, node_key, unpack_name
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import behind, is_folder_step, lookup_path, name_key, range_end, split_path
from engine.namespace.object_stat import to_list_entry
from engine.namespace.tree import child, load_node
from engine.tables.views import View
from lakefs.errors import InvalidArgument
from lakefs.ids import NodeId
from lakefs.limits import LIST_PAGE_MAX
from lakefs.wire.messages import ListEntry

_PARENT_BYTES: Final = 8

_Level = tuple[bytes, Iterator[tuple[bytes, bytes]]]
"""Path of a node, and the scan of its remaining names."""


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
    yield from _walk(view, levels, roll_up, folders)


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


def _walk(view: View, levels: list[_Level], roll_up: bool, folders: bool) -> Iterator[ListEntry]:
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
