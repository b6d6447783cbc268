"""The walk over all nodes, page by page over fresh views, beside readers and writers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from engine.format.layouts import Node
from engine.metadata.metadata_store import Metadata
from engine.namespace.names import iter_nodes
from lakefs.ids import NodeId
from lakefs.limits import GC_BATCH


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
