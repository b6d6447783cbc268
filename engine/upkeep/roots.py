"""The roots of gc: every blob that a name, a part of an unfinished upload or a lease refers to, met by one walk.

    with roots.noting():
        await roots.nodes(pacing, visit)      in the order of node ids, up to the live end
    await roots.parts(pacing, visit)
    await roots.leases(pacing, visit)
    await roots.rebound(visit)                blobs that nodes got behind the walk

    walk = RootsWalk(roots, step)             the same, page by page, as somebody asks for them
    while (page := walk.next()) is not None: ...

A new node has a higher id than the walk's place, so the walk meets it.  A blob that a node behind that place gets (a
folder's own key, a kept node, by a copy too) is met as well, even if the node has lost it again: it may have been
copied on.  Content that a session binds behind the walk is met or not: sessions keep it by themselves, in one engine by
births, in a lake by gc generations.  So what is bound when all nodes have been met needs no note: it is of a session,
or of a node whose blob was met or noted.

Rules kept here:
- No view is held across an `await`; the walk reads page by page, resuming behind the last key.
- Memory: one page, the leases, and the blobs of rebound nodes until they are visited.
- A page is read in one step, and so is the answer that there is none left: in that step all nodes have been met, and no
  noted blob is left.
- A walk that was not asked to its end, or met an error, never says that nothing is left.

`engine.upkeep.gc` marks them among one engine's chunks, `engine.lake_gc.lake_gc` over the members of a lake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence as Seq
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
from lakefs.errors import SessionLost
from lakefs.ids import BlobId, NodeId, Sequence

Owner = NodeId | bytes | None
"""The node or the key of the part that refers to a blob; None for a lease."""
Root = tuple[BlobId, Owner]
Visit = Callable[[Seq[Root]], Awaitable[None]]
Step = Callable[[], int]
"""Returns how many records the next page may have."""


class Roots:
    """The roots of one store's names.  One walk at a time."""

    def __init__(
        self, metadata: Metadata, references: References, *, batch: int, rebound_max: int | None = None
    ) -> None:
        """`rebound_max`: most blobs that are noted before they are asked for; the walk ends when there are more."""
        self._metadata = metadata
        self._references = references
        self._batch = batch
        self._passed = NodeId(0)
        self._rebound: list[Root] = []
        self._rebound_max = rebound_max
        self.has_missed = False
        """More blobs were to be noted than may be: this walk does not meet all roots."""

    @property
    def all_visited(self) -> bool:
        """True unless a node got a blob behind the walk which was not visited since."""
        return not self._rebound and not self.has_missed

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager of one walk: blobs that nodes get behind it are noted."""
        end_noting = self._metadata.on_joined(self._note_rebound, [NameEvent])
        self._rebound.clear()
        self.has_missed = False
        try:
            yield
        finally:
            end_noting()
            self._passed = NodeId(0)

    def _note_rebound(self, sequence: Sequence, notes: list[object]) -> None:
        for note in notes:
            if isinstance(note, NameEvent) and note.blob is not None and note.node <= self._passed:
                if self._rebound_max is not None and len(self._rebound) >= self._rebound_max:
                    self.has_missed = True
                else:
                    self._rebound.append((note.blob, note.node))

    async def nodes(self, pacing: Pacing, visit: Visit) -> None:
        """Visit the blob of every node."""
        for page in self.node_pages(lambda: pacing.step(self._batch)):
            await visit(page)
            await pacing.rest()

    async def parts(self, pacing: Pacing, visit: Visit) -> None:
        """Visit the parts of unfinished uploads.  A session keeps a part that is recorded behind this walk."""
        for page in self.part_pages(lambda: pacing.step(self._batch)):
            await visit(page)
            await pacing.rest()

    async def leases(self, pacing: Pacing, visit: Visit) -> None:
        """Visit the blobs that are open for reading, each once."""
        for page in self.lease_pages():
            await visit(page)
            if len(page) == self._batch:
                await pacing.rest()

    async def rebound(self, visit: Visit) -> None:
        """Visit the noted blobs, also those that are noted during the visits."""
        for page in self.rebound_pages():
            await visit(page)

    # --- pages: each is read in the step in which it is asked for ----------------------------------------

    def node_pages(self, step: Step) -> Iterator[Seq[Root]]:
        """Yield the blobs of all nodes; a page may be empty."""
        while True:
            with self._metadata.view() as view:
                page = iter_nodes(view, self._passed, step())
            if not page:
                return
            self._passed = page[-1][0]
            yield [(node.blob, node_id) for node_id, node in page if node.blob is not None]

    def part_pages(self, step: Step) -> Iterator[Seq[Root]]:
        """Yield the parts of unfinished uploads."""
        for page in pages(self._metadata, Table.UPLOADS, PARTS_BEGIN, PARTS_END, step):
            yield [(BlobId(unpack_part(value).blob), key) for key, value in page]

    def lease_pages(self) -> Iterator[Seq[Root]]:
        """Yield the blobs that are open for reading, each once."""
        leased = iter(dict.fromkeys(self._references.leased_blobs()))
        while batch := list(islice(leased, self._batch)):
            yield [(blob, None) for blob in batch]

    def rebound_pages(self) -> Iterator[Seq[Root]]:
        """Yield the blobs that are noted, until none is left."""
        while self._rebound:
            page = self._rebound[-self._batch :]
            del self._rebound[-self._batch :]
            yield page


class RootsWalk:
    """One walk through all roots, whose pages are asked for.  Nothing is read, or held open, between two of them.

    It is asked to its end, or closed.
    """

    def __init__(self, roots: Roots, step: Step) -> None:
        self._roots = roots
        self._pages = self._all(step)
        self._is_over = False

    def next(self) -> Seq[Root] | None:
        """Return the next page, which may be empty; None, once, when nothing is left.

        SessionLost for a walk that was over, or had to note too much.  An error ends it, those of `Metadata.view` too.
        """
        if self._is_over:
            raise SessionLost("this walk through the names has ended; begin another")
        page: Seq[Root] | None = None
        try:
            page = next(self._pages, None)
            if self._roots.has_missed:
                page = None
                raise SessionLost("this walk through the names was too slow: too many names have changed behind it")
        finally:
            self._is_over = page is None  # an error too: behind one the pages seem to be at their end
        return page

    def close(self) -> None:
        """End the walk: nothing is noted for it any more."""
        self._is_over = True
        self._pages.close()

    def _all(self, step: Step) -> Generator[Seq[Root], None, None]:
        roots = self._roots
        with roots.noting():
            for page in roots.node_pages(step):
                yield page
                yield from roots.rebound_pages()
        yield from roots.part_pages(step)
        yield from roots.lease_pages()
        yield from roots.rebound_pages()
