"""Removing names: keys, empty folders, and single versions of keys.

Decisions as in `names`, under the same rules: no `await`, and one that raises has changed nothing.

In a bucket that keeps versions the removal of a key that is no folder puts a delete marker on top of its versions,
whether there was anything or not, as S3 has it.  The removal of one version is for good; when it was what the key is
bound to, or the marker on top, the newest one that is left takes its place.
"""

from __future__ import annotations

import msgspec

from engine.format.layouts import NO_ATTRIBUTES, EtagKind, Table, node_key, pack_name
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import check_key, lookup_path
from engine.namespace.names import condition_subject, folder_key, same_named_object
from engine.namespace.object_stat import check_condition
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
    """What the removal of a key took away, changed now, and the id of the delete marker that it left."""

    found: Resolved | None
    marker: str = ""


def remove(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    condition: Condition,
    now_ns: int,
    keep_folder: bool = False,
) -> Removal:
    """Remove a key; in a bucket that keeps versions by a delete marker on top of them.

    For a key that ends in `/` the folder loses its own blob: it goes when it is empty, and else stays as one that
    nobody made.  Parents that nobody made go with their last child, or with `keep_folder` the first of them stays.
    InvalidName (empty key; in a bucket that keeps versions any that cannot be), and what `check_condition` raises.
    """
    if bucket.versioning and key and not key.endswith("/"):
        return _put_marker(txn, bucket, key, condition, now_ns, keep_folder)
    return Removal(_remove_for_good(txn, bucket, key, condition, now_ns, keep_folder))


def unbind(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    condition: Condition,
    now_ns: int,
    keep_folder: bool = False,
) -> Resolved | None:
    """As `remove`; what the key was bound to, changed now; None when it was not there."""
    return remove(txn, bucket, key, condition, now_ns, keep_folder).found


def _remove_for_good(
    txn: Transaction, bucket: BucketRef, key: str, condition: Condition, now_ns: int, keep_folder: bool
) -> Resolved | None:
    _check_given(bucket, key)
    place = find_place(txn, bucket.node, lookup_path(key))
    is_folder = key.endswith("/")
    found = condition_subject(txn, child_at(txn, place), is_folder)
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


def _put_marker(
    txn: Transaction, bucket: BucketRef, key: str, condition: Condition, now_ns: int, keep_folder: bool
) -> Removal:
    path = check_key(key)
    place = find_place(txn, bucket.node, path)
    found = resolved_at(txn, place)
    check_condition(condition, found, bucket.name, key)
    make_room(txn, bucket, path, found)
    marker = add_marker(txn, bucket, path, now_ns)
    if found is None:
        return Removal(None, shown_version(marker))
    txn.note(NameEvent("delete", bucket.name, key, found.node_id))
    txn.delete(Table.NAMES, place.key)
    prune(txn, bucket.name, place, now_ns, keep_folder)
    return Removal(_removed(found, now_ns), shown_version(marker))


def remove_folder(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    condition: Condition,
    now_ns: int,
    keep_folder: bool = False,
) -> Resolved:
    """Remove an empty folder; what it was, changed now.  `key` may lack its final `/`.  `keep_folder` as in `remove`.

    KeyNotFound, NotAFolder, FolderNotEmpty, PreconditionFailed, InvalidName (empty key).
    """
    _check_given(bucket, key)
    key = folder_key(key)
    place = find_place(txn, bucket.node, lookup_path(key))
    found = resolved_at(txn, place)
    if found is None:
        raise object_instead(bucket, key) if same_named_object(txn, place) else not_found(bucket, key)
    check_condition(condition, found, bucket.name, key)
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
    """Remove one version of a key for good; what it was, None when there was none.  The condition is about that one.

    InvalidArgument (no id of a version), InvalidName (empty key), and what `check_condition` raises.
    """
    number = checked_version(version)
    _check_given(bucket, key)
    if not bucket.versioning or key.endswith("/"):
        if number:
            check_condition(condition, None, bucket.name, key)
            return None
        return _remove_for_good(txn, bucket, key, condition, now_ns, keep_folder)
    path = lookup_path(key)
    group = group_of(bucket.node, path)
    place = find_place(txn, bucket.node, path)
    present = resolved_at(txn, place)
    if present is not None and is_version(present, number):
        check_condition(condition, present, bucket.name, key)
        _remove_present(txn, bucket, key, place, present, group, now_ns, keep_folder)
        return _removed(present, now_ns)
    old = find_old(txn, bucket, key, number)
    if old is None:
        check_condition(condition, None, bucket.name, key)
        return None
    found = node_of(txn, old, number)
    check_condition(condition, None if found.node.is_marker else found, bucket.name, key)
    newest = newest_old(txn, group)
    remove_old(txn, old)
    if present is None and found.node.is_marker and newest == old:
        _bind_newest(txn, bucket, key, place, group, now_ns)
    return _removed(found, now_ns)


def _remove_present(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    place: Place,
    present: Resolved,
    group: bytes,
    now_ns: int,
    keep_folder: bool,
) -> None:
    """Remove what a key is bound to; the newest version that is left takes its place, unless that is a marker."""
    newest = newest_old(txn, group)
    txn.delete(Table.NODES, node_key(present.node_id))
    txn.delete(Table.NAMES, place.key)
    if newest is not None and not node_of(txn, newest).node.is_marker:
        _bind_newest(txn, bucket, key, place, group, now_ns)
        return
    txn.note(NameEvent("delete", bucket.name, key, present.node_id))
    prune(txn, bucket.name, place, now_ns, keep_folder)


def _bind_newest(
    txn: Transaction, bucket: BucketRef, key: str, place: Place, group: bytes, now_ns: int
) -> None:
    """Bind a key that has no name to the newest of its versions; not to a delete marker."""
    newest = newest_old(txn, group)
    if newest is None:
        return
    found = node_of(txn, newest)
    if found.node.is_marker:
        return
    release_old(txn, newest)
    names_changed(txn, place, now_ns)
    make_parents(txn, bucket.name, place, now_ns)
    txn.put(Table.NAMES, place.key, pack_name(found.kind, found.node_id))
    txn.note(NameEvent("put", bucket.name, key, found.node_id, blob=found.node.blob))


def _check_given(bucket: BucketRef, key: str) -> None:
    if not key:
        raise InvalidName(
            f"no key was given; to remove a bucket: lake bucket rm {bucket.name}", subject=bucket.name
        )


def _removed(found: Resolved, now_ns: int) -> Resolved:
    """What is left of a node without a name, for those who have it open."""
    return Resolved(found.node_id, msgspec.structs.replace(found.node, ctime_ns=now_ns))
