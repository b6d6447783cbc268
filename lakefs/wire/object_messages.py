"""What messages say of objects: attributes, conditions, changes and results; see `lakefs.wire.messages`."""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import Failure, Message


class ObjectAttributes(Message, frozen=True):
    """What a name carries beside its blob.  Times in ns since 1970; mode holds permission bits.

    A modification or change time of 0 is now.  An access time of None is the modification time, whatever that becomes.
    """

    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    content_type: str = ""
    user_metadata: dict[str, str] = {}
    headers: dict[str, str] = {}
    etag_kind: int = 0
    etag: bytes = b""
    checksums: dict[str, bytes] = {}
    xattrs: dict[str, bytes] = {}
    ctime_ns: int = 0
    atime_ns: int | None = None
    tags: dict[str, str] = {}


class Condition(Message, frozen=True):
    """What must hold for a change.  All given parts must hold; PreconditionFailed else.

    `absent`: the name must not exist.  `etags`: one of them must be the present one ("*": it exists); KeyNotFound where
    the name does not exist.  `not_etags`: none of them may be.  `node`: the present node's id, 0 = any.  `size_bytes`,
    `mtime_s`: those of what is present, None = any; the time in whole seconds, as HTTP shows it.  `not_etags`,
    `size_bytes` and `mtime_s` hold where the name does not exist.
    """

    absent: bool = False
    etags: list[str] = []
    not_etags: list[str] = []
    node: int = 0
    size_bytes: int | None = None
    mtime_s: int | None = None


NO_CONDITION: Final = Condition()


class NameChange(Message, frozen=True):
    """Bind a name to a blob.  `blob` is 33 bytes; `create_bucket` makes a missing bucket.

    `keep_node`: the name keeps the node that it has, which must be an object with this id (PreconditionFailed else),
    as when a file is written through the handle that made it; 0: a new node.  `named_ns`: when a new name came into its
    folder, whose times that becomes unless it was changed since; 0: now.
    """

    bucket: str
    key: str
    blob: bytes
    attributes: ObjectAttributes
    condition: Condition = NO_CONDITION
    create_bucket: bool = False
    keep_node: int = 0
    named_ns: int = 0


class ObjectStat(Message, frozen=True):
    """What is known of a name.  kind: 1 folder, 2 object, 3 symlink.  `blob` is empty for a bare folder and a symlink.

    `ctime_ns`: when content, attributes or name were last changed.  `atime_ns`: None when it is the
    modification time.  A symlink's size is that of its target.  `upload`: the multipart upload that it came from, 16
    bytes, else empty.  `version`: the version's id, "null" for one that was written while none were kept; empty in a
    bucket that never kept any.  `is_marker`: a delete marker, without content.
    """

    bucket: str
    key: str
    kind: int
    node: int
    size_bytes: int
    etag: str
    mtime_ns: int
    blob: bytes = b""
    content_type: str = ""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    user_metadata: dict[str, str] = {}
    headers: dict[str, str] = {}
    checksums: dict[str, bytes] = {}
    chunk_count: int = 0
    ctime_ns: int = 0
    xattrs: dict[str, bytes] = {}
    symlink_target: bytes = b""
    atime_ns: int | None = None
    tags: dict[str, str] = {}
    upload: bytes = b""
    version: str = ""
    is_marker: bool = False


class NameResult(Message, frozen=True):
    """One item of a batch: what the name is now (what it was, where it was removed), or why that could not be done.

    `marker` is the id of the delete marker that a removal left.
    """

    stat: ObjectStat | None = None
    failure: Failure | None = None
    marker: str = ""


class NameResults(Message, frozen=True):
    """One result for each item, in order; what succeeded is durable."""

    results: list[NameResult]
