"""Removal of names: keys, empty folders, and single versions of keys.

Decisions as in `names`, under the same rules: no `await`, and a function that raises has changed nothing.

In a bucket that keeps versions, removing a key that is not a folder puts a delete marker on top of its versions, even
if the key does not exist, as in S3.  Removing one version is permanent.  If it was the present version, or the marker
on top, the newest remaining version takes its place.
"""

from __future__ import annotations

import msgspec

from engine.format.layouts import NO_ATTRIBUTES, EtagKind, Table, node_key, pack_name
from engine.namespace.binding import condition_subject
from engine.namespace.buckets import BucketRef
from engine.namespace.conditions import check_condition, has_twin
from engine.namespace.keys import check_key, lookup_path
from engine.namespace.names import folder_key
from engine.namespace.refusals import not_empty, not_found, object_instead
from engine.namespace.tree import (
    NameEvent,
    Place,
    Resolved,
    child_at,
    find_place,
    has_children,
    make_parents,
    names_changed,
    prune,
    remove_at,
    resolved_at,
)
from engine.namespace.version_keys import group_of
from engine.namespace.versions import (
    add_marker,
    checked_version,
    find_old,
    is_version,
    make_room,
    newest_old,
    node_of,
    release_old,
    remove_old,
    shown_version,
)
from engine.tables.views import Transaction
from lakefs.errors import InvalidName
from lakefs.wire.messages import NO_CONDITION, Condition


class Removal(msgspec.Struct, frozen=True):
    """The node that a removal took away (its change time is now), and the id of the delete marker it left."""

    found: Resolved | None
    marker: str = ""


def remove(
    txn: Transaction, bucket: BucketRef, key: str, condition: Condition, now_ns: int, keep_folder: bool = False
) -> Removal:
    """Remove a key; in a bucket that keeps versions, by a delete marker on top of them.

    For a key that ends in `/` the folder loses its own blob: it is removed if empty, else it stays as an implicit one.
    Implicit parents vanish with their last child; with `keep_folder` the nearest of them stays.
    Raises InvalidName (empty key; with versions any invalid key), and the errors of `check_condition`.
    """
    if bucket.versioning and key and not key.endswith("/"):
        return _put_marker(txn, bucket, key, condition, now_ns, keep_folder)
    return Removal(_remove_for_good(txn, bucket, key, condition, now_ns, keep_folder))


def _remove_for_good(
    txn: Transaction, bucket: BucketRef, key: str, condition: Condition, now_ns: int, keep_folder: bool
) -> Resolved | None:
    _check_given(bucket, key)
    place = find_place(txn, bucket.node, lookup_path(key))
    is_folder = key.endswith("/")
    found = condition_subject(txn, child_at(txn, place), is_folder)
    check_condition(txn, condition, found, bucket, key, place)
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


def _put_marker(
    txn: Transaction, bucket: BucketRef, key: str, condition: Condition, now_ns: int, keep_folder: bool
) -> Removal:
    path = check_key(key, None)
    place = find_place(txn, bucket.node, path)
    found = resolved_at(txn, place)
    if found is None:
        check_key(key)
    check_condition(txn, condition, found, bucket, key, place)
    make_room(txn, bucket, path, found)
    marker = add_marker(txn, bucket, path, now_ns)
    if found is None:
        return Removal(None, shown_version(marker))
    txn.note(NameEvent("delete", bucket.name, key, found.node_id))
    txn.delete(Table.NAMES, place.key)
    prune(txn, bucket.name, place, now_ns, keep_folder)
    return Removal(_removed(found, now_ns), shown_version(marker))


def remove_folder(
    txn: Transaction, bucket: BucketRef, key: str, condition: Condition, now_ns: int, keep_folder: bool = False
) -> Resolved:
    """Remove an empty folder and return it.  `key` may lack its final `/`.  `keep_folder` as in `remove`.

    Raises KeyNotFound, NotAFolder, FolderNotEmpty, PreconditionFailed, InvalidName (empty key).
    """
    _check_given(bucket, key)
    key = folder_key(key)
    place = find_place(txn, bucket.node, lookup_path(key))
    found = resolved_at(txn, place)
    if found is None:
        raise object_instead(bucket, key) if has_twin(txn, place) else not_found(bucket, key)
    check_condition(txn, condition, found, bucket, key, place)
    if has_children(txn, found.node_id):
        raise not_empty(bucket, key)
    txn.note(NameEvent("delete", bucket.name, key, found.node_id))
    remove_at(txn, bucket.name, place, found.node_id, now_ns, keep_folder)
    return _removed(found, now_ns)


# --- versions ------------------------------------------------------------------------------------------


def remove_version(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    version: str,
    now_ns: int,
    condition: Condition = NO_CONDITION,
    keep_folder: bool = False,
) -> Resolved | None:
    """Remove one version of a key permanently; returns it, or None if it did not exist.  The condition is on that one.

    Raises InvalidArgument (not a version id), InvalidName (empty key), and the errors of `check_condition`.
    """
    number = checked_version(version)
    _check_given(bucket, key)
    if not bucket.versioning or key.endswith("/"):
        if number:
            check_condition(txn, condition, None, bucket, key)
            return None
        return _remove_for_good(txn, bucket, key, condition, now_ns, keep_folder)
    path = lookup_path(key)
    group = group_of(bucket.node, path)
    place = find_place(txn, bucket.node, path)
    present = resolved_at(txn, place)
    if present is not None and is_version(present, number):
        check_condition(txn, condition, present, bucket, key)
        txn.delete(Table.NODES, node_key(present.node_id))
        txn.delete(Table.NAMES, place.key)
        if not _bind_newest(txn, bucket, key, place, group, now_ns):
            txn.note(NameEvent("delete", bucket.name, key, present.node_id))
            prune(txn, bucket.name, place, now_ns, keep_folder)
        return _removed(present, now_ns)
    old = find_old(txn, bucket, key, number)
    if old is None:
        check_condition(txn, condition, None, bucket, key)
        return None
    found = node_of(txn, old, number)
    check_condition(txn, condition, None if found.node.is_marker else found, bucket, key)
    newest = newest_old(txn, group)
    remove_old(txn, old)
    if present is None and found.node.is_marker and newest == old:
        _bind_newest(txn, bucket, key, place, group, now_ns)
    return _removed(found, now_ns)


def _bind_newest(txn: Transaction, bucket: BucketRef, key: str, place: Place, group: bytes, now_ns: int) -> bool:
    """Bind a key that has no name to the newest of its versions; False if it has none, or that is a delete marker."""
    newest = newest_old(txn, group)
    if newest is None:
        return False
    found = node_of(txn, newest)
    if found.node.is_marker:
        return False
    assert child_at(txn, place) is None, "a key has one name"
    release_old(txn, newest)
    names_changed(txn, place, now_ns)
    make_parents(txn, bucket.name, place, now_ns)
    txn.put(Table.NAMES, place.key, pack_name(found.kind, found.node_id))
    txn.note(NameEvent("put", bucket.name, key, found.node_id, blob=found.node.blob))
    return True


def _check_given(bucket: BucketRef, key: str) -> None:
    if not key:
        raise InvalidName(f"no key was given; to remove a bucket: lake bucket rm {bucket.name}", subject=bucket.name)


def _removed(found: Resolved, now_ns: int) -> Resolved:
    """Return the removed node with a new change time, for clients that have it open."""
    return Resolved(found.node_id, msgspec.structs.replace(found.node, ctime_ns=now_ns))
