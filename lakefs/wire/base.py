"""Base classes of all messages of the native protocol, and parts that several messages share.

Shared are the two answers that any request may get, and what describes objects: attributes, conditions, changes,
results.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from lakefs.errors import LakeError, from_wire


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


class Request(Message, frozen=True):
    """A message from a client that asks for something.  `OP` is its number in the frame header, `REPLY` its answer."""

    OP: ClassVar[int] = 0
    REPLY: ClassVar[type[Message]]


class Done(Message, frozen=True):
    """The request was done; there is nothing to return."""


class Failure(Message, frozen=True):
    """The request, or one item of a batch, failed with the error of `lakefs.errors` that has this wire code."""

    wire_code: int
    message: str
    subject: str = ""

    def as_error(self) -> LakeError:
        """Return the error to raise; an unknown code becomes an `InternalError` that says so."""
        return from_wire(self.wire_code, self.message, self.subject)


# --- objects -----------------------------------------------------------------------------------------


class ObjectAttributes(Message, frozen=True):
    """Attributes of a name, beside its blob.  Times are in ns since 1970; `mode` holds permission bits.

    A modification or change time of 0 means now.  An access time of None follows the modification time.
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
    """Condition of a change.  All given parts must hold, else PreconditionFailed.

    `absent`: the name must not exist.  `etags`: one of them must be the current one ("*": the name exists); KeyNotFound
    if the name does not exist.  `not_etags`: none of them may be the current one.  `node`: the current node's id, 0 =
    any.  `size_bytes`, `mtime_s`: the current size and the time of its binding, None = any; the time in whole
    seconds, as S3's Last-Modified shows it.  `not_etags`, `size_bytes` and `mtime_s` hold if the name does not exist.

    An engine without FEATURE_PLACES ignores the following.  `folder`: the node of the folder that the name is in, 0 =
    any.  `alone`: no name of the other kind has this path, a folder `a/` for `a`, an object or symlink `a` for `a/`.
    `blob`: the current content, b"" = any; fails if the name does not exist.  `gone`: a node that must have no name any
    more, because it was overwritten or removed; it may be a former version of this name; 0 = none.
    """

    absent: bool = False
    etags: list[str] = []
    not_etags: list[str] = []
    node: int = 0
    size_bytes: int | None = None
    mtime_s: int | None = None
    folder: int = 0
    alone: bool = False
    blob: bytes = b""
    gone: int = 0


NO_CONDITION: Final = Condition()


class NameChange(Message, frozen=True):
    """Bind a name to a blob.  `blob` is 33 bytes; `create_bucket` makes a missing bucket.

    `keep_node`: the name keeps its node, which must be an object with this id (else PreconditionFailed), as when a file
    is written through the handle that made it; 0: a new node.  `named_ns`: the time at which a new name appeared in its
    folder; the folder gets it as its times unless the folder was changed since; 0: now.  `keep_attributes`, with
    `keep_node`: mode, owner, metadata, extended attributes and tags stay the node's (FEATURE_PLACES).
    """

    bucket: str
    key: str
    blob: bytes
    attributes: ObjectAttributes
    condition: Condition = NO_CONDITION
    create_bucket: bool = False
    keep_node: int = 0
    named_ns: int = 0
    keep_attributes: bool = False


class ObjectStat(Message, frozen=True):
    """Stat of a name.  kind: 1 folder, 2 object, 3 symlink.  `blob` is empty for a bare folder and a symlink.

    `ctime_ns`: the last change of content, attributes or name.  `atime_ns`: None when it is the modification time.
    A symlink's size is the length of its target.  `upload`: id of the multipart upload that made the object, 16 bytes,
    else empty.  `version`: the version's id, "null" for one written while no versions were kept; empty in a bucket
    that never kept any.  `is_marker`: a delete marker, without content.  `bound_ns`: when the name was bound to its
    content, if a client has given another modification time; else 0.
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
    bound_ns: int = 0

    @property
    def last_modified_ns(self) -> int:
        """The time at which the name was bound to its content: S3's Last-Modified."""
        return self.bound_ns or self.mtime_ns


class FolderChange(Message, frozen=True):
    """The folder of a changed name before and after the change, as change_info4 of NFS (RFC 8881): atomic with it.

    `node`: the folder.  `before_ns`, `after_ns`: its change time before and after; 0: it did not exist.  Each change of
    a name in a folder moves its change time.  `stamps`: the set that StatNames of the folder would have right after.
    """

    node: int
    before_ns: int
    after_ns: int
    stamps: bytes = b""


class NameResult(Message, frozen=True):
    """Result of one item of a batch: the name's stat after the change (before it, for a removal), or the failure.

    `marker` is the id of the delete marker that a removal left.  `stamps`: the set of stamps of a StatNames or
    PutObjects that asked for it; b"": the result may not be repeated.  `folder`: the folder of the name, of a change
    that asked for it; `from_folder`: of a Rename or Exchange, that of the old name.  `fresh`: false if the payload of a
    PutObjects or PutSlots was in the store already.
    """

    stat: ObjectStat | None = None
    failure: Failure | None = None
    marker: str = ""
    stamps: bytes = b""
    folder: FolderChange | None = None
    from_folder: FolderChange | None = None
    fresh: bool = True


class NameResults(Message, frozen=True):
    """One result for each item, in order; changes that succeeded are durable (with `durable` false: visible)."""

    results: list[NameResult]
