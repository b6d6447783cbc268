"""From nodes back to names: the paths of a few nodes, found by walking the table of names.

Names refer to nodes and not the reverse, so this costs one pass over all names for each tree level that the wanted
nodes lie at.  It is for reports of damage: the nodes are few, and passes are cheap beside the rest.

Each page is a view of its own: a name that changes during the walk may be missed, and its node then has no path.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import trio

from engine.format.layouts import Table, unpack_name
from engine.metadata.metadata_store import Metadata
from lakefs.ids import ROOT_NODE, NodeId
from lakefs.limits import GC_BATCH

_PARENT_BYTES: Final = 8
_END: Final = b"\xff" * (_PARENT_BYTES + 1)

_Parents = dict[NodeId, tuple[NodeId, bytes]]
"""For each node: its parent node, and its name there."""


async def paths_of(metadata: Metadata, nodes: Collection[NodeId]) -> dict[NodeId, str]:
    """Return `BUCKET/KEY` of each node that has a name."""
    parents: _Parents = {}
    wanted = set(nodes)
    while wanted:
        found = await _parents_of(metadata, wanted)
        parents.update(found)
        wanted = {above for above, _ in found.values() if above != ROOT_NODE} - parents.keys()
    return {node: path for node in nodes if (path := _path(parents, node))}


async def _parents_of(metadata: Metadata, wanted: set[NodeId]) -> _Parents:
    found: _Parents = {}
    after = b""
    while True:
        page_size = 0
        with metadata.view() as view:
            for key, value in view.scan(Table.NAMES, after, _END):
                _, node = unpack_name(value)
                if node in wanted:
                    found[node] = (NodeId(int.from_bytes(key[:_PARENT_BYTES], "big")), key[_PARENT_BYTES:])
                after = key + b"\0"
                page_size += 1
                if page_size == GC_BATCH:
                    break
        if page_size < GC_BATCH:
            return found
        await trio.lowlevel.checkpoint()


def _path(parents: _Parents, node: NodeId) -> str:
    """Join names from the root down.  Folders end with their slash; parts of split names have none."""
    parts: list[bytes] = []
    while node in parents and len(parts) <= len(parents):
        node, name = parents[node]
        parts.append(name)
    return b"".join(reversed(parts)).decode(errors="replace") if node == ROOT_NODE else ""
