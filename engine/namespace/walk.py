"""Reads tables for tasks that wait between reads: one record, a table page by page, all nodes, paths of nodes.

Each page is a view of its own, and no view is open while the caller has the page.  So readers and writers go on beside
a walk, which may see a record as before a change, or miss a name that changes during the walk.

Names refer to nodes and not the reverse, so paths of nodes cost one pass over all names for each tree level that the
wanted nodes lie at.  They are for reports of damage: the nodes are few, and passes are cheap beside the rest.  A node
whose name was missed has no path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from itertools import islice
from typing import Final

import trio

from engine.format.layouts import Node, Table, unpack_name
from engine.metadata.metadata_store import Metadata
from engine.namespace.names import iter_nodes
from lakefs.ids import ROOT_NODE, NodeId
from lakefs.limits import GC_BATCH

_PARENT_BYTES: Final = 8
NAMES_END: Final = b"\xff" * (_PARENT_BYTES + 1)

_Parents = dict[NodeId, tuple[NodeId, bytes]]
"""For each node: its parent node, and its name there."""


def value_of(metadata: Metadata, table: Table, key: bytes) -> bytes | None:
    """Return the present value of a record, or None."""
    with metadata.view() as view:
        return view.get(table, key)


def pages(
    metadata: Metadata, table: Table, start: bytes, end: bytes, limit: Callable[[], int] = lambda: GC_BATCH
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the records with start <= key < end in pages of at most `limit()`, ascending; no page is empty."""
    while True:
        with metadata.view() as view:
            page = list(islice(view.scan(table, start, end), limit()))
        if not page:
            return
        yield page
        start = page[-1][0] + b"\0"


async def records(metadata: Metadata, table: Table, start: bytes, end: bytes) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield the records with start <= key < end, ascending; a checkpoint after each page."""
    for page in pages(metadata, table, start, end):
        for record in page:
            yield record
        await trio.lowlevel.checkpoint()


async def walk_nodes(metadata: Metadata, visit: Callable[[NodeId, Node], Awaitable[None]]) -> None:
    """Visit every node in the order of ids; no view is open during a visit.  A node may be seen as before a change."""
    after = NodeId(0)
    while True:
        with metadata.view() as view:
            page = iter_nodes(view, after, GC_BATCH)
        if not page:
            return
        after = page[-1][0]
        for node_id, node in page:
            await visit(node_id, node)
        await trio.lowlevel.checkpoint()


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
    for page in pages(metadata, Table.NAMES, b"", NAMES_END):
        for key, value in page:
            _, node = unpack_name(value)
            if node in wanted:
                found[node] = (NodeId(int.from_bytes(key[:_PARENT_BYTES], "big")), key[_PARENT_BYTES:])
        await trio.lowlevel.checkpoint()
    return found


def _path(parents: _Parents, node: NodeId) -> str:
    """Join names from the root down.  Folders end with their slash; parts of split names have none."""
    parts: list[bytes] = []
    while node in parents and len(parts) <= len(parents):
        node, name = parents[node]
        parts.append(name)
    return b"".join(reversed(parts)).decode(errors="replace") if node == ROOT_NODE else ""
