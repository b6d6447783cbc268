"""Changes of a node rather than of its name: attributes in place, new symlinks and special nodes.

Decisions as in `names`, under the same rules: no `await`, and a function that raises has changed nothing.  A node's
record is replaced in place, and gc's walk may have passed it, so its references to blobs never change here.
"""

from __future__ import annotations

import msgspec

from engine.format.layouts import Node, NodeKind, Table, node_key
from engine.namespace.buckets import BucketRef
from engine.namespace.conditions import check_condition
from engine.namespace.keys import check_key
from engine.namespace.names import require, resolve
from engine.namespace.object_stat import changed, check_record_size, new_special, new_symlink, special_kind
from engine.namespace.refusals import already_there, is_a_marker, shown_name, subject
from engine.namespace.tree import NameEvent, Resolved, add_node, find_place, make_parents, names_changed
from engine.namespace.versions import make_room, numbered
from engine.tables.views import Transaction
from lakefs.errors import InvalidArgument
from lakefs.wire.messages import NO_CONDITION, SPECIAL_KINDS, Condition, MakeNode, ObjectAttributes, SetAttributes


def set_attributes(txn: Transaction, bucket: BucketRef, changes: SetAttributes, now_ns: int) -> Resolved:
    """Change attributes of `changes.key` in the bucket; returns the node after the change.

    An implicit folder stays implicit: its attributes are lost when it vanishes.  The empty key is the bucket's own
    folder. Raises KeyNotFound (also for an xattr, which is then the subject), AlreadyExists (for an xattr),
    PreconditionFailed, InvalidArgument, RequestTooLarge.
    """
    found = require(txn, bucket, changes.key, changes.version)
    if found.node.is_marker:
        raise is_a_marker(bucket, changes.key, changes.version)
    check_condition(txn, changes.condition, found, bucket, changes.key)
    node = changed(found.node, changes, now_ns)
    if found.kind is NodeKind.FOLDER:  # its change time says if its names have changed: it never turns back
        node = msgspec.structs.replace(node, ctime_ns=max(node.ctime_ns, found.node.ctime_ns + 1))
    record = node.pack()
    check_record_size(record)
    txn.put(Table.NODES, node_key(found.node_id), record)
    if not changes.version or resolve(txn, bucket, changes.key) == Resolved(found.node_id, node):
        txn.note(NameEvent("put", bucket.name, changes.key, found.node_id))
    return Resolved(found.node_id, node)


def make_symlink(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    target: bytes,
    attributes: ObjectAttributes,
    now_ns: int,
    condition: Condition = NO_CONDITION,
) -> Resolved:
    """Make a symlink, and its missing parents.  Mode, owner, time and xattrs are those of `attributes`.

    Raises AlreadyExists if an object, symlink or folder has that name; PreconditionFailed, InvalidName, InvalidArgument
    (target, attributes, a key that ends in `/`), RequestTooLarge.
    """
    _check_is_no_folder(bucket, key, "symlink")
    return _make_leaf(txn, bucket, key, new_symlink(target, attributes, now_ns), now_ns, condition)


def make_special(txn: Transaction, bucket: BucketRef, made: MakeNode, now_ns: int) -> Resolved:
    """Make a pipe, socket or device, as `make_symlink` does a symlink.  Raises InvalidArgument for another kind."""
    kind = special_kind(made.kind)
    _check_is_no_folder(bucket, made.key, SPECIAL_KINDS[kind])
    node = new_special(kind, made.device, made.attributes, now_ns)
    return _make_leaf(txn, bucket, made.key, node, now_ns, made.condition)


def _check_is_no_folder(bucket: BucketRef, key: str, what: str) -> None:
    if check_key(key).endswith(b"/"):
        raise InvalidArgument(
            f"{shown_name(bucket, key)} ends in '/': a {what} cannot be a folder", subject=subject(bucket, key)
        )


def _make_leaf(
    txn: Transaction, bucket: BucketRef, key: str, node: Node, now_ns: int, condition: Condition
) -> Resolved:
    """Bind a new node without content to a free name."""
    path, record = check_key(key), node.pack()
    check_record_size(record)
    if resolve(txn, bucket, key) is not None or resolve(txn, bucket, key + "/") is not None:
        raise already_there(bucket, key)
    place = find_place(txn, bucket.node, path)
    check_condition(txn, condition, None, bucket, key, place)
    if bucket.versioning:
        make_room(txn, bucket, path, None)
        node = numbered(txn, bucket, node)
        record = node.pack()
    names_changed(txn, place, now_ns)
    make_parents(txn, bucket.name, place, now_ns)
    node_id = add_node(txn, place.key, node.kind, record)
    txn.note(NameEvent("put", bucket.name, key, node_id))
    return Resolved(node_id, node)
