"""Entries: a name in the lake as fsspec describes it, a dictionary with `name`, `size` and `type`.

All have also `mtime` (seconds since 1970, None if unknown) and, for objects, `blob` (the id of the content in
hexadecimal), `etag`, `mode` and `content_type`.  Equal blobs have equal bytes.
"""

from __future__ import annotations

from typing import Any, Final

from lakefs.wire.messages import SPECIAL_KINDS, BucketStat, ListEntry, ObjectStat

Entry = dict[str, Any]
FOLDER_KIND: Final = 1
SYMLINK_KIND: Final = 3
_TYPES: Final = {FOLDER_KIND: "directory", SYMLINK_KIND: "link", **dict.fromkeys(SPECIAL_KINDS, "other")}
_NS: Final = 1e9


def entry_of(path: str, stat: ObjectStat | ListEntry) -> Entry:
    """Return the entry of an object, symlink or folder."""
    kind = _TYPES.get(stat.kind, "file")
    entry: Entry = {
        "name": path,
        "size": 0 if stat.kind == FOLDER_KIND else stat.size_bytes,
        "type": kind,
        "mtime": stat.mtime_ns / _NS,
        "created": stat.ctime_ns / _NS,
        "mode": stat.mode,
    }
    if kind == "file":
        entry |= {"blob": stat.blob.hex(), "etag": stat.etag, "content_type": stat.content_type}
    return entry


def folder_entry(path: str) -> Entry:
    """Return the entry of a folder of which only the name is known."""
    return {"name": path, "size": 0, "type": "directory", "mtime": None, "created": None}


def bucket_entry(bucket: BucketStat) -> Entry:
    """Return the entry of a bucket."""
    created = bucket.created_ns / _NS
    return {"name": bucket.name, "size": 0, "type": "directory", "mtime": created, "created": created}
