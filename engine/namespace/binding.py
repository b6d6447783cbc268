"""Binding of names to nodes, on one transaction; the decisions of `names` and of puts.

Rules kept here:
- A function that raises has changed nothing in the transaction, so a failed item of a batch leaves the others whole.
- A binding makes a new node.  It removes the node it replaces, or keeps it as a version (`versions`).  Only two keep
  their node: folders (a key that ends in `/` sets the folder's own blob), and the object whose id is `keep_node`.
- Every binding hands a `NameEvent` to `Transaction.note`.

Runs of new names are bound by `new_names`, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from engine.format.layouts import Node, NodeKind, Table, node_key, pack_name
from engine.namespace.buckets import BucketRef
from engine.namespace.conditions import check_condition
from engine.namespace.keys import check_key
from engine.namespace.object_stat import bound_at, bound_ns_of, check_record_size, with_attributes_of
from engine.namespace.refusals import shown_name, subject
from engine.namespace.tree import (
    NameEvent,
    Place,
    Resolved,
    add_node,
    child_at,
    find_place,
    load_node,
    make_parents,
    names_changed,
)
from engine.namespace.versions import make_room, numbered, with_number
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument, PreconditionFailed, UserError
from lakefs.ids import EMPTY_BLOB, NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES
from lakefs.wire.messages import NO_CONDITION, Condition

Folder = tuple[NodeId, bytes]
"""A folder by its bucket's node and its path there, which is empty or ends with `/`."""


class Binding(msgspec.Struct, frozen=True):
    """A key to bind to a new node with the record `node`; the other fields are those of a `NameChange`."""

    bucket: BucketRef
    key: str
    node: Node
    condition: Condition = NO_CONDITION
    keep_node: int = 0
    named_ns: int = 0
    keep_attributes: bool = False


def bind(txn: Transaction, bucket: BucketRef, key: str, node: Node, condition: Condition, now_ns: int) -> Resolved:
    """Bind `key` to a new node with the record `node`; returns the node and the record as stored.

    A key that ends in `/` sets the folder's own blob instead.  Makes missing parents.  Raises InvalidName,
    RequestTooLarge (attributes), InvalidArgument (a folder that is a symlink), and the errors of `check_condition`.
    """
    return Binder(txn, now_ns).bind(Binding(bucket, key, node, condition))


def bind_many(txn: Transaction, bindings: Iterable[Binding], now_ns: int) -> list[Resolved | UserError]:
    """Bind items one after the other; returns for each the result of `bind`, or the error it raised.

    Each name is atomic by itself.  Parents that items share are looked up once.
    """
    binder = Binder(txn, now_ns)
    return [binder.try_bind(binding) for binding in bindings]


class Binder:
    """Binds names in one transaction, one after the other.  Used only while nothing removes or moves names."""

    def __init__(self, txn: Transaction, now_ns: int) -> None:
        self.txn: Final = txn
        self.now_ns: Final = now_ns
        self._folders: dict[Folder, NodeId] = {}
        """Folders found so far."""
        self._noted: set[Folder] = set()
        """Folders whose change time was updated already."""

    def try_bind(self, binding: Binding) -> Resolved | UserError:
        """Return the result of `bind`, or the error it raised."""
        try:
            return self.bind(binding)
        except UserError as error:
            return error.with_traceback(None)  # a traceback keeps frames, which keep the payload

    def bind(self, binding: Binding) -> Resolved:
        """Bind one name; see the function `bind`."""
        txn, bucket, key, condition = self.txn, binding.bucket, binding.key, binding.condition
        path = check_key(key)
        is_folder = path.endswith(b"/")
        node = _record_for(binding.node, bucket, key, is_folder)
        record = node.pack()
        check_record_size(record)
        assert (node.kind is NodeKind.FOLDER) == is_folder, "only folders have keys that end in '/'"

        cut = path.rfind(b"/", 0, len(path) - 1) + 1
        folder, name = (bucket.node, path[:cut]), path[cut:]
        place = self.find(folder, name)
        old = child_at(txn, place)
        if condition != NO_CONDITION:
            check_condition(txn, condition, condition_subject(txn, old, is_folder), bucket, key, place)
        if binding.keep_node:
            kept = _checked_kept(txn, binding, old)
            if kept.blob == node.blob:  # the key is bound to that content already
                node = bound_at(node, bound_ns_of(kept))
                record = node.pack()
                check_record_size(record)
        if binding.keep_attributes and old is not None:
            node = with_attributes_of(node, load_node(txn, old))
            record = node.pack()
            check_record_size(record)

        if old is None:
            self.note_new(folder, place, binding.named_ns)
        self.make_parents(bucket, folder, name, place)
        if bucket.versioning and not is_folder:
            node = _as_version(txn, binding, path, old, node)
            record = node.pack()
        if old is None:
            node_id = add_node(txn, place.key, node.kind, record)
        elif is_folder or binding.keep_node:
            assert is_folder or node.kind is NodeKind.OBJECT, "only folders and objects keep their node"
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

    def find(self, folder: Folder, name: bytes) -> Place:
        """Return the place of a name in a folder of a bucket."""
        known = self._folders.get(folder)
        if known is not None:
            return find_place(self.txn, known, name)
        bucket, path = folder
        return find_place(self.txn, bucket, path + name)

    def note_new(self, folder: Folder, place: Place, named_ns: int = 0) -> None:
        """Set the folder's times, as a name appears at the place in it; of several names now, only the first does.

        `named_ns`: the name appeared then; the folder keeps its times if it was changed since.
        """
        if named_ns or folder not in self._noted:
            names_changed(self.txn, place, named_ns or self.now_ns, is_past=bool(named_ns))
            self._noted.add(folder)

    def make_parents(self, bucket: BucketRef, folder: Folder, name: bytes, place: Place) -> None:
        """Make the missing parents of the name's place, and keep the folder in mind."""
        make_parents(self.txn, bucket.name, place, self.now_ns)
        if len(name) < COMPONENT_SPLIT_BYTES:  # no hidden nodes between
            self._folders[folder] = place.parent


def _as_version(txn: Transaction, binding: Binding, path: bytes, old: NodeId | None, node: Node) -> Node:
    """Return the record as that of a new version, after moving the present version aside.

    A kept node that is bound to its present blob stays the same version: a change of attributes makes no new one.
    """
    present = None if old is None else Resolved(old, load_node(txn, old))
    is_kept = binding.keep_node != 0
    if is_kept and present is not None and present.node.blob == node.blob:
        return with_number(node, present.node.attributes.version)
    make_room(txn, binding.bucket, path, present, is_kept=is_kept)
    return numbered(txn, binding.bucket, node)


def _checked_kept(view: View, binding: Binding, node_id: NodeId | None) -> Node:
    """Return the present node.  Raises PreconditionFailed unless it is the object whose id is `keep_node`."""
    bucket, key = binding.bucket, binding.key
    present = None if node_id is None else Resolved(node_id, load_node(view, node_id))
    check_condition(view, Condition(node=binding.keep_node), present, bucket, key)
    if present is None or present.kind is not NodeKind.OBJECT:
        raise PreconditionFailed(
            f"{shown_name(bucket, key)} was not changed: only an object keeps its node, and it is none",
            subject=subject(bucket, key),
        )
    return present.node


def _record_for(node: Node, bucket: BucketRef, key: str, is_folder: bool) -> Node:
    """Return the record as stored under a key of this kind.  A folder that may be read may also be entered."""
    if not is_folder:
        return msgspec.structs.replace(node, kind=NodeKind.OBJECT) if node.kind is NodeKind.FOLDER else node
    if node.kind is NodeKind.SYMLINK:
        raise InvalidArgument(
            f"{shown_name(bucket, key)} ends in '/': a symlink cannot be a folder", subject=subject(bucket, key)
        )
    mode = node.mode | (node.mode & 0o444) >> 2
    return msgspec.structs.replace(node, kind=NodeKind.FOLDER, mode=mode, blob=node.blob or EMPTY_BLOB)


def condition_subject(view: View, node_id: NodeId | None, is_folder: bool) -> Resolved | None:
    """Return the node that a condition is checked against; None for an implicit folder: as a key it does not exist."""
    if node_id is None:
        return None
    node = load_node(view, node_id)
    return None if is_folder and node.blob is None else Resolved(node_id, node)
