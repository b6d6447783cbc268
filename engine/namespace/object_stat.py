"""ETags of nodes, and conversions between node records and messages.

Attributes from a client are checked here, once, before they become a record.  No table is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import msgspec

from engine.format.columns import ObjectColumns
from engine.format.layouts import NO_ATTRIBUTES, NODE_HEAD, Attributes, EtagKind, Node, NodeKind
from engine.namespace.keys import subject_of
from lakefs.errors import AlreadyExists, InvalidArgument, KeyNotFound, RequestTooLarge
from lakefs.ids import EMPTY_BLOB, BlobId, ChunkKind, NodeId, kind_of
from lakefs.limits import ATTRIBUTES_BYTES_MAX, BLOB_BYTES_MAX, SYMLINK_TARGET_BYTES_MAX
from lakefs.names import shown
from lakefs.wire.messages import ListEntry, ObjectAttributes, ObjectStat, SetAttributes

EMPTY_ETAG: Final = "d41d8cd98f00b204e9800998ecf8427e"
"""MD5 of no bytes."""
_MULTIPART_ETAG_BYTES_MAX: Final = 64
_U32_MAX: Final = 0xFFFF_FFFF
_PERMISSION_BITS: Final = 0o7777
_TIME_LIMIT_NS: Final = 1 << 63
_NS: Final = 1_000_000_000


def new_object(blob: BlobId, size_bytes: int, chunk_count: int, attributes: ObjectAttributes, now_ns: int) -> Node:
    """Return the record of a new object.  `chunk_count` counts data chunks; a blob without manifest has one.

    A modification time of 0 becomes `now_ns`, at which the key is bound.  Raises InvalidArgument for values that a
    record cannot hold; the size of the attributes is checked where the record is bound.
    """
    _check_ranges(size_bytes, attributes)
    is_manifest = kind_of(blob) is ChunkKind.MANIFEST
    assert (chunk_count > 1) == is_manifest, f"{chunk_count} chunks in a blob of kind {blob[0]}"
    node = Node(
        kind=NodeKind.OBJECT,
        blob=blob,
        size_bytes=size_bytes,
        mode=attributes.mode & _PERMISSION_BITS,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime_ns=attributes.mtime_ns or now_ns,
        ctime_ns=attributes.ctime_ns or now_ns,
        etag_kind=_checked_etag_kind(attributes),
        attributes=_stored_attributes(attributes, chunk_count if is_manifest else 0),
    )
    return bound_at(node, now_ns)


def bound_ns_of(node: Node) -> int:
    """Return the time at which the key was bound to its content."""
    return node.mtime_ns if node.attributes.bound_ns is None else node.attributes.bound_ns


def bound_at(node: Node, bound_ns: int) -> Node:
    """Return the record with that time of its binding; a time that is the modification time takes no room."""
    stored = None if bound_ns == node.mtime_ns else bound_ns
    if stored == node.attributes.bound_ns:
        return node
    return msgspec.structs.replace(node, attributes=msgspec.structs.replace(node.attributes, bound_ns=stored))


def with_attributes(node: Node, attributes: ObjectAttributes, now_ns: int) -> Node:
    """Return the record with other attributes; keeps tags and values computed from the content (ETag, checksums).

    Raises InvalidArgument for values that a record cannot hold.
    """
    owned = with_owner(node, attributes, now_ns)
    stored = msgspec.structs.replace(
        owned.attributes,
        content_type=attributes.content_type,
        user_metadata=attributes.user_metadata,
        headers=attributes.headers,
        atime_ns=attributes.atime_ns,
    )
    return msgspec.structs.replace(owned, attributes=stored)


def with_attributes_of(node: Node, present: Node) -> Node:
    """Return the record of new content with what somebody has set on the present one; times are the new one's."""
    kept = present.attributes
    stored = msgspec.structs.replace(
        node.attributes,
        content_type=kept.content_type,
        user_metadata=kept.user_metadata,
        headers=kept.headers,
        xattrs=kept.xattrs,
        tags=kept.tags,
    )
    return msgspec.structs.replace(node, mode=present.mode, uid=present.uid, gid=present.gid, attributes=stored)


def with_owner(node: Node, attributes: ObjectAttributes, now_ns: int) -> Node:
    """Return the record with a folder's or symlink's share of `attributes`: mode, owner, modification time, xattrs.

    Raises InvalidArgument for values that a record cannot hold.
    """
    _check_ranges(node.size_bytes, attributes)
    return msgspec.structs.replace(
        node,
        mode=attributes.mode & _PERMISSION_BITS,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime_ns=attributes.mtime_ns or now_ns,
        ctime_ns=now_ns,
        attributes=msgspec.structs.replace(node.attributes, xattrs=attributes.xattrs),
    )


def new_symlink(target: bytes, attributes: ObjectAttributes, now_ns: int) -> Node:
    """Return the record of a new symlink; its size is that of its target.  Raises InvalidArgument."""
    if not 1 <= len(target) <= SYMLINK_TARGET_BYTES_MAX or b"\0" in target:
        raise InvalidArgument(
            f"a symlink's target of {len(target)} bytes; it has 1 to {SYMLINK_TARGET_BYTES_MAX}, and no NUL"
        )
    node = Node(kind=NodeKind.SYMLINK, size_bytes=len(target), attributes=Attributes(symlink_target=target))
    return with_owner(node, attributes, now_ns)


def copied_symlink(target: bytes, attributes: ObjectAttributes, now_ns: int) -> Node:
    """Return the record of a symlink that is copied, with all that the other one has.  Raises InvalidArgument."""
    node = new_symlink(target, attributes, now_ns)
    stored = msgspec.structs.replace(_stored_attributes(attributes, 0), symlink_target=target)
    return msgspec.structs.replace(node, attributes=stored)


def changed(node: Node, changes: SetAttributes, now_ns: int) -> Node:
    """Return the record with the attributes that `changes` gives, and a change time of now.

    Raises InvalidArgument for values that a record cannot hold; AlreadyExists or KeyNotFound if the xattr conditions of
    `changes` do not hold; KeyNotFound for tags of a node without content.
    """
    mode = node.mode if changes.mode is None else changes.mode & _PERMISSION_BITS
    uid = node.uid if changes.uid is None else changes.uid
    gid = node.gid if changes.gid is None else changes.gid
    mtime_ns = node.mtime_ns if changes.mtime_ns is None else changes.mtime_ns
    _check_owner_and_time(uid, gid, mtime_ns, changes.atime_ns or 0)
    attributes = _with_access_time(node, changes, mtime_ns)
    if changes.xattrs:
        attributes = msgspec.structs.replace(attributes, xattrs=_changed_xattrs(attributes.xattrs, changes))
    if changes.tags is not None:
        attributes = msgspec.structs.replace(attributes, tags=_changed_tags(node, changes))
    after = msgspec.structs.replace(
        node, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, ctime_ns=now_ns, attributes=attributes
    )
    return bound_at(after, bound_ns_of(node)) if node.kind is NodeKind.OBJECT else after


def _with_access_time(node: Node, changes: SetAttributes, mtime_ns: int) -> Attributes:
    """Return the attributes with the new access time; it is not stored if it equals the modification time."""
    if changes.atime_ns is None and changes.mtime_ns is None:
        return node.attributes
    shown = node.mtime_ns if node.attributes.atime_ns is None else node.attributes.atime_ns
    atime_ns = shown if changes.atime_ns is None else changes.atime_ns
    kept = None if atime_ns == mtime_ns else atime_ns
    if kept == node.attributes.atime_ns:
        return node.attributes
    return msgspec.structs.replace(node.attributes, atime_ns=kept)


def _changed_xattrs(present: dict[str, bytes], changes: SetAttributes) -> dict[str, bytes]:
    xattrs = dict(present)
    for name, value in changes.xattrs.items():
        if value is None or changes.xattr_present:
            if name not in present:
                raise KeyNotFound(
                    f"{shown(changes.bucket + '/' + changes.key)} has no extended attribute {shown(name)}", subject=name
                )
        elif changes.xattr_absent and name in present:
            raise AlreadyExists(
                f"{shown(changes.bucket + '/' + changes.key)} has an extended attribute {shown(name)} already",
                subject=name,
            )
        if value is None:
            del xattrs[name]
        else:
            xattrs[name] = value
    return xattrs


def _changed_tags(node: Node, changes: SetAttributes) -> dict[str, str]:
    if node.blob is None:
        raise KeyNotFound(
            f"{shown(changes.bucket + '/' + changes.key)} is no object, and has no tags",
            subject=subject_of(changes.bucket, changes.key),
        )
    return changes.tags or {}


def _check_ranges(size_bytes: int, attributes: ObjectAttributes) -> None:
    if not 0 <= size_bytes <= BLOB_BYTES_MAX:
        raise InvalidArgument(f"an object of {size_bytes} bytes; the limit is {BLOB_BYTES_MAX}")
    times = attributes.mtime_ns, attributes.atime_ns or 0, attributes.ctime_ns
    _check_owner_and_time(attributes.uid, attributes.gid, *times)


def _check_owner_and_time(uid: int, gid: int, *times_ns: int) -> None:
    if not (0 <= uid <= _U32_MAX and 0 <= gid <= _U32_MAX):
        raise InvalidArgument(f"owner {uid}:{gid} is outside 0 to {_U32_MAX}")
    for time_ns in times_ns:
        if not -_TIME_LIMIT_NS <= time_ns < _TIME_LIMIT_NS:
            raise InvalidArgument(f"a time of {time_ns} ns is outside 64 bits")


def _checked_etag_kind(attributes: ObjectAttributes) -> EtagKind:
    kind, etag = attributes.etag_kind, attributes.etag
    if kind == EtagKind.DERIVED:
        return EtagKind.DERIVED
    if kind == EtagKind.MD5 and len(etag) == 16:
        return EtagKind.MD5
    if kind == EtagKind.MULTIPART and 0 < len(etag) <= _MULTIPART_ETAG_BYTES_MAX and etag.isascii():
        return EtagKind.MULTIPART
    raise InvalidArgument(f"an ETag of kind {kind} and {len(etag)} bytes is none that the store knows")


def _stored_attributes(attributes: ObjectAttributes, chunk_count: int) -> Attributes:
    """Return the record's attributes; the constant NO_ATTRIBUTES if there are none, so that packing is cheap."""
    etag = attributes.etag if attributes.etag_kind != EtagKind.DERIVED else b""
    if not (
        chunk_count
        or etag
        or attributes.content_type
        or attributes.user_metadata
        or attributes.headers
        or attributes.checksums
        or attributes.xattrs
        or attributes.atime_ns is not None
        or attributes.tags
    ):
        return NO_ATTRIBUTES
    return Attributes(
        etag=etag,
        content_type=attributes.content_type,
        user_metadata=attributes.user_metadata,
        headers=attributes.headers,
        checksums=attributes.checksums,
        xattrs=attributes.xattrs,
        chunk_count=chunk_count,
        atime_ns=attributes.atime_ns,
        tags=attributes.tags,
    )


def check_record_size(record: bytes) -> None:
    """Raise RequestTooLarge if a node's attributes are over their bound."""
    attribute_bytes = len(record) - NODE_HEAD.size
    if attribute_bytes > ATTRIBUTES_BYTES_MAX:
        raise RequestTooLarge(
            f"user metadata, headers and extended attributes of {attribute_bytes} bytes; "
            f"the limit is {ATTRIBUTES_BYTES_MAX}"
        )


def chunk_count_of(node: Node) -> int:
    """Return the data chunks of the node's blob: 0 without a blob, 1 for one without manifest (also the empty one)."""
    return 0 if node.blob is None else node.attributes.chunk_count or 1


def etag_of(node: Node) -> str:
    """Return the ETag as text, without quotes; empty for a folder without blob."""
    if node.blob is None:
        return ""
    if node.etag_kind is EtagKind.MD5:
        return node.attributes.etag.hex()
    if node.etag_kind is EtagKind.MULTIPART:
        return node.attributes.etag.decode("ascii")
    return derived_etag(node.blob, chunk_count_of(node))


def derived_etag(blob: BlobId, chunk_count: int) -> str:
    """Return the ETag of a blob for which the client gave none."""
    return EMPTY_ETAG if blob == EMPTY_BLOB else f"{blob[1:17].hex()}-{chunk_count}"


def to_object_stat(bucket: str, key: str, node_id: NodeId, node: Node, version: str = "") -> ObjectStat:
    """Return the message that describes a name, or its version of that id."""
    attributes = node.attributes
    return ObjectStat(
        bucket=bucket,
        key=key,
        kind=int(node.kind),
        node=node_id,
        size_bytes=node.size_bytes,
        etag=etag_of(node),
        mtime_ns=node.mtime_ns,
        blob=node.blob or b"",
        content_type=attributes.content_type,
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        user_metadata=attributes.user_metadata,
        headers=attributes.headers,
        checksums=attributes.checksums,
        chunk_count=chunk_count_of(node),
        ctime_ns=node.ctime_ns,
        xattrs=attributes.xattrs,
        symlink_target=attributes.symlink_target,
        atime_ns=attributes.atime_ns,
        tags=attributes.tags,
        upload=attributes.upload,
        version=version,
        is_marker=node.is_marker,
        bound_ns=attributes.bound_ns or 0,
    )


def to_object_stats(
    first: ObjectStat, keys: Sequence[str], nodes: Sequence[int], objects: ObjectColumns
) -> list[ObjectStat]:
    """Return the messages of objects of a run (`engine.namespace.new_names`), of which `first` describes the first."""
    etags = [etag.hex() for etag in objects.etags] or [derived_etag(blob, 1) for blob in objects.blobs]
    columns: dict[str, Sequence[object]] = {
        "key": keys,
        "node": nodes,
        "size_bytes": objects.sizes_bytes,
        "etag": etags,
        "mtime_ns": objects.mtimes_ns,
        "blob": objects.blobs,
    }
    if objects.sums:
        (name,) = first.checksums
        columns["checksums"] = [{name: value} for value in objects.sums]
    fields = ObjectStat.__struct_fields__
    stats = list(map(ObjectStat, *(columns.get(field) or repeat(getattr(first, field)) for field in fields)))
    assert stats[0] == first, "the first object has the columns' first values"
    return stats


def to_list_entry(key: str, node_id: NodeId, node: Node) -> ListEntry:
    """Return the entry of a LIST page for a name."""
    return ListEntry(
        key=key,
        size_bytes=node.size_bytes,
        etag=etag_of(node),
        mtime_ns=node.mtime_ns,
        kind=int(node.kind),
        node=node_id,
        blob=node.blob or b"",
        mode=node.mode,
        content_type=node.attributes.content_type,
        uid=node.uid,
        gid=node.gid,
        ctime_ns=node.ctime_ns,
        atime_ns=node.attributes.atime_ns,
        checksum_names=list(node.attributes.checksums),
        bound_ns=node.attributes.bound_ns or 0,
    )
