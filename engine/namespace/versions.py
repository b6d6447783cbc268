"""Versions of objects: the former nodes of a key, in buckets that keep versions, as in S3.

Pure decisions on one view or transaction, as in `names`.  Rules kept here:
- The present version of a key is only in the table `names`, its former ones only in `versions`.  Both refer to nodes,
  so gc needs to know neither table.  A bucket that never kept versions has none there: nothing is looked up.
- A version is known by its number, which no other version of the store has, or as `null` if it was written while
  versioning was never enabled, or suspended.  A key has at most one `null`.  Two meet only if the rename of a folder
  brings one to a key that has another: the older is then known by its order (`version_keys`).
- A delete marker is a node without blob.  No name is bound to one: a deleted key has no name, and its newest version
  is the marker.  A key with versions, without a name and without a marker as the newest, lost its name to the rename
  of a folder; it does not exist, like any other.
- Keys that end in `/` have no versions: a folder is one node for as long as it exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from engine.format.layouts import Node, NodeKind, Table, node_key
from engine.format.records import VersionRecord, decode_record
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import lookup_path
from engine.namespace.refusals import shown_name, subject
from engine.namespace.tree import Resolved, load_node
from engine.namespace.version_keys import KEY_BYTES_KEPT, behind_groups, group_of, null_key, order_key
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument, StoreUnusable, VersionNotFound
from lakefs.ids import NodeId

ENABLED: Final = "enabled"
NULL: Final = "null"
_VERSION: Final = 1
_NUMBER_END: Final = 1 << 63
_NUMBERED: Final = re.compile(r"[0-9a-f]{16}")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(VersionRecord)


class OldVersion(msgspec.Struct, frozen=True):
    """A former version, bound to no name: its key in the table, and its record."""

    key: bytes
    record: VersionRecord

    @property
    def node_id(self) -> NodeId:
        """The version's node."""
        return NodeId(self.record.node)


# --- ids -----------------------------------------------------------------------------------------------


def version_id(bucket: BucketRef, node: Node) -> str:
    """Return the id of the version that a node is; empty if the bucket never kept versions."""
    return shown_version(node) if bucket.versioning else ""


def shown_version(node: Node) -> str:
    """Return the id of the version that a node is, in a bucket with versions."""
    number = node.attributes.version
    return f"{number:016x}" if number > 0 else NULL


def checked_version(version: str) -> int:
    """Return the number of a version's id, 0 for `null`.  Raises InvalidArgument if it is not a version id."""
    if version == NULL:
        return 0
    if not _NUMBERED.fullmatch(version):
        raise InvalidArgument(f"{version[:64]!a} is no id of a version; it is 'null' or 16 hex digits")
    return int(version, 16)


def version_not_found(bucket: BucketRef, key: str, version: str) -> VersionNotFound:
    """The key has no such version."""
    return VersionNotFound(
        f"{shown_name(bucket, key)} has no version {version[:64]}: it was removed, or never was",
        subject=subject(bucket, key),
    )


# --- looking -------------------------------------------------------------------------------------------


def unpack_version(value: bytes) -> VersionRecord:
    """Decode a version's record.  Raises StoreUnusable for an unknown version of the format."""
    record = decode_record(_decoder, value, "a version's record")
    if record.version != _VERSION:
        raise StoreUnusable(f"version record version {record.version} is not known")
    return record


def old_versions(view: View, group: bytes, below: int = 0) -> Iterator[OldVersion]:
    """Yield the former versions of a key, newest first; only those with an order under `below` (0: all)."""
    null = _at(view, null_key(group))
    start = order_key(group, below - 1) if below > 1 else group + b"\0" * 7 + b"\1"
    if below and null is not None and null.record.order >= below:
        null = None
    if below != 1:
        for key, value in view.scan(Table.VERSIONS, start, behind_groups(group)):
            record = unpack_version(value)
            if null is not None and null.record.order > record.order:
                yield null
                null = None
            yield OldVersion(key, record)
    if null is not None:
        yield null


def newest_old(view: View, group: bytes) -> OldVersion | None:
    """Return the newest former version of a key, or None."""
    return next(old_versions(view, group), None)


def find_old(view: View, bucket: BucketRef, key: str, number: int) -> OldVersion | None:
    """Return the former version of that number (0: `null`), or None; a `null` is also found by its order."""
    group = group_of(bucket.node, lookup_path(key))
    if number >= _NUMBER_END:
        return None
    found = _at(view, order_key(group, number)) if number else None
    if found is None:
        found = _at(view, null_key(group))
        if found is not None and number not in (0, found.record.order):
            return None
    return found


def is_version(found: Resolved, number: int) -> bool:
    """Return True if the present version of a key has that number (0: `null`); a `null` also matches its order."""
    version = found.node.attributes.version
    return number == max(version, 0) or (version <= 0 and number == order_of(found))


def order_of(found: Resolved) -> int:
    """Return the order of a version; a `null` has one too."""
    return abs(found.node.attributes.version) or found.node_id


def is_deleted(view: View, bucket: BucketRef, key: str) -> bool:
    """Return True if the newest version of a key without a name is a delete marker."""
    if not bucket.versioning:
        return False
    newest = newest_old(view, group_of(bucket.node, lookup_path(key)))
    return newest is not None and load_node(view, newest.node_id).is_marker


def _at(view: View, key: bytes) -> OldVersion | None:
    value = view.get(Table.VERSIONS, key)
    return None if value is None else OldVersion(key, unpack_version(value))


# --- changing ------------------------------------------------------------------------------------------


def numbered(txn: Transaction, bucket: BucketRef, node: Node) -> Node:
    """Return the record as that of a new version in its bucket."""
    number = 0
    if bucket.versioning:
        number = txn.new_node_id() if bucket.versioning == ENABLED else -txn.new_node_id()
    return with_number(node, number)


def make_room(txn: Transaction, bucket: BucketRef, path: bytes, old: Resolved | None, *, is_kept: bool = False) -> None:
    """Move the present node aside before a new version is bound: keep it as a version, or delete a replaced `null`.

    With `is_kept` the new version takes the present node, and the old content gets a node of its own.
    """
    group = group_of(bucket.node, path)
    if bucket.versioning == ENABLED:
        if old is not None:
            _keep(txn, group, path, _on_own_node(txn, old) if is_kept else old)
        return
    if old is not None and old.node.attributes.version <= 0:
        _free_null(txn, group, path)
        if not is_kept:
            txn.delete(Table.NODES, node_key(old.node_id))
        return
    if old is not None:
        _keep(txn, group, path, _on_own_node(txn, old) if is_kept else old)
    null = _at(txn, null_key(group))
    if null is not None:
        remove_old(txn, null)


def add_marker(txn: Transaction, bucket: BucketRef, path: bytes, now_ns: int, *, always_numbered: bool = False) -> Node:
    """Put a delete marker on top of a key's versions.  The caller has made room for it (or its place is free)."""
    marker = Node(kind=NodeKind.OBJECT, mtime_ns=now_ns, ctime_ns=now_ns)
    if always_numbered:
        marker = with_number(marker, txn.new_node_id())
    else:
        marker = numbered(txn, bucket, marker)
    assert marker.is_marker, "a delete marker is a node without blob"
    node_id = txn.new_node_id()
    txn.insert(Table.NODES, node_key(node_id), marker.pack())
    _keep(txn, group_of(bucket.node, path), path, Resolved(node_id, marker))
    return marker


def remove_old(txn: Transaction, found: OldVersion) -> None:
    """Remove a former version with its node."""
    release_old(txn, found)
    txn.delete(Table.NODES, node_key(found.node_id))


def release_old(txn: Transaction, found: OldVersion) -> None:
    """Remove a version from the table; its node stays."""
    txn.delete(Table.VERSIONS, found.key)


def _keep(txn: Transaction, group: bytes, path: bytes, old: Resolved) -> None:
    """Add a node that loses its name, or never had one, to the versions of a key."""
    number = old.node.attributes.version
    if number > 0:
        key = order_key(group, number)
    else:
        _free_null(txn, group, path)
        key = null_key(group)
    _insert(txn, key, path, old.node_id, order_of(old))


def _free_null(txn: Transaction, group: bytes, path: bytes) -> None:
    """Make way for another version `null`: from now on the present one is known by its order."""
    found = _at(txn, null_key(group))
    if found is None:
        return
    order = found.record.order
    node = with_number(load_node(txn, found.node_id), order)
    txn.put(Table.NODES, node_key(found.node_id), node.pack())
    txn.delete(Table.VERSIONS, found.key)
    _insert(txn, order_key(group, order), path, found.node_id, order)


def _insert(txn: Transaction, key: bytes, path: bytes, node_id: NodeId, order: int) -> None:
    assert not path.endswith(b"/"), "folders have no versions"
    assert 0 < order < _NUMBER_END, "an order is a number of the counter `node`"
    whole = path if len(path) > KEY_BYTES_KEPT else b""
    txn.insert(Table.VERSIONS, key, _encoder.encode(VersionRecord(_VERSION, node_id, order, whole)))


def _on_own_node(txn: Transaction, old: Resolved) -> Resolved:
    """Copy the old content to a node of its own, because the new version takes its node."""
    node_id = txn.new_node_id()
    number = old.node.attributes.version or -old.node_id
    node = with_number(old.node, number)
    txn.insert(Table.NODES, node_key(node_id), node.pack())
    return Resolved(node_id, node)


def with_number(node: Node, number: int) -> Node:
    """Return the record as that of the version with this number."""
    if node.attributes.version == number:
        return node
    attributes = msgspec.structs.replace(node.attributes, version=number)
    return msgspec.structs.replace(node, attributes=attributes)


def node_of(view: View, found: OldVersion, number: int = 0) -> Resolved:
    """Return a version with its node's record; under `number`, if given: a second `null` is known by its order."""
    node = load_node(view, found.node_id)
    return Resolved(found.node_id, with_number(node, number) if number else node)
