"""Names: binding keys to nodes, moving and removing them, on one view or transaction.

Pure decisions: no I/O of their own, no `await`.  Rules kept here:
- A function that raises has changed nothing in the transaction: it decides first and changes then.  So one
  failed item of a batch leaves the others of its transaction whole.
- A binding makes a new node, and removes the one it replaces.  Only folders keep their node (a key that ends in
  `/` sets the blob that the folder itself has), and the object whose id the caller gives (`keep_node`).
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

from engine.buckets import BucketRef
from engine.format import NO_ATTRIBUTES, EtagKind, Node, NodeKind, Table, node_key, pack_name, unpack_node
from engine.name_keys import check_key, lookup_path, shown
from engine.name_refusals import already_there, not_empty, not_found, object_instead, shown_name, subject
from engine.object_stat import check_condition, check_record_size, with_attributes, with_owner
from engine.tree import (
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
    remove_at,
    resolved_at,
)
from engine.views import Transaction, View
from lakefs.errors import InvalidArgument, InvalidName, PreconditionFailed, UserError
from lakefs.ids import EMPTY_BLOB, NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES
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
    if not key:
        return Resolved(bucket.node, load_node(view, bucket.node))
    return resolved_at(view, find_place(view, bucket.node, lookup_path(key)))


def require(view: View, bucket: BucketRef, key: str) -> Resolved:
    """As `resolve`; KeyNotFound when there is none."""
    found = resolve(view, bucket, key)
    if found is None:
        raise not_found(bucket, key)
    return found


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

    A key that ends in `/` sets the folder's own blob instead.  Missing parents are made.
    InvalidName, PreconditionFailed, RequestTooLarge (attributes), InvalidArgument (a folder that is a symlink).
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
            results.append(error)
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
        check_condition(condition, _condition_subject(txn, old, is_folder), bucket.name, key)
    if binding.keep_node:
        _check_kept(txn, binding, old)

    if old is None and (binding.named_ns or folder not in batch.noted):
        names_changed(txn, place, binding.named_ns or now_ns, is_past=bool(binding.named_ns))
        batch.noted.add(folder)
    make_parents(txn, bucket.name, place, now_ns)
    if known is None and len(path) - cut < COMPONENT_SPLIT_BYTES:
        batch.folders[folder] = place.parent
    if old is None:
        node_id = add_node(txn, place.key, node.kind, record)
    elif is_folder or binding.keep_node:
        node_id = old
        txn.put(Table.NODES, node_key(node_id), record)
    else:
        node_id = txn.new_node_id()
        txn.delete(Table.NODES, node_key(old))
        txn.insert(Table.NODES, node_key(node_id), record)
        txn.put(Table.NAMES, place.key, pack_name(node.kind, node_id))
    txn.note(NameEvent("put", bucket.name, key, node_id, blob=node.blob))
    return Resolved(node_id, node)


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


def _condition_subject(view: View, node_id: NodeId | None, is_folder: bool) -> Resolved | None:
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
) -> Resolved:
    """Bind `to_key` to the blob that `key` has.  No byte moves, and the ETag stays.

    `attributes`, when given, replace mode, owner, content type, user metadata, headers and xattrs; what was computed
    from the content is kept.  The copy's modification time is theirs, or `now_ns`; its tags are `tags` or the
    source's.
    KeyNotFound, InvalidArgument (another domain), and what `bind` raises.
    """
    _check_same_domain(source, target)
    found = _condition_subject_at(txn, source, key)
    if found is None:
        raise not_found(source, key)
    node = msgspec.structs.replace(found.node, mtime_ns=now_ns, ctime_ns=now_ns)
    if attributes is not None:
        node = with_attributes(node, attributes, now_ns)
    if tags is not None:
        node = msgspec.structs.replace(node, attributes=msgspec.structs.replace(node.attributes, tags=tags))
    if node.attributes.upload:  # this node does not come from the upload that the source came from
        node = msgspec.structs.replace(node, attributes=msgspec.structs.replace(node.attributes, upload=b""))
    return bind(txn, target, to_key, node, condition, now_ns)


def _condition_subject_at(view: View, bucket: BucketRef, key: str) -> Resolved | None:
    if not key:
        return None
    place = find_place(view, bucket.node, lookup_path(key))
    return _condition_subject(view, child_at(view, place), key.endswith("/"))


# --- removing ----------------------------------------------------------------------------------------


def unbind(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    condition: Condition,
    now_ns: int,
    keep_folder: bool = False,
) -> Resolved | None:
    """Remove a key; what it was bound to, changed now; None when it was not there.

    For a key that ends in `/` the folder loses its own blob: it goes when it is empty, and else stays as one that
    nobody made.  Parents that nobody made go with their last child, or with `keep_folder` the first of them stays.
    InvalidName (empty key), PreconditionFailed.
    """
    if not key:
        raise InvalidName(
            f"no key was given; to remove a bucket: lake bucket rm {bucket.name}", subject=bucket.name
        )
    place = find_place(txn, bucket.node, lookup_path(key))
    is_folder = key.endswith("/")
    found = _condition_subject(txn, child_at(txn, place), is_folder)
    check_condition(condition, found, bucket.name, key)
    if found is None:
        return None
    txn.note(NameEvent("delete", bucket.name, key, found.node_id))
    if is_folder and has_children(txn, found.node_id):
        bare = msgspec.structs.replace(
            found.node, blob=None, size_bytes=0, etag_kind=EtagKind.DERIVED, attributes=NO_ATTRIBUTES
        )
        txn.put(Table.NODES, node_key(found.node_id), bare.pack())
    else:
        remove_at(txn, bucket.name, place, found.node_id, now_ns, keep_folder)
    return _removed(found, now_ns)


def remove_folder(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    condition: Condition,
    now_ns: int,
    keep_folder: bool = False,
) -> Resolved:
    """Remove an empty folder; what it was, changed now.  `key` may lack its final `/`.  `keep_folder` as in `unbind`.

    KeyNotFound, NotAFolder, FolderNotEmpty, PreconditionFailed, InvalidName (empty key).
    """
    if not key:
        raise InvalidName(
            f"no key was given; to remove a bucket: lake bucket rm {bucket.name}", subject=bucket.name
        )
    key = _folder_key(key)
    place = find_place(txn, bucket.node, lookup_path(key))
    found = resolved_at(txn, place)
    if found is None:
        raise object_instead(bucket, key) if _same_named_object(txn, place) else not_found(bucket, key)
    check_condition(condition, found, bucket.name, key)
    if has_children(txn, found.node_id):
        raise not_empty(bucket, key)
    txn.note(NameEvent("delete", bucket.name, key, found.node_id))
    remove_at(txn, bucket.name, place, found.node_id, now_ns, keep_folder)
    return _removed(found, now_ns)


def _removed(found: Resolved, now_ns: int) -> Resolved:
    """What is left of a node without a name, for those who have it open."""
    return Resolved(found.node_id, msgspec.structs.replace(found.node, ctime_ns=now_ns))


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
    key = _folder_key(key)
    place = find_place(txn, bucket.node, check_key(key))
    found = resolved_at(txn, place)
    if exclusive and (found is not None or _same_named_object(txn, place)):
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
    of the source may vanish, `keep_folder` as in `unbind`.
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
    txn.put(Table.NODES, node_key(moved.node_id), moved.node.pack())
    txn.delete(Table.NAMES, place.key)
    if old is None:
        txn.insert(Table.NAMES, to_place.key, name)
    else:
        txn.delete(Table.NODES, node_key(old))
        txn.put(Table.NAMES, to_place.key, name)
    txn.note(NameEvent("rename", source.name, key, moved.node_id, target.name, to_key))
    prune(txn, source.name, place, now_ns, keep_folder)
    return moved


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


def _folder_key(key: str) -> str:
    return key if key.endswith("/") else key + "/"


def _same_named_object(view: View, folder: Place) -> bool:
    """Whether the name of a folder's place, without its slash, is taken by an object."""
    return folder.complete and child(view, folder.parent, folder.name[:-1]) is not None
