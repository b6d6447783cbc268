"""Messages about the versions of a bucket's keys; see `lakefs.wire.messages`."""

from __future__ import annotations

from lakefs.wire.base import Message, Request


class VersionEntry(Message, frozen=True):
    """One version of a page; `is_prefix` entries are rolled up at the delimiter and have no other field set.

    `version` is its id, "null" for one written while no versions were kept.  `is_latest`: the key is bound to this
    version, or it is the newest delete marker.  `is_marker`: a delete marker; it has a time, and nothing else.
    """

    key: str
    is_prefix: bool = False
    version: str = ""
    is_latest: bool = False
    is_marker: bool = False
    size_bytes: int = 0
    etag: str = ""
    mtime_ns: int = 0
    kind: int = 2
    node: int = 0


class ListedVersions(Message, frozen=True):
    """A page: keys in byte order, the newest version of a key first.  `next_after` is empty on the last page."""

    entries: list[VersionEntry]
    next_after: str = ""
    next_version: str = ""


class ListVersions(Request, frozen=True):
    """List versions of keys with the prefix, rolled up at `delimiter` ("" or "/"), at most `limit`.

    The page begins after the version `after_version` of the key `after`; without `after_version`, after all versions of
    that key, which may be a rolled-up prefix: everything below it is skipped.  In a bucket that never kept versions
    each name is one version, "null".  If `after_version` is a `null` that was removed since it was listed, the page
    begins with all versions of that key except the one it is bound to.
    """

    OP = 35
    REPLY = ListedVersions
    bucket: str
    prefix: str = ""
    after: str = ""
    after_version: str = ""
    delimiter: str = ""
    limit: int = 1000
