"""Exchange two names of one bucket: each gets the other's node, in one decision, and no moment shows only one of them.

Decisions as in `names`, under the same rules.  Rules kept here:
- Names of one kind change their nodes in place: two records.  A folder and an object change keys too, as a folder's
  ends with `/`: the new keys must be free, since `a` and `a/` may coexist.
- In a bucket that keeps versions each object becomes a new version of its new key.  Older versions stay with their
  key; one that no object has any more gets a delete marker, as in `names.rename`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from engine.format.layouts import Table, node_key, pack_name
from engine.namespace.buckets import BucketRef
from engine.namespace.conditions import check_condition, folder_node
from engine.namespace.keys import check_key, lookup_path
from engine.namespace.refusals import already_there, not_found, shown_name, subject
from engine.namespace.tree import NameEvent, Place, Resolved, child_at, find_place, names_changed, resolved_at
from engine.namespace.version_keys import group_of
from engine.namespace.versions import add_marker, make_room, newest_old, numbered
from engine.tables.views import Transaction
from lakefs.errors import InvalidArgument
from lakefs.wire.messages import NO_CONDITION, Condition


class _Move(NamedTuple):
    """A node with its key and place, and the key and place that it gets."""

    key: str
    place: Place
    found: Resolved
    new_key: str
    new_place: Place


def exchange(
    txn: Transaction,
    bucket: BucketRef,
    key: str,
    to_key: str,
    now_ns: int,
    condition: Condition = NO_CONDITION,
    to_condition: Condition = NO_CONDITION,
) -> tuple[str, Resolved]:
    """Exchange the nodes of two keys; return the new key of the first one's node, and that node.

    A folder takes all that is below it along.  The change times of both nodes are now.  Done twice it undoes itself, so
    a client that may ask twice gives the nodes in its conditions.  Raises KeyNotFound, PreconditionFailed, InvalidName,
    AlreadyExists (a folder and an object, and a new key is taken), InvalidArgument (one below the other, a bucket).
    """
    _check_keys(bucket, key, to_key)
    place, to_place = (find_place(txn, bucket.node, lookup_path(each)) for each in (key, to_key))
    found, to_found = resolved_at(txn, place), resolved_at(txn, to_place)
    if found is None:
        raise not_found(bucket, key)
    check_condition(txn, condition, found, bucket, key, place)
    if key == to_key:
        return key, found
    if to_found is None:
        raise not_found(bucket, to_key)
    check_condition(txn, to_condition, to_found, bucket, to_key, to_place)

    moves = _move(bucket, key, place, found, to_key, to_place), _move(bucket, to_key, to_place, to_found, key, place)
    if moves[0].new_key != to_key:
        _free_keys(txn, bucket, moves, now_ns)
    moved, _ = [_bind(txn, bucket, move, now_ns) for move in moves]
    for at in {folder_node(each): each for each in (place, to_place)}.values():
        names_changed(txn, at, now_ns)
    return moves[0].new_key, moved


def _check_keys(bucket: BucketRef, key: str, to_key: str) -> None:
    if not key or not to_key:
        raise InvalidArgument("a bucket cannot be exchanged; name objects or folders in it", subject=bucket.name)
    for above, below in ((key, to_key), (to_key, key)):
        if above.endswith("/") and below.startswith(above) and below != above:
            raise InvalidArgument(
                f"{shown_name(bucket, below)} is below {shown_name(bucket, above)}: they cannot be exchanged",
                subject=subject(bucket, below),
            )


def _move(bucket: BucketRef, key: str, place: Place, found: Resolved, to_key: str, to_place: Place) -> _Move:
    """Return the move to the other's key, with a final `/` if this one is a folder.

    The other's place has all its nodes, also hidden ones: the folder and the object of one path have the same.
    """
    suffix = "/" if key.endswith("/") else ""
    name = to_place.name.removesuffix(b"/") + suffix.encode()
    return _Move(key, place, found, to_key.removesuffix("/") + suffix, replace(to_place, name=name))


def _free_keys(txn: Transaction, bucket: BucketRef, moves: Iterable[_Move], now_ns: int) -> None:
    """Remove the names of a folder and an object, which get other keys.  AlreadyExists, InvalidName."""
    for move in moves:
        check_key(move.new_key)
        if child_at(txn, move.new_place) is not None:
            raise already_there(bucket, move.new_key)
    for move in moves:
        txn.delete(Table.NAMES, move.place.key)
        path = lookup_path(move.key)
        is_object = not move.key.endswith("/")
        if is_object and bucket.versioning and newest_old(txn, group_of(bucket.node, path)) is not None:
            add_marker(txn, bucket, path, now_ns, always_numbered=True)


def _bind(txn: Transaction, bucket: BucketRef, move: _Move, now_ns: int) -> Resolved:
    """Bind a node to its new key; return it."""
    found = move.found
    # A folder's change time says if its names have changed: it never turns back.
    node = msgspec.structs.replace(found.node, ctime_ns=max(now_ns, found.node.ctime_ns + 1))
    if bucket.versioning and not move.key.endswith("/"):
        make_room(txn, bucket, lookup_path(move.new_key), None)
        node = numbered(txn, bucket, node)
    txn.put(Table.NODES, node_key(found.node_id), node.pack())
    txn.put(Table.NAMES, move.new_place.key, pack_name(node.kind, found.node_id))
    txn.note(NameEvent("rename", bucket.name, move.key, found.node_id, bucket.name, move.new_key))
    return Resolved(found.node_id, node)
