"""Names: look keys up, copy and move them, on one view or transaction.  `binding` binds them, `removal` removes them.

Pure decisions: no I/O of their own, no `await`.  Rules kept here:
- A function that raises has changed nothing in the transaction, so a failed item of a batch leaves the others whole.
- Object `a` and folder `a/` may coexist: they are two keys.
- An implicit folder (no blob: no request made it) appears with the first name below it and vanishes with the last.
  The request that removes the last name may keep it, as an explicit one (`keep_folder`).
- Moving a folder moves one name record, whatever is below it.

A folder's times follow the names in it (`names_changed`), in the same transaction; those of the list of buckets do not.
Every change hands a `NameEvent` to `Transaction.note`.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from engine.format.layouts import Node, NodeKind, Table, node_key, pack_name, unpack_node
from engine.namespace.binding import bind
from engine.namespace.buckets import BucketRef
from engine.namespace.conditions import check_condition, has_twin
from engine.namespace.keys import check_key, lookup_path
from engine.namespace.object_stat import bound_at, check_record_size, with_attributes, with_owner
from engine.namespace.refusals import already_there, deleted, is_a_marker, not_empty, not_found, shown_name, subject
from engine.namespace.tree import (
    NameEvent,
    Resolved,
    add_node,
    child_at,
    find_place,
    has_children,
    load_node,
    make_parents,
    names_changed,
    new_folder,
    prune,
    resolve_path,
    resolved_at,
)
from engine.namespace.version_keys import group_of
from engine.namespace.versions import (
    add_marker,
    checked_version,
    find_old,
    is_deleted,
    is_version,
    make_room,
    newest_old,
    node_of,
    numbered,
    version_not_found,
)
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument
from lakefs.ids import EMPTY_BLOB, NodeId
from lakefs.names import shown
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes

_NODES_END = b"\xff" * 9


# --- looking up --------------------------------------------------------------------------------------


def resolve(view: View, bucket: BucketRef, key: str) -> Resolved | None:
    """Return the node of a key, or None if it does not exist.

    A key that ends in `/` gives the folder, explicit or implicit; the empty key gives the bucket's folder.
    """
    top = bucket.node
    return resolve_path(view, top, lookup_path(key)) if key else Resolved(top, load_node(view, top))


def require(view: View, bucket: BucketRef, key: str, version: str = "") -> Resolved:
    """Return the node of a key.  Raises KeyNotFound, or KeyDeleted if its newest version is a delete marker.

    With a `version`, return that one, even a delete marker.  Raises VersionNotFound, InvalidArgument (bad id).
    """
    if version:
        return _require_version(view, bucket, key, version)
    found = resolve(view, bucket, key)
    if found is None:
        raise deleted(bucket, key) if is_deleted(view, bucket, key) else not_found(bucket, key)
    return found


def _require_version(view: View, bucket: BucketRef, key: str, version: str) -> Resolved:
    number = checked_version(version)
    present = resolve(view, bucket, key)
    if present is not None and (is_version(present, number) if bucket.versioning else not number):
        return present
    old = find_old(view, bucket, key, number) if bucket.versioning else None
    if old is None:
        raise version_not_found(bucket, key, version)
    return node_of(view, old, number)


def iter_nodes(view: View, after: NodeId, limit: int) -> list[tuple[NodeId, Node]]:
    """Return the next `limit` nodes with an id above `after`, ascending; for gc's walk, page by page over fresh views.

    Ids only grow, so a walk meets every node made during it.  It can miss one thing: a blob that an already visited
    node (a folder, or a kept node) gets later.  That blob is the `NameEvent.blob` of a note of the group.
    """
    scan = view.scan(Table.NODES, node_key(NodeId(after + 1)), _NODES_END)
    return [(NodeId(int.from_bytes(key, "big")), unpack_node(value)) for key, value in islice(scan, limit)]


# --- copies ------------------------------------------------------------------------------------------


def copy(
    txn: Transaction,
    source: BucketRef,
    key: str,
    target: BucketRef,
    to_key: str,
    attributes: ObjectAttributes | None,
    condition: Condition,
    now_ns: int,
    tags: dict[str, str] | None = None,
    version: str = "",
) -> Resolved:
    """Bind `to_key` to the blob of `key`, or of a version of it.  No byte moves, and the ETag stays.

    `attributes`, if given, replace mode, owner, content type, user metadata, headers and xattrs; values computed from
    the content are kept.  The modification time is that of `attributes`, or the source's if somebody has set it, else
    `now_ns`; the tags are `tags` or the source's.  Raises KeyNotFound, VersionNotFound, VersionIsMarker,
    InvalidArgument (another domain), and the errors of `bind`.
    """
    _check_same_domain(source, target)
    found = require(txn, source, key, version) if key else None
    if found is None or (found.kind is NodeKind.FOLDER and found.node.blob is None):
        raise not_found(source, key)
    if found.node.is_marker:
        raise is_a_marker(source, key, version)
    mtime_ns = now_ns if found.node.attributes.bound_ns is None else found.node.mtime_ns
    node = msgspec.structs.replace(found.node, mtime_ns=mtime_ns, ctime_ns=now_ns)
    if attributes is not None:
        node = with_attributes(node, attributes, now_ns)
    if node.kind is not NodeKind.SYMLINK:
        node = bound_at(node, now_ns)
    if tags is not None:
        node = msgspec.structs.replace(node, attributes=msgspec.structs.replace(node.attributes, tags=tags))
    if node.attributes.upload or node.attributes.version:  # both belong to the source's node, not to this one
        own = msgspec.structs.replace(node.attributes, upload=b"", version=0)
        node = msgspec.structs.replace(node, attributes=own)
    return bind(txn, target, to_key, node, condition, now_ns)


# --- folders and moves -------------------------------------------------------------------------------


def make_folder(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    exclusive: bool,
    now_ns: int,
    attributes: ObjectAttributes | None = None,
    condition: Condition = NO_CONDITION,
) -> Resolved:
    """Make an explicit folder, which stays when it is empty.  `key` may lack its final `/`; "" is the bucket itself.

    An explicit folder stays as it is.  A new or implicit one takes mode, owner, time and xattrs from `attributes`.
    Raises AlreadyExists with `exclusive` if a folder, object or symlink has that name; PreconditionFailed, InvalidName,
    InvalidArgument and RequestTooLarge (attributes).
    """
    if not key:
        if exclusive:
            raise already_there(bucket, key)
        return require(txn, bucket, key)
    key = folder_key(key)
    place = find_place(txn, bucket.node, check_key(key))
    found = resolved_at(txn, place)
    if exclusive and (found is not None or has_twin(txn, place)):
        raise already_there(bucket, key)
    check_condition(txn, condition, found, bucket, key, place)
    if found is not None and found.node.blob is not None:
        return found
    node = new_folder(now_ns) if found is None else found.node
    node = msgspec.structs.replace(node, blob=EMPTY_BLOB)
    if attributes is not None:
        node = with_owner(node, attributes, now_ns)
    record = node.pack()
    check_record_size(record)
    if found is not None:
        made = Resolved(found.node_id, node)
        txn.put(Table.NODES, node_key(made.node_id), record)
    else:
        names_changed(txn, place, now_ns)
        make_parents(txn, bucket.name, place, now_ns)
        made = Resolved(add_node(txn, place.key, node.kind, record), node)
    txn.note(NameEvent("put", bucket.name, key, made.node_id, blob=EMPTY_BLOB))
    return made


def rename(
    txn: Transaction,
    source: BucketRef,
    key: str,
    target: BucketRef,
    to_key: str,
    replace: bool,
    now_ns: int,
    keep_folder: bool = False,
    condition: Condition = NO_CONDITION,
    to_condition: Condition = NO_CONDITION,
) -> Resolved:
    """Move an object or symlink, or a folder with all that is below it (both keys end in `/`); returns the moved node.

    One name record moves, and the node's change time is now.  A target object or empty target folder is replaced,
    unless `replace` is false.  A move onto itself does nothing.  Missing parents of the target are made; empty implicit
    parents of the source are removed (`keep_folder` as in `removal.remove`).  Older versions stay with their key:
    behind a delete marker if an object moved (see `versions` for a folder).  `condition` is on the moved node and its
    place, `to_condition` on those that are replaced.  Raises KeyNotFound, InvalidName, AlreadyExists, FolderNotEmpty,
    PreconditionFailed, InvalidArgument (folder with object, below itself, another domain, a bucket).
    """
    to_path = _check_move(source, key, target, to_key)
    place = find_place(txn, source.node, lookup_path(key))
    moved = resolved_at(txn, place)
    if moved is None:
        raise not_found(source, key)
    check_condition(txn, condition, moved, source, key, place)
    if source.node == target.node and key == to_key:
        return moved

    to_place = find_place(txn, target.node, to_path)
    old = child_at(txn, to_place)
    if to_condition != NO_CONDITION:
        check_condition(txn, to_condition, resolved_at(txn, to_place), target, to_key, to_place)
    if old is not None:
        if not replace:
            raise already_there(target, to_key)
        if key.endswith("/") and has_children(txn, old):
            raise not_empty(target, to_key)

    if not to_place.complete or to_place.parent != place.parent:
        names_changed(txn, to_place, now_ns)
    make_parents(txn, target.name, to_place, now_ns)
    name = pack_name(moved.kind, moved.node_id)
    moved = Resolved(moved.node_id, msgspec.structs.replace(moved.node, ctime_ns=now_ns))
    if not key.endswith("/"):
        moved = _between_versions(txn, source, key, target, to_path, moved, old, now_ns)
    txn.put(Table.NODES, node_key(moved.node_id), moved.node.pack())
    txn.delete(Table.NAMES, place.key)
    if old is None:
        txn.insert(Table.NAMES, to_place.key, name)
    else:
        if key.endswith("/") or not target.versioning:
            txn.delete(Table.NODES, node_key(old))
        txn.put(Table.NAMES, to_place.key, name)
    txn.note(NameEvent("rename", source.name, key, moved.node_id, target.name, to_key))
    prune(txn, source.name, place, now_ns, keep_folder)
    return moved


def _between_versions(
    txn: Transaction,
    source: BucketRef,
    key: str,
    target: BucketRef,
    to_path: bytes,
    moved: Resolved,
    old: NodeId | None,
    now_ns: int,
) -> Resolved:
    """Make the moved node a new version of its target; put a delete marker on a source key with other versions."""
    if target.versioning:
        make_room(txn, target, to_path, None if old is None else Resolved(old, load_node(txn, old)))
    path = lookup_path(key)
    if source.versioning and newest_old(txn, group_of(source.node, path)) is not None:
        add_marker(txn, source, path, now_ns, always_numbered=True)
    return Resolved(moved.node_id, numbered(txn, target, moved.node))


def _check_move(source: BucketRef, key: str, target: BucketRef, to_key: str) -> bytes:
    """Return the target's path.  Raises InvalidArgument if the move makes no sense."""
    if not key or not to_key:
        raise InvalidArgument("a bucket cannot be moved or replaced; name an object or folder in it")
    if key.endswith("/") != to_key.endswith("/"):
        raise InvalidArgument(
            f"{shown_name(source, key)} and {shown_name(target, to_key)} are not of one kind; "
            "write both with a final '/' to move a folder, both without to move an object",
            subject=subject(source, key),
        )
    _check_same_domain(source, target)
    if key.endswith("/") and source.node == target.node and to_key.startswith(key) and to_key != key:
        raise InvalidArgument(
            f"{shown_name(source, key)} cannot be moved below itself, to {shown_name(target, to_key)}",
            subject=subject(source, key),
        )
    return check_key(to_key)


def _check_same_domain(source: BucketRef, target: BucketRef) -> None:
    if source.domain != target.domain:
        raise InvalidArgument(
            f"buckets {shown(source.name)} and {shown(target.name)} are in different domains; "
            "copy the content instead: lake get, lake put",
            subject=source.name,
        )


# --- shared ------------------------------------------------------------------------------------------


def folder_key(key: str) -> str:
    """Return the key with the final `/` of a folder."""
    return key if key.endswith("/") else key + "/"
