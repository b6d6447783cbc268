"""Checks every blob that names refer to against the members: its manifests are read, its chunks are looked for.

    content = ContentCheck(...); await content.run()      all blobs, once
    await content.problem_of(blob, size)                   the problem of a blob that was met, or None

Rules kept here:
- A manifest that many names or blobs have is walked once, as long as the check meets no more than MANIFESTS_SEEN_MAX
  of them; behind that all are forgotten, and walked again, which costs time and changes nothing.
- Damage is of a blob, so that its names can be found; short chunks, and those that nobody can judge now, are counted.
- A chunk that can be read is read, and compared with its id, if the check is full, or a shard has another length than
  the chunk gives it: then it is the shard that is wrong, or the length.
- Memory: a page of names; `_AT_ONCE` manifests, each with up to five levels above it; a body of payload; the damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import trio

from engine.format.layouts import Table
from engine.fsck.report import Problem, Report
from engine.host.tasks import plain_errors
from engine.lake_gc.lake_gc_bounds import MANIFESTS_SEEN_MAX
from engine.lake_upkeep.named_chunks import NamedChunks
from engine.lake_upkeep.stripe_check import Known, Shards, Standing, StripeCheck
from engine.members.ports import Got, Stripes, Wanted
from engine.metadata.metadata_store import Metadata
from engine.namespace.names import iter_nodes
from engine.namespace.walk import pages
from engine.uploads.keys import PARTS_BEGIN, PARTS_END
from engine.uploads.lifecycle import unpack_part
from lakefs.content.manifest import Manifest, check_child, check_top, parse
from lakefs.errors import ClusterDegraded, CorruptionError, InvalidArgument, LakeError
from lakefs.findings import Finding
from lakefs.ids import EMPTY_CHUNK, BlobId, ChunkId, ChunkKind, NodeId, chunk_of, id_text, kind_of
from lakefs.limits import BODY_BYTES_MAX, CHUNK_BYTES, GC_BATCH

_AT_ONCE: Final = 8
_LOOK_AT_ONCE: Final = 1024
"""Chunks looked for in one go: six shards each are 1.5 requests a member."""
Sized = tuple[ChunkId, int]
"""The top chunk of a blob, and the blob's length as its name says."""


class ContentCheck:
    """One check of the content of all names."""

    def __init__(self, metadata: Metadata, stripes: Stripes, looks: StripeCheck, report: Report, *, full: bool) -> None:
        self.named: Final = NamedChunks()
        self.short_count = 0
        self.unknown_count = 0
        """Chunks that only members which did not answer can tell of."""
        self._metadata = metadata
        self._stripes = stripes
        self._looks = looks
        self._report = report
        self._full = full
        self._bad: dict[Sized, Problem] = {}
        self._bad_manifests: dict[ChunkId, Problem] = {}
        self._seen: set[Sized] = set()
        self._whole: set[ChunkId] = set()

    async def problem_of(self, blob: BlobId, size_bytes: int) -> Problem | None:
        """Return the problem of a blob, as far as the check met it (`engine.fsck.upload_check.BlobProblem`)."""
        top = chunk_of(blob)
        if top == EMPTY_CHUNK and size_bytes:
            return Problem(Finding.CONTENT_SIZE_WRONG, f"an empty blob with a size of {size_bytes}")
        return self._bad.get((top, size_bytes))

    async def run(self) -> None:
        """Check the blobs of all nodes, and of all parts of uploads.  Errors of the coordinator."""
        self._report.count("named_chunks", 0)
        for page in self._pages():
            tops = [top for top in dict.fromkeys(page) if self._is_new(top)]
            chunks = [top for top in tops if kind_of(top[0]) is ChunkKind.DATA]
            self._bad |= await self._problems(chunks)
            await self._check_trees([top for top in tops if kind_of(top[0]) is ChunkKind.MANIFEST])

    def _pages(self) -> Iterator[list[Sized]]:
        after = NodeId(0)
        while True:
            with self._metadata.view() as view:
                nodes = iter_nodes(view, after, GC_BATCH)
            if not nodes:
                break
            after = nodes[-1][0]
            yield [(chunk_of(node.blob), node.size_bytes) for _, node in nodes if node.blob is not None]
        for page in pages(self._metadata, Table.UPLOADS, PARTS_BEGIN, PARTS_END):
            parts = [unpack_part(value) for _, value in page]
            yield [(chunk_of(BlobId(part.blob)), part.size_bytes) for part in parts]

    def _is_new(self, top: Sized) -> bool:
        """Note a blob with a manifest; True if it was not met before, or was forgotten."""
        if kind_of(top[0]) is ChunkKind.DATA:
            return top[0] != EMPTY_CHUNK
        if top in self._seen:
            return False
        if len(self._seen) >= MANIFESTS_SEEN_MAX:
            self._seen.clear()
        self._seen.add(top)
        return True

    # --- manifests ---------------------------------------------------------------------------------

    async def _check_trees(self, tops: Sequence[Sized]) -> None:
        waiting = iter(tops)

        async def work() -> None:
            for top, size_bytes in waiting:
                problem = await self._tree_problem(top, size_bytes)
                if problem is not None:
                    self._bad[top, size_bytes] = problem

        with plain_errors():
            async with trio.open_nursery() as nursery:
                for _ in range(min(_AT_ONCE, len(tops))):
                    nursery.start_soon(work)

    async def _tree_problem(self, top: ChunkId, size_bytes: int) -> Problem | None:
        """Return the problem of a blob with a manifest, or of anything below it."""
        root, problem = await self._read(top)
        if root is None:
            return problem
        try:
            check_top(root)
        except InvalidArgument as error:
            return Problem(Finding.CONTENT_MANIFEST_DAMAGED, error.message)
        if root.size_bytes != size_bytes:
            told = f"its manifest says {root.size_bytes} bytes, the node {size_bytes}"
            return Problem(Finding.CONTENT_SIZE_WRONG, told)
        return problem or await self._below(top, root)

    async def _below(self, chunk: ChunkId, manifest: Manifest) -> Problem | None:
        if chunk in self._whole or chunk in self._bad_manifests:
            return self._bad_manifests.get(chunk)
        entries = [(entry.chunk, entry.size_bytes) for entry in manifest.entries]
        problem = await self._first_problem(entries) if manifest.level == 0 else await self._children(manifest)
        if problem is not None:
            self._bad_manifests[chunk] = problem
        else:
            if len(self._whole) >= MANIFESTS_SEEN_MAX:
                self._whole.clear()
            self._whole.add(chunk)
        return problem

    async def _first_problem(self, chunks: Sequence[Sized]) -> Problem | None:
        found: Problem | None = None
        for begin in range(0, len(chunks), _LOOK_AT_ONCE):
            problems = await self._problems(chunks[begin : begin + _LOOK_AT_ONCE])
            found = found or next(iter(problems.values()), None)
        return found

    async def _children(self, manifest: Manifest) -> Problem | None:
        found: Problem | None = None
        for entry in dict.fromkeys(manifest.entries):
            child, problem = await self._read(entry.chunk)
            if child is not None:
                try:
                    check_child(entry, manifest, child)
                except InvalidArgument as error:
                    problem = Problem(Finding.CONTENT_MANIFEST_DAMAGED, error.message)
                else:
                    problem = problem or await self._below(entry.chunk, child)
            found = found or problem
        return found

    async def _read(self, chunk: ChunkId) -> tuple[Manifest | None, Problem | None]:
        """Read a manifest; None with its problem, or with none if only members that did not answer can tell."""
        piece = await self._piece(chunk)
        if not isinstance(piece, Got) and piece.retryable:
            # Which members answer is looked at between two reads: one that comes or goes meanwhile is no damage.
            (shards,) = await self._looks.look([Known(chunk, CHUNK_BYTES)])
            piece = await self._piece(chunk)
            if not isinstance(piece, Got) and (shards.unseen or not isinstance(piece, ClusterDegraded)):
                self.unknown_count += 1
                self.named.add([chunk])
                return None, None
        if not isinstance(piece, Got):
            self.named.add([chunk])
            is_damaged = isinstance(piece, CorruptionError)
            finding = Finding.CONTENT_MANIFEST_DAMAGED if is_damaged else Finding.CONTENT_MANIFEST_MISSING
            return None, Problem(finding, f"its manifest {id_text(chunk)}: {piece.message}")
        try:
            manifest = parse(piece.payload)
        except InvalidArgument as error:
            return None, Problem(Finding.CONTENT_MANIFEST_DAMAGED, f"manifest {id_text(chunk)}: {error.message}")
        return manifest, (await self._problems([(chunk, piece.chunk_bytes)])).get((chunk, piece.chunk_bytes))

    async def _piece(self, chunk: ChunkId) -> Got | LakeError:
        try:
            (piece,) = await self._stripes.read([Wanted(chunk, 0)])
        except LakeError as error:
            return error
        return piece

    # --- chunks ------------------------------------------------------------------------------------

    async def _problems(self, chunks: Sequence[Sized]) -> dict[Sized, Problem]:
        """Return the problems of chunks of these lengths."""
        problems: dict[Sized, Problem] = {}
        known: list[Known] = []
        for chunk, length in dict.fromkeys(chunks):
            if 0 < length <= CHUNK_BYTES:
                known.append(Known(chunk, length))
            else:
                told = f"chunk {id_text(chunk)} cannot have {length} bytes"
                problems[chunk, length] = Problem(Finding.CONTENT_CHUNK_SIZE_WRONG, told)
        if not known:
            return problems
        self.named.add([each.chunk for each in known])
        self._report.count("named_chunks", len(known))
        found = await self._looks.look(known)
        read: list[Known] = []
        for shards in found:
            problem = self._judged(shards)
            if problem is not None:
                problems[shards.known] = problem
            elif shards.standing is not Standing.UNKNOWN and (self._full or shards.misfits):
                read.append(shards.known)
        return problems | await self._read_all(read)

    def _judged(self, shards: Shards) -> Problem | None:
        """Count a chunk by its standing; returns its problem if it is damaged."""
        standing = shards.standing
        self.short_count += standing is Standing.SHORT
        self.unknown_count += standing is Standing.UNKNOWN
        if standing is not Standing.DAMAGED:
            return None
        name, found = f"chunk {id_text(shards.known.chunk)}", len(shards.found)
        if not found and not shards.misfits:
            return Problem(Finding.CONTENT_CHUNK_MISSING, f"{name} is missing: no member has a shard of it")
        if len(shards.misfits - shards.found) >= shards.needed:
            told = f"{name} has other shards than {shards.known.length} bytes make"
            return Problem(Finding.CONTENT_CHUNK_SIZE_WRONG, told)
        told = f"{name} has lost too many shards: {found} of {len(shards.numbers)} are left, {shards.needed} make it"
        return Problem(Finding.CONTENT_CHUNK_DAMAGED, told)

    async def _read_all(self, chunks: Iterable[Known]) -> dict[Sized, Problem]:
        """Read chunks, and return the problems of those that are not what their ids say."""
        problems: dict[Sized, Problem] = {}
        for batch in _batches(chunks):
            pieces = await self._stripes.read([Wanted(chunk, length) for chunk, length in batch])
            for known, piece in zip(batch, pieces, strict=True):
                if isinstance(piece, Got):
                    self._report.count("payload_bytes", known.length)
                elif isinstance(piece, CorruptionError):
                    problems[known] = Problem(Finding.CONTENT_CHUNK_DAMAGED, piece.message)
                else:
                    self.unknown_count += 1
        return problems


def _batches(chunks: Iterable[Known]) -> Iterator[list[Known]]:
    """Yield chunks in batches that fit into a body."""
    batch: list[Known] = []
    size = 0
    for known in chunks:
        if batch and size + known.length > BODY_BYTES_MAX:
            yield batch
            batch, size = [], 0
        batch.append(known)
        size += known.length
    if batch:
        yield batch
