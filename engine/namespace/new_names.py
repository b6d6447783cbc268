"""Runs of new names: many objects in one folder, bound as columns, as `binding` would bind them one after the other.

A run is for a bucket that keeps no versions.  Its names differ from each other, have no condition, and are bound to
objects that differ in nothing but their columns (`engine.format.columns.ObjectColumns`).  So the folder is found once,
one look-up tells which names exist, one record is packed for all, and each table gets one mutation.

Names of a run that exist already are bound one by one, in order, and so are new ones of which only a few stand
together.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, repeat
from typing import Final

import msgspec

from engine.format.columns import ObjectColumns, pack_names, pack_nodes
from engine.format.layouts import NodeKind, Table, node_key
from engine.namespace.binding import Binder, Binding
from engine.namespace.buckets import BucketRef
from engine.namespace.object_stat import to_object_stat, to_object_stats
from engine.namespace.tree import NameEvent, Place
from lakefs.errors import UserError
from lakefs.ids import NodeId
from lakefs.wire.messages import ObjectStat

RUN_MIN: Final = 8
"""Fewer names are bound one by one: columns would cost as much, or more (bench.put_cpu)."""


class Run(msgspec.Struct):
    """Plain names to bind in one folder; see above.  `binding(i)` returns the i-th by itself."""

    bucket: BucketRef
    folder: bytes
    """Path of the folder, which is empty or ends with `/`."""
    names: list[bytes]
    """Names in the folder, each under 480 bytes."""
    keys: list[str]
    """Keys of the names in the bucket."""
    objects: ObjectColumns
    binding: Callable[[int], Binding]


def bind_run(binder: Binder, run: Run) -> list[ObjectStat | UserError]:
    """Bind the names of a run, those that exist too; returns what became of each, in order."""
    assert not run.bucket.versioning, "names of a bucket with versions are bound one by one"
    place = binder.find((run.bucket.node, run.folder), run.names[0])
    if not place.complete:
        return [*_insert(binder, run, place, 0, len(run.names))]
    present = binder.txn.present(Table.NAMES, _name_keys(place, run.names))
    if not present:
        return [*_insert(binder, run, place, 0, len(run.names))]
    parent = node_key(place.parent)
    outcomes: list[ObjectStat | UserError] = []
    for exists, stretch in groupby(run.names, lambda name: parent + name in present):
        start, count = len(outcomes), len(list(stretch))
        if exists or count < RUN_MIN:
            outcomes += [_bind_one(binder, run.binding(index)) for index in range(start, start + count)]
        else:
            outcomes += _insert(binder, run, place, start, start + count)
    return outcomes


def _bind_one(binder: Binder, binding: Binding) -> ObjectStat | UserError:
    outcome = binder.try_bind(binding)
    if isinstance(outcome, UserError):
        return outcome
    return to_object_stat(binding.bucket.name, binding.key, outcome.node_id, outcome.node)


def _insert(binder: Binder, run: Run, place: Place, start: int, stop: int) -> list[ObjectStat]:
    """Bind some names of a run, none of which exists; `place` is that of any name in their folder."""
    txn, bucket, folder = binder.txn, run.bucket, (run.bucket.node, run.folder)
    names, keys = run.names[start:stop], run.keys[start:stop]
    objects = run.objects.part(start, stop)
    binder.note_new(folder, place)
    binder.make_parents(bucket, folder, names[0], place)
    first = txn.new_node_ids(len(names))
    ids = range(first, first + len(names))
    node = run.binding(start).node
    txn.insert_many(Table.NODES, [node_key(NodeId(node_id)) for node_id in ids], pack_nodes(node, objects))
    txn.insert_many(Table.NAMES, _name_keys(place, names), pack_names(NodeKind.OBJECT, first, len(names)))
    txn.note(*map(NameEvent, repeat("put"), repeat(bucket.name), keys, ids, repeat(""), repeat(""), objects.blobs))
    return to_object_stats(to_object_stat(bucket.name, keys[0], first, node), keys, ids, objects)


def _name_keys(place: Place, names: list[bytes]) -> list[bytes]:
    """Return the keys in the table `names` of names in the folder of a place."""
    parent = node_key(place.parent)
    return [parent + name for name in names]
