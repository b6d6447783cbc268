"""The tree of names as records: find a place in it, make missing parents, remove empty ones.

`names`, `removal`, `buckets` and `listing` build on this module.  Invariants that it keeps together with them:
- Every node but the root and old versions has exactly one name; the name's kind is the node's kind.
- A folder without blob (implicit: no request made it) and a hidden node have at least one child.  So below every folder
  there is at least one key, and a rolled-up prefix is known from the folder's own record.
- An overwrite gets a new node.  Exceptions are folders, `keep_node` and changes of attributes: they replace the record
  of the present node in place.

It knows nothing of conditions, ETags or buckets' properties.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.format.layouts import (
    Node,
    NodeKind,
    Table,
    changed_at,
    node_key,
    pack_name,
    unpack_name,
    unpack_node,
    with_change_time,
    with_names_changed,
)
from engine.namespace.keys import Step, behind, is_folder_step, name_key, range_end, split_key
from engine.tables.views import Transaction, View
from lakefs.errors import IndexDamaged
from lakefs.ids import EMPTY_BLOB, BlobId, NodeId
from lakefs.names import FOLDER_MODE


class NameEvent(msgspec.Struct, frozen=True):
    """A change of a name, handed to `Transaction.note`.  kind: put, delete, rename (key to to_key).

    Keys of folders end with `/`; the empty key is the bucket itself.  `blob` is the blob that a put bound.  gc's walk
    may have passed its node (a folder with a blob of its own, a kept node), so gc marks it when the note joins its
    group.
    """

    kind: str
    bucket: str
    key: str
    node: NodeId
    to_bucket: str = ""
    to_key: str = ""
    blob: BlobId | None = None


class ChangedBy(msgspec.Struct, frozen=True):
    """The client whose request the following name events belong to; noted before them."""

    client: object


class Resolved(msgspec.Struct, frozen=True):
    """A name's node: its id and its record."""

    node_id: NodeId
    node: Node

    @property
    def kind(self) -> NodeKind:
        """Folder, object or symlink."""
        return self.node.kind


@dataclass(slots=True)
class Place:
    """The place of a key, existing or not: `nodes[i]` is the node of `steps[i]`, as far as they exist below `top`."""

    top: NodeId
    steps: list[Step]
    name: bytes
    nodes: list[NodeId] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if all parents exist."""
        return len(self.nodes) == len(self.steps)

    @property
    def parent(self) -> NodeId:
        """The node that the name is under; all parents must exist."""
        assert self.complete
        return self.nodes[-1] if self.nodes else self.top

    @property
    def key(self) -> bytes:
        """Key of the name in the table `names`; all parents must exist."""
        return name_key(self.parent, self.name)

    def folder_key(self, depth: int) -> str:
        """Key below `top` of the folder that `steps[depth]` ends."""
        return b"".join(self.steps[: depth + 1]).decode()


def find_place(view: View, top: NodeId, path: bytes) -> Place:
    """Return the place of a key below the node `top`.  One read for each step that exists."""
    steps, name = split_key(path)
    place = Place(top, steps, name)
    parent = top
    for step in steps:
        found = child(view, parent, step)
        if found is None:
            break
        parent = found
        place.nodes.append(parent)
    return place


def child(view: View, parent: NodeId, name: bytes) -> NodeId | None:
    """Return the node of a name under `parent`, or None."""
    value = view.get(Table.NAMES, name_key(parent, name))
    return None if value is None else unpack_name(value)[1]


def child_at(view: View, place: Place) -> NodeId | None:
    """Return the node at a place, or None."""
    return child(view, place.parent, place.name) if place.complete else None


def load_node(view: View, node: NodeId) -> Node:
    """Return the record of a node that a name refers to.  Raises IndexDamaged if it is missing."""
    value = view.get(Table.NODES, node_key(node))
    if value is None:
        raise IndexDamaged(f"a name refers to node {node}, which has no record", subject=f"node {node}")
    return unpack_node(value)


def resolved_at(view: View, place: Place) -> Resolved | None:
    """Return the node at a place with its record, or None."""
    node = child_at(view, place)
    return None if node is None else Resolved(node, load_node(view, node))


def resolve_path(view: View, top: NodeId, path: bytes) -> Resolved | None:
    """Return the node of a key below `top` with its record, or None: `resolved_at` without making a `Place`."""
    steps, name = split_key(path)
    node = top
    for step in (*steps, name):
        found = child(view, node, step)
        if found is None:
            return None
        node = found
    return Resolved(node, load_node(view, node))


def has_children(view: View, node: NodeId, near: bytes = b"") -> bool:
    """Return True if any name is under `node`.

    `near` is a name under it that was just removed.  Names behind it are looked at first: otherwise each removal of
    many in order would step over all names removed before it.
    """
    start, end = node_key(node), range_end(node, b"")
    if near and _any_in(view, behind(start + near), end):
        return True
    return _any_in(view, start, end)


def _any_in(view: View, start: bytes, end: bytes) -> bool:
    return any(True for _ in view.scan(Table.NAMES, start, end))


def make_parents(txn: Transaction, bucket: str, place: Place, now_ns: int) -> None:
    """Make the missing parents of a place: implicit folders, which are noted, and hidden nodes."""
    parent = place.nodes[-1] if place.nodes else place.top
    for depth in range(len(place.nodes), len(place.steps)):
        step = place.steps[depth]
        node = new_folder(now_ns) if is_folder_step(step) else Node(kind=NodeKind.HIDDEN)
        parent = add_node(txn, name_key(parent, step), node.kind, node.pack())
        place.nodes.append(parent)
        if node.kind is NodeKind.FOLDER:
            txn.note(NameEvent("put", bucket, place.folder_key(depth), parent))
    assert place.complete, "every step has its node"


def names_changed(txn: Transaction, place: Place, changed_ns: int, *, is_past: bool = False) -> None:
    """Set the times of the nearest existing folder of a place to `changed_ns`, because its names have changed.

    With `is_past` a folder that has changed since keeps its modification time.  Its change time moves all the same, by
    1 ns, as it does when the clock stands or was set back: each change of its names moves it, and turns its stamp.

    Costs one read and one write of a short record, in the transaction that changes the name; many changes of one folder
    become one record when they are applied to the index.
    """
    for node, step in zip(reversed(place.nodes), reversed(place.steps[: len(place.nodes)]), strict=True):
        if is_folder_step(step) and _note_names(txn, node, changed_ns, is_past):
            return
    _note_names(txn, place.top, changed_ns, is_past)


def _note_names(txn: Transaction, folder: NodeId, changed_ns: int, is_past: bool) -> bool:
    key = node_key(folder)
    record = txn.get(Table.NODES, key)
    if record is None:
        return False
    before_ns = changed_at(record)
    if changed_ns > before_ns:
        txn.put(Table.NODES, key, with_names_changed(record, changed_ns))
    else:
        txn.put(Table.NODES, key, with_change_time(record, before_ns + 1, None if is_past else changed_ns))
    return True


def new_folder(now_ns: int, blob: BlobId | None = None) -> Node:
    """Return a folder's record; without a blob it is an implicit one."""
    return Node(kind=NodeKind.FOLDER, blob=blob, mode=FOLDER_MODE, mtime_ns=now_ns, ctime_ns=now_ns)


def add_node(txn: Transaction, key: bytes, kind: NodeKind, record: bytes) -> NodeId:
    """Add a node of that kind with its packed record, and its name at `key`, which the caller has seen to be absent."""
    node_id = txn.new_node_id()
    txn.insert(Table.NODES, node_key(node_id), record)
    txn.insert(Table.NAMES, key, pack_name(kind, node_id))
    return node_id


def remove_at(
    txn: Transaction, bucket: str, place: Place, node: NodeId, now_ns: int, keep_folder: bool = False
) -> None:
    """Remove the name at a place with its node, then the parents that only existed for it; see `prune`."""
    txn.delete(Table.NAMES, place.key)
    txn.delete(Table.NODES, node_key(node))
    prune(txn, bucket, place, now_ns, keep_folder)


def prune(txn: Transaction, bucket: str, place: Place, now_ns: int, keep_folder: bool = False) -> None:
    """Remove the empty implicit parents of a place in the bucket, upwards, and set the times of the folder above them.

    With `keep_folder` the folder that held the place stays, as an explicit one.  Folders that were removed, or became a
    key of their own, are noted.
    """
    _remove_empty(txn, bucket, place, keep_folder)
    names_changed(txn, place, now_ns)


def _remove_empty(txn: Transaction, bucket: str, place: Place, keep_folder: bool) -> None:
    assert place.complete, "a name that was removed had all its parents"
    removed = place.name
    for depth in reversed(range(len(place.steps))):
        node, step = place.nodes[depth], place.steps[depth]
        if has_children(txn, node, near=removed):
            return
        if is_folder_step(step):
            folder = load_node(txn, node)
            if folder.blob is not None:
                return
            if keep_folder:
                kept = msgspec.structs.replace(folder, blob=EMPTY_BLOB)
                txn.put(Table.NODES, node_key(node), kept.pack())
                txn.note(NameEvent("put", bucket, place.folder_key(depth), node, blob=EMPTY_BLOB))
                return
            txn.note(NameEvent("delete", bucket, place.folder_key(depth), node))
        above = place.nodes[depth - 1] if depth else place.top
        txn.delete(Table.NAMES, name_key(above, step))
        txn.delete(Table.NODES, node_key(node))
        removed = step
