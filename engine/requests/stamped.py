"""Stamps of names that a request has just bound: those that OpenObjects of each would have, without looking it up.

The records that an answer about a name rests on are the bucket's, those on the way to its folder, its own, and its
node's.  The first two are read once for all names of a folder; the others are known from the request's results.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.format.layouts import Table, node_key
from engine.namespace.buckets import find_bucket
from engine.namespace.keys import lookup_path, name_key
from engine.namespace.tree import find_place
from engine.tables.recorded_view import Record, RecordedView
from lakefs.ids import NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES
from lakefs.wire.messages import NameResult, ObjectStat


def with_stamps(view: RecordedView, results: Sequence[NameResult]) -> list[NameResult]:
    """Return results of changes, those that succeeded with stamps; called in the step of the changes, after them."""
    bound = [result.stat for result in results if result.stat is not None]
    nodes = {(stat.bucket, stat.key): NodeId(stat.node) for stat in bound}  # of the last, where a name was bound twice
    ways = _Ways(view)
    stamped: list[NameResult] = []
    for result in results:
        stat = result.stat
        if stat is None:
            stamped.append(result)
        else:
            records = ways.records_of(stat, nodes[stat.bucket, stat.key])
            stamped.append(NameResult(stat, stamps=view.stamps_of(records)))
    return stamped


class _Ways:
    """The ways to folders, each read once."""

    def __init__(self, view: RecordedView) -> None:
        self._view = view
        self._known: dict[tuple[str, bytes], tuple[list[Record], NodeId]] = {}

    def records_of(self, stat: ObjectStat, node: NodeId) -> list[Record]:
        """Return the records that an answer about the name rests on, in the order in which they are looked up."""
        path = lookup_path(stat.key)
        cut = path.rfind(b"/", 0, len(path) - 1) + 1
        folder, name = (stat.bucket, path[:cut]), path[cut:]
        is_split = len(name) >= COMPONENT_SPLIT_BYTES
        known = None if is_split else self._known.get(folder)
        if known is None:
            place = find_place(self._view, find_bucket(self._view, stat.bucket).node, path)
            known, name = (self._view.take_records(), place.parent), place.name
            if not is_split:
                self._known[folder] = known
        way, parent = known
        return [*way, (Table.NAMES, name_key(parent, name)), (Table.NODES, node_key(node))]
