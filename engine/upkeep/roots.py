"""The roots of gc: every blob that a name, a part of an unfinished upload or a lease refers to, met by one walk.

    with roots.noting():
        await roots.nodes(pacing, visit)      in the order of node ids, up to the live end
    await roots.parts(pacing, visit)
    await roots.leases(pacing, visit)
    await roots.rebound(visit)                blobs that nodes got behind the walk

A new node has a higher id than the walk's place, so the walk meets it.  A blob that a node behind that place gets (a
folder's own key, a kept node, by a copy too) is met as well, even if the node has lost it again: it may have been
copied on.  Content that a session binds behind the walk is met or not: sessions keep it by themselves, in one engine by
births, in a lake by gc generations.  So what is bound when all nodes have been met needs no note: it is of a session,
or of a node whose blob was met or noted.

Rules kept here:
- No view is held across an `await`; the walk reads page by page, resuming behind the last key.
- Memory: one page, the leases, and the blobs of rebound nodes until they are visited.

`engine.upkeep.gc` marks them among one engine's chunks, `engine.lake_gc.lake_gc` over the members of a lake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from itertools import islice

from engine.format.layouts import Table
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from engine.namespace.names import iter_nodes
from engine.namespace.tree import NameEvent
from engine.namespace.walk import pages
from engine.sessions.references import References
from engine.uploads.keys import PARTS_BEGIN, PARTS_END
from engine.uploads.lifecycle import unpack_part
from lakefs.ids import BlobId, NodeId, Sequence

Owner = NodeId | bytes | None
"""The node or the key of the part that refers to a blob; None for a lease."""
Root = tuple[BlobId, Owner]
Visit = Callable[[Seq[Root]], Awaitable[None]]


class Roots:
    """The roots of one store's names.  One walk at a time."""

    def __init__(self, metadata: Metadata, references: References, *, batch: int) -> None:
        self._metadata = metadata
        self._references = references
        self._batch = batch
        self._passed = NodeId(0)
        self._rebound: list[Root] = []

    @property
    def all_visited(self) -> bool:
        """True unless a node got a blob behind the walk which was not visited since."""
        return not self._rebound

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager of one walk: blobs that nodes get behind it are noted."""
        end_noting = self._metadata.on_joined(self._note_rebound, [NameEvent])
        self._rebound.clear()
        try:
            yield
        finally:
            end_noting()
            self._passed = NodeId(0)

    def _note_rebound(self, sequence: Sequence, notes: list[object]) -> None:
        for note in notes:
            if isinstance(note, NameEvent) and note.blob is not None and note.node <= self._passed:
                self._rebound.append((note.blob, note.node))

    async def nodes(self, pacing: Pacing, visit: Visit) -> None:
        """Visit the blob of every node."""
        while True:
            with self._metadata.view() as view:
                page = iter_nodes(view, self._passed, pacing.step(self._batch))
            if not page:
                return
            self._passed = page[-1][0]
            await visit([(node.blob, node_id) for node_id, node in page if node.blob is not None])
            await pacing.rest()

    async def parts(self, pacing: Pacing, visit: Visit) -> None:
        """Visit the parts of unfinished uploads.  A session keeps a part that is recorded behind this walk."""
        for page in pages(self._metadata, Table.UPLOADS, PARTS_BEGIN, PARTS_END, lambda: pacing.step(self._batch)):
            await visit([(BlobId(unpack_part(value).blob), key) for key, value in page])
            await pacing.rest()

    async def leases(self, pacing: Pacing, visit: Visit) -> None:
        """Visit the blobs that are open for reading, each once."""
        leased = iter(dict.fromkeys(self._references.leased_blobs()))
        while batch := list(islice(leased, self._batch)):
            await visit([(blob, None) for blob in batch])
            if len(batch) == self._batch:
                await pacing.rest()

    async def rebound(self, visit: Visit) -> None:
        """Visit the noted blobs, also those that are noted during the visits."""
        while self._rebound:
            await visit([self._rebound.pop()])
