"""Conditions of changes: what a client has decided upon, compared with what is there when the change is decided.

Conditions on a node (its id, ETag, size, time, content) are S3's and the mount's; conditions on a place (the folder
that a name is in, names of the other kind at the same path) are the mount's: it decides upon what it has seen, and a
change elsewhere must not be undone by it.

Decisions as in `names`, under the same rules: nothing is written here.
"""

from __future__ import annotations

from typing import Final

from engine.format.layouts import Table, node_key, unpack_node
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import is_folder_step, lookup_path
from engine.namespace.object_stat import bound_ns_of, etag_of
from engine.namespace.refusals import shown_name, subject
from engine.namespace.tree import Place, Resolved, child, find_place
from engine.namespace.versions import find_old
from engine.tables.views import View
from lakefs.errors import KeyNotFound, PreconditionFailed
from lakefs.ids import NodeId
from lakefs.wire.messages import NO_CONDITION, Condition

_NS: Final = 1_000_000_000


def check_condition(
    view: View, condition: Condition, present: Resolved | None, bucket: BucketRef, key: str, place: Place | None = None
) -> None:
    """Raise PreconditionFailed, naming the object and the failed part, unless every part of `condition` holds.

    `present` is the node of the key; `place` is where it is, if the caller has found that.  Raises KeyNotFound if an
    ETag is expected of a name that does not exist: a client that retries needs the difference.
    """
    if condition == NO_CONDITION:
        return
    if present is None and condition.etags:
        raise KeyNotFound(
            f"{shown_name(bucket, key)} does not exist, and so has none of the expected ETags; nothing was changed",
            subject=subject(bucket, key),
        )
    failed = _failed_of_node(condition, present) or _failed_of_place(view, condition, bucket, key, place)
    if failed:
        raise PreconditionFailed(
            f"{shown_name(bucket, key)} was not changed: {failed}; look at it again and retry",
            subject=subject(bucket, key),
        )


def _failed_of_node(condition: Condition, present: Resolved | None) -> str:
    """Return the part on the present node that does not hold, in words; empty if all parts hold."""
    if present is None:
        return "it does not exist" if condition.node or condition.blob else ""
    if condition.absent:
        return "it exists already"
    if condition.node and condition.node != present.node_id:
        return "it was replaced meanwhile"
    if condition.blob and condition.blob != present.node.blob:
        return "it has other content by now"
    if condition.size_bytes not in (None, present.node.size_bytes):
        return f"its size is {present.node.size_bytes} bytes, not the expected one"
    if condition.mtime_s not in (None, bound_ns_of(present.node) // _NS):
        return "its modification time, as S3 shows it, is not the expected one"
    if not (condition.etags or condition.not_etags):
        return ""
    etag = etag_of(present.node)
    if condition.etags and etag not in condition.etags and "*" not in condition.etags:
        return f"its ETag is {etag}, not the expected one"
    if etag in condition.not_etags or "*" in condition.not_etags:
        return f"its ETag is {etag}, which was excluded"
    return ""


def _failed_of_place(view: View, condition: Condition, bucket: BucketRef, key: str, place: Place | None) -> str:
    """Return the part on the place that does not hold, in words; empty if all parts hold."""
    if condition.folder or condition.alone:
        place = place or find_place(view, bucket.node, lookup_path(key))
        if condition.folder and condition.folder != folder_node(place):
            return "its folder was removed, renamed or replaced meanwhile"
        if condition.alone and has_twin(view, place):
            return "a folder has its path" if not key.endswith("/") else "an object has its path"
    if condition.gone and _has_name(view, bucket, key, node_of(condition.gone)):
        return "what was to be replaced has another name by now"
    return ""


def folder_node(place: Place) -> NodeId:
    """Return the node of the folder that a place is in; 0 if that folder does not exist."""
    if not place.complete:
        return NodeId(0)
    for node, step in zip(reversed(place.nodes), reversed(place.steps), strict=True):
        if is_folder_step(step):
            return node
    return place.top


def node_of(number: int) -> NodeId:
    """Return the node of a number that a client sent; 0, which no node has, for a number that none can have."""
    return NodeId(number if 0 < number < 1 << 64 else 0)


def has_twin(view: View, place: Place) -> bool:
    """Return True if a name of the other kind has the path: a folder `a/` for `a`, an object or symlink for `a/`."""
    twin = place.name[:-1] if place.name.endswith(b"/") else place.name + b"/"
    return place.complete and child(view, place.parent, twin) is not None


def _has_name(view: View, bucket: BucketRef, key: str, node: NodeId) -> bool:
    """Return True if a node has a name: it exists, and is not a former version of this key."""
    record = view.get(Table.NODES, node_key(node))
    if record is None:
        return False
    old = find_old(view, bucket, key, max(unpack_node(record).attributes.version, 0)) if bucket.versioning else None
    return old is None or old.node_id != node
