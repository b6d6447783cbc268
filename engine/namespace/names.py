"""Names: looking keys up, binding them to nodes and moving them, on one view or transaction (`removing`: the rest).

Pure decisions: no I/O of their own, no `await`.  Rules kept here:
- A function that raises has changed nothing in the transaction, so one failed item of a batch leaves the others whole.
- A binding makes a new node, and removes the one it replaces, or keeps it as a version (`versions`).  Only folders
  keep their node (a key that ends in `/` sets the blob that the folder itself has), and the object whose id the caller
  gives (`keep_node`).
- Object `a` and folder `a/` may coexist: they are two keys.
- Folders that nobody made come with the first name below them and go with the last; who removes that one may ask
  for the folder to stay (`keep_folder`), as one that was made.
- Moving a folder moves one name record, whatever is below it.

A folder's times follow the names in it (`names_changed`), in the same transaction.  Not those of the list of buckets.
Every change hands a `NameEvent` to `Transaction.note`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from engine.format.layouts import Node, NodeKind, Table, node_key, pack_name, unpack_node
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import check_key, lookup_path
from engine.namespace.object_stat import check_condition, check_record_size, with_attributes, with_owner
from engine.namespace.refusals import (
    already_there,
    deleted,
    is_a_marker,
    not_empty,
    not_found,
    shown_name,
    subject,
)
from engine.namespace.tree import (
    NameEvent,
    Place,
    Resolved,
    add_node,
    child,
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
    with_number,
)
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument, PreconditionFailed, UserError
from lakefs.ids import EMPTY_BLOB, NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES
from lakefs.names import shown
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes

_NODES_END = b"\xff" * 9


class Binding(msgspec.Struct, frozen=True):
    """One item of `bind_many`."""

    bucket: BucketRef
    key: str
    node: Node
    condition: Condition = NO_CONDITION
    keep_node: int = 0
    named_ns: int = 0


@dataclass(slots=True)
class _Batch:
    """What items that are bound one after the other share; valid only while nothing is removed."""

    folders: dict[tuple[NodeId, bytes], NodeId] = field(default_factory=dict)
    """Folders found so far, by bucket and path."""
    noted: set[tuple[NodeId, bytes]] = field(default_factory=set)
    """Those of them that have noted the change of their names."""


# --- looking up --------------------------------------------------------------------------------------


def resolve(view: View, bucket: BucketRef, key: str) -> Resolved | None:
    """The node of a key, None when there is none.

    A key that ends in `/` gives the folder, whether anybody made it or not; the empty key gives the bucket's.
    """
    top = bucket.node
    return resolve_path(view, top, lookup_path(key)) if key else Resolved(top, load_node(view, top))


def require(view: View, bucket: BucketRef, key: str, version: str = "") -> Resolved:
    """As `resolve`; KeyNotFound when there is none, KeyDeleted where a delete marker says so.

    With a `version` that one, be it a delete marker: VersionNotFound, InvalidArgument (no id of a version).
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
    """The next `limit` nodes with an id above `after`, ascending; for gc's walk, page by page over fresh views.

    Ids only grow, so a walk meets every node that is made while it goes on.  What it can miss is the blob that a
    node gets behind it, a folder or one that was kept: that comes as `NameEvent.blob` with the notes of the group.
    """
    page: list[tuple[NodeId, Node]] = []
    if limit <= 0:
        return page
    for key, value in view.scan(Table.NODES, node_key(NodeId(after + 1)), _NODES_END):
        page.append((NodeId(int.from_bytes(key, "big")), unpack_node(value)))
        if len(page) >= limit:
            break
    return page


# --- binding -----------------------------------------------------------------------------------------


def bind(
    txn: Transaction, bucket: BucketRef, key: str, node: Node, condition: Condition, now_ns: int
) -> Resolved:
    """Bind `key` to a new node with the record `node`; the node it gets and the record as stored.

    A key that ends in `/` sets the folder's own blob instead.  Missing parents are made.  InvalidName, RequestTooLarge
    (attributes), InvalidArgument (a folder that is a symlink), and what `check_condition` raises.
    """
    return _bind(txn, Binding(bucket, key, node, condition), now_ns, _Batch())


def bind_many(txn: Transaction, bindings: Iterable[Binding], now_ns: int) -> list[Resolved | UserError]:
    """Bind one after the other; for each what `bind` returns or the error it raises.

    Each name is atomic by itself.  Parents that items share are looked up once.
    """
    batch = _Batch()
    results: list[Resolved | UserError] = []
    for binding in bindings:
        try:
            results.append(_bind(txn, binding, now_ns, batch))
        except UserError as error:
            results.append(error.with_traceback(None))  # it holds frames, and those the payload
    return results


def _bind(txn: Transaction, binding: Binding, now_ns: int, batch: _Batch) -> Resolved:
    bucket, key, condition = binding.bucket, binding.key, binding.condition
    path = check_key(key)
    is_folder = path.endswith(b"/")
    node = _record_for(binding.node, bucket, key, is_folder)
    record = node.pack()
    check_record_size(record)

    cut = path.rfind(b"/", 0, len(path) - 1) + 1
    folder = (bucket.node, path[:cut])
    known = batch.folders.get(folder)
    place = find_place(txn, bucket.node, path) if known is None else find_place(txn, known, path[cut:])
    old = child_at(txn, place)
    if condition != NO_CONDITION:
        check_condition(condition, condition_subject(txn, old, is_folder), bucket.name, key)
    if binding.keep_node:
        _check_kept(txn, binding, old)

    if old is None and (binding.named_ns or folder not in batch.noted):
        names_changed(txn, place, binding.named_ns or now_ns, is_past=bool(binding.named_ns))
        batch.noted.add(folder)
    make_parents(txn, bucket.name, place, now_ns)
    if known is None and len(path) - cut < COMPONENT_SPLIT_BYTES:
        batch.folders[folder] = place.parent
    if bucket.versioning and not is_folder:
        node = _as_version(txn, binding, path, old, node)
        record = node.pack()
    if old is None:
        node_id = add_node(txn, place.key, node.kind, record)
    elif is_folder or binding.keep_node:
        node_id = old
        txn.put(Table.NODES, node_key(node_id), record)
    else:
        node_id = txn.new_node_id()
        if not bucket.versioning:
            txn.delete(Table.NODES, node_key(old))
        txn.insert(Table.NODES, node_key(node_id), record)
        txn.put(Table.NAMES, place.key, pack_name(node.kind, node_id))
    txn.note(NameEvent("put", bucket.name, key, node_id, blob=node.blob))
    return Resolved(node_id, node)


def _as_version(txn: Transaction, binding: Binding, path: bytes, old: NodeId | None, node: Node) -> Node:
    """The record as that of a new version, for which the present one makes room.

    A node that is kept and gets the content that it has stays the version that it is: attributes make none.
    """
    present = None if old is None else Resolved(old, load_node(txn, old))
    is_kept = binding.keep_node != 0
    if is_kept and present is not None and present.node.blob == node.blob:
        return with_number(node, present.node.attributes.version)
    make_room(txn, binding.bucket, path, present, is_kept=is_kept)
    return numbered(txn, binding.bucket, node)


def _check_kept(view: View, binding: Binding, node_id: NodeId | None) -> None:
    """PreconditionFailed unless the present node is the object that the binding means to keep."""
    bucket, key = binding.bucket, binding.key
    present = None if node_id is None else Resolved(node_id, load_node(view, node_id))
    check_condition(Condition(node=binding.keep_node), present, bucket.name, key)
    if present is None or present.kind is not NodeKind.OBJECT:
        raise PreconditionFailed(
            f"{shown_name(bucket, key)} was not changed: only an object keeps its node, and it is none",
            subject=subject(bucket, key),
        )


def _record_for(node: Node, bucket: BucketRef, key: str, is_folder: bool) -> Node:
    """The record as it is stored under a key of this kind.  A folder that may be read may also be entered."""
    if not is_folder:
        return msgspec.structs.replace(node, kind=NodeKind.OBJECT) if node.kind is NodeKind.FOLDER else node
    if node.kind is NodeKind.SYMLINK:
        raise InvalidArgument(
            f"{shown_name(bucket, key)} ends in '/': a symlink cannot be a folder",
            subject=subject(bucket, key),
        )
    mode = node.mode | (node.mode & 0o444) >> 2
    return msgspec.structs.replace(node, kind=NodeKind.FOLDER, mode=mode, blob=node.blob or EMPTY_BLOB)


def condition_subject(view: View, node_id: NodeId | None, is_folder: bool) -> Resolved | None:
    """What a condition looks at: a folder that nobody made is, as a key, not there."""
    if node_id is None:
        return None
    node = load_node(view, node_id)
    return None if is_folder and node.blob is None else Resolved(node_id, node)


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
    """Bind `to_key` to the blob that `key` has, or that version of it.  No byte moves, and the ETag stays.

    `attributes`, when given, replace mode, owner, content type, user metadata, headers and xattrs; what was computed
    from the content is kept.  The copy's modification time is theirs, or `now_ns`; its tags are `tags` or the
    source's.
    KeyNotFound, VersionNotFound, VersionIsMarker, InvalidArgument (another domain), and what `bind` raises.
    """
    _check_same_domain(source, target)
    found = require(txn, source, key, version) if key else None
    if found is None or (found.kind is NodeKind.FOLDER and found.node.blob is None):
        raise not_found(source, key)
    if found.node.is_marker:
        raise is_a_marker(source, key, version)
    node = msgspec.structs.replace(found.node, mtime_ns=now_ns, ctime_ns=now_ns)
    if attributes is not None:
        node = with_attributes(node, attributes, now_ns)
    if tags is not None:
        node = msgspec.structs.replace(node, attributes=msgspec.structs.replace(node.attributes, tags=tags))
    if node.attributes.upload or node.attributes.version:  # of the source, of which this node is not a part
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
) -> Resolved:
    """Make a folder that stays when it is empty; `key` may lack its final `/`, and "" is the bucket itself.

    One that was made stays as it is.  A new one, or one that nobody made, takes mode, owner, time and xattrs of the
    `attributes`.  With `exclusive` AlreadyExists when a folder, object or symlink of that name is there.
    InvalidName, InvalidArgument and RequestTooLarge (attributes).
    """
    if not key:
        if exclusive:
            raise already_there(bucket, key)
        return require(txn, bucket, key)
    key = folder_key(key)
    place = find_place(txn, bucket.node, check_key(key))
    found = resolved_at(txn, place)
    if exclusive and (found is not None or same_named_object(txn, place)):
        raise already_there(bucket, key)
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
) -> Resolved:
    """Move an object or symlink, or a folder with all that is below it (both keys end in `/`); the node moved.

    One name record moves, and the node's change time is now.  A target object is replaced, and so is an empty target
    folder, unless `replace` is false.  Onto itself: nothing happens.  Missing parents of the target are made; those
    of the source may vanish, `keep_folder` as in `removing.remove`.  Versions that keys had before stay with the keys:
    below a delete marker where an object moved (`versions` says what a folder leaves).
    KeyNotFound, InvalidName, AlreadyExists, FolderNotEmpty, InvalidArgument (folder with object, below itself,
    another domain, a bucket).
    """
    to_path = _check_move(source, key, target, to_key)
    place = find_place(txn, source.node, lookup_path(key))
    moved = resolved_at(txn, place)
    if moved is None:
        raise not_found(source, key)
    if source.node == target.node and key == to_key:
        return moved

    to_place = find_place(txn, target.node, to_path)
    old = child_at(txn, to_place)
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
    """What moves is a new version of its target, and none of its source any more, where other versions stay."""
    if target.versioning:
        make_room(txn, target, to_path, None if old is None else Resolved(old, load_node(txn, old)))
    path = lookup_path(key)
    if source.versioning and newest_old(txn, group_of(source.node, path)) is not None:
        add_marker(txn, source, path, now_ns, always_numbered=True)
    return Resolved(moved.node_id, numbered(txn, target, moved.node))


def _check_move(source: BucketRef, key: str, target: BucketRef, to_key: str) -> bytes:
    """The path of the target, when the move makes sense at all."""
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


# --- what both use -----------------------------------------------------------------------------------


def folder_key(key: str) -> str:
    """The key with the final `/` of a folder."""
    return key if key.endswith("/") else key + "/"


def same_named_object(view: View, folder: Place) -> bool:
    """Whether the name of a folder's place, without its slash, is taken by an object."""
    return folder.complete and child(view, folder.parent, folder.name[:-1]) is not None
