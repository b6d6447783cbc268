"""fsck of an open store: is it consistent?

`check_store` looks at an open store, page by page, beside readers and writers.  Quick: every record of the index
against its checksum and the tables' sums; the journal and the newest checkpoint; every chunk's place against its
segment and its neighbours; the references of every name, node, upload and manifest.  Full: also every payload against
its CRC32C and its id.

A finding is `damage` (stored content cannot be served as it was) or a `note` (garbage that gc collects).  Damaged
chunks are found first; then all objects that contain them are named.  The check changes nothing, with two
exceptions: damaged chunks are quarantined (putting the same bytes again heals them), and the engine rebuilds a damaged
index (`engine.upkeep.index_upkeep`).  A record that changed during the walk is read again before it is called damage.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

import trio

from engine.chunks.chunk_store import Chunks, find_shard
from engine.chunks.manifests import Manifests
from engine.format.features import ReadOnlyFeature
from engine.format.keyed import EXPIRIES_END as KEYED_END
from engine.format.layouts import ChunkRecord, Table, chunk_id_of_key, unpack_chunk_record
from engine.format.shards import may_be_of, shard_of_key
from engine.fsck.keyed_check import KeyedCheck
from engine.fsck.names_check import NamesCheck
from engine.fsck.report import Problem, Report
from engine.metadata.metadata_store import Metadata
from engine.namespace.walk import pages
from engine.segments.segment_store import Segments
from engine.tables.number_set import NumberSet
from lakefs.content.manifest import Entry, Manifest, check_child
from lakefs.errors import ChunkDamaged, LakeError, StaleGrant
from lakefs.findings import Finding
from lakefs.ids import (
    EMPTY_CHUNK,
    WHOLE_CHUNK,
    Birth,
    BlobId,
    ChunkId,
    ChunkKind,
    SegmentId,
    ShardNumber,
    id_text,
    kind_of,
    shard_text,
)

_LOOKS_AT_PAYLOAD: Final = 8
"""A compaction moves a chunk once, and a repair stores it anew."""


async def check_store(
    metadata: Metadata,
    segments: Segments,
    chunks: Chunks,
    manifests: Manifests,
    has_feature: Callable[[ReadOnlyFeature], bool],
    *,
    full: bool,
) -> dict[str, Any]:
    """Check an open store and return the report; `has_feature` tells what its superblock names by then.

    Raises errors of the check itself.
    """
    check = _Check(metadata, segments, chunks, manifests, Report("full" if full else "quick"))
    await check.names.index_and_journal()
    await check.names.nodes()
    await check.names.uploads()
    await check.keyed()
    check.features(has_feature)
    await check.names.names()
    await check.places()
    if full:
        await check.payloads()
    await check.damaged_objects()
    return check.report.as_json()


class _Check:
    def __init__(
        self, metadata: Metadata, segments: Segments, chunks: Chunks, manifests: Manifests, report: Report
    ) -> None:
        self._metadata = metadata
        self._segments = segments
        self._chunks = chunks
        self._manifests = manifests
        self.report = report
        self.names = NamesCheck(metadata, report, self._blob_problem)
        self._referred = NumberSet()
        self._whole = NumberSet()
        """Births of manifests that were walked and are whole."""
        self._bad: dict[Birth, Problem] = {}
        """Births of chunks that cannot be served, with the problem of their content; about 300 bytes for each."""
        self._bad_before_walk = 0
        self._keyed = KeyedCheck(metadata, self._chunk_problem)

    async def keyed(self) -> None:
        """Check that every keyed value's chunks exist, and its space."""
        await self._keyed.run()
        for what, number in self._keyed.counts.items():
            self.report.count(what, number)
        self._bad_before_walk = len(self._bad)

    def features(self, has_feature: Callable[[ReadOnlyFeature], bool]) -> None:
        """Check that the superblock names keyed blobs, if there is a record of them by now."""
        with self._metadata.view() as view:
            has_records = next(iter(view.scan(Table.KEYED, b"", KEYED_END)), None) is not None
        if has_records and not has_feature(ReadOnlyFeature.KEYED):
            message = "there are records of keyed blobs, and the superblock does not say so: an earlier release would"
            message += " open the store, and its gc free their chunks; start the engine, which sets the bit"
            self.report.found("superblock", Finding.SUPERBLOCK_FEATURE_MISSING, message)

    async def _blob_problem(self, blob: BlobId, size_bytes: int) -> Problem | None:
        top = ChunkId(blob)
        if top == EMPTY_CHUNK:
            if size_bytes == 0:
                return None
            return Problem(Finding.CONTENT_SIZE_WRONG, f"an empty blob with a size of {size_bytes}")
        if kind_of(top) is ChunkKind.DATA:
            return self._chunk_problem(top, size_bytes)
        record = self._record(top)
        if record is None:
            return Problem(Finding.CONTENT_MANIFEST_MISSING, f"its manifest {id_text(top)} is missing")
        self._referred.add(record.birth)
        problem = await self._manifest_problem(top, record)
        if problem:
            return problem
        root = await self._manifests.read(top)
        if root.size_bytes != size_bytes:
            told = f"its manifest says {root.size_bytes} bytes, the node {size_bytes}"
            return Problem(Finding.CONTENT_SIZE_WRONG, told)
        return None

    async def _manifest_problem(self, top: ChunkId, record: ChunkRecord) -> Problem | None:
        """Return the problem of a manifest or of anything below it; each is walked once, however many share it."""
        if record.birth in self._whole or record.birth in self._bad:
            return self._bad.get(record.birth)
        try:
            problem = await self._problem_below(top)
        except LakeError as error:
            problem = Problem(Finding.CONTENT_MANIFEST_DAMAGED, error.message)
        if problem:
            self._bad[record.birth] = problem
        else:
            self._whole.add(record.birth)
        return problem

    async def _problem_below(self, top: ChunkId) -> Problem | None:
        manifest = await self._manifests.read(top)
        for entry in manifest.entries:
            if manifest.level == 0:
                problem = self._chunk_problem(entry.chunk, entry.size_bytes)
            else:
                problem = await self._child_problem(manifest, entry)
            if problem:
                return problem
        await trio.lowlevel.checkpoint()
        return None

    async def _child_problem(self, manifest: Manifest, entry: Entry) -> Problem | None:
        record = self._record(entry.chunk)
        if record is None:
            return Problem(Finding.CONTENT_MANIFEST_MISSING, f"manifest {id_text(entry.chunk)} is missing")
        self._referred.add(record.birth)
        problem = await self._manifest_problem(entry.chunk, record)
        if not problem:
            check_child(entry, manifest, await self._manifests.read(entry.chunk))
        return problem

    def _chunk_problem(self, chunk: ChunkId, size_bytes: int) -> Problem | None:
        record, name = self._record(chunk), f"chunk {id_text(chunk)}"
        if record is None:
            return Problem(Finding.CONTENT_CHUNK_MISSING, f"{name} is missing")
        self._referred.add(record.birth)
        if record.logical_bytes != size_bytes:
            told = f"{name} has {record.logical_bytes} bytes where {size_bytes} are expected"
            return Problem(Finding.CONTENT_CHUNK_SIZE_WRONG, told)
        if record.birth in self._bad:
            finding, message = self._bad[record.birth]
            return Problem(finding, f"{name}: {message}")
        return None

    async def damaged_objects(self) -> None:
        """Name the damaged objects: those met by the walk, and those whose chunks turned out to be damaged later."""
        if len(self._bad) > self._bad_before_walk:
            self._whole = NumberSet()
            await self.names.contents_again()
            await self._keyed.values_again()
        assert len(self._bad) >= self._bad_before_walk, "a damaged chunk stays noted"
        await self.names.report_damaged(self._keyed.findings())

    # --- chunks ------------------------------------------------------------------------------------

    async def places(self) -> None:
        """Check that every chunk lies inside its segment and overlaps no other; note chunks that nothing refers to."""
        sizes: dict[SegmentId, int] = {}
        for segment in sorted(self._segments.register.kinds):
            await self._note_size(segment, sizes)
        extents: dict[SegmentId, array[int]] = {}
        garbage_count = garbage_bytes = 0
        self.report.count("chunks", 0)
        for page in pages(self._metadata, Table.CHUNKS, b"", b"\xff"):
            for key, value in page:
                record = unpack_chunk_record(value)
                extents.setdefault(record.segment, array("Q")).extend((record.offset, record.extent_bytes))
                chunk, shard = chunk_id_of_key(key), shard_of_key(key)
                if _misplaced(shard, record, sizes):
                    await self._place(chunk, shard, record, sizes)
                elif self._chunks.is_damaged(chunk, shard):
                    problem = "its bytes were found damaged when they were read"
                    self._bad_chunk(chunk, shard, record, Problem(Finding.CHUNK_QUARANTINED, problem))
                if shard != WHOLE_CHUNK:
                    self.report.count("shards", 1)  # which of them are garbage, names elsewhere say
                elif record.birth not in self._referred:
                    garbage_count += 1
                    garbage_bytes += record.extent_bytes
            self.report.count("chunks", len(page))
            await trio.lowlevel.checkpoint()
        self._overlaps(extents)
        if garbage_count:
            # Chunks below a manifest that cannot be read may be among them, so gc frees none.
            told = "nothing that can be read; gc keeps them" if self.names.damaged else "nothing; gc frees them"
            message = f"{garbage_count} chunks ({garbage_bytes} bytes) are referred to by {told}"
            self.report.found("store", Finding.GARBAGE, message)

    async def _place(
        self, chunk: ChunkId, shard: ShardNumber, record: ChunkRecord, sizes: dict[SegmentId, int]
    ) -> None:
        """Look again: segments are made, grow and are removed during the walk."""
        await self._note_size(record.segment, sizes)
        problem = _misplaced(shard, record, sizes)
        if problem and self._record(chunk, shard) == record:
            # Quarantined, so that a put of the same bytes stores them anew instead of finding them present.
            error = ChunkDamaged(problem.message, subject=shard_text(chunk, shard), finding=problem.finding)
            await self._chunks.judged(chunk, record, error, shard)
            self._bad_chunk(chunk, shard, record, problem)

    def _bad_chunk(self, chunk: ChunkId, shard: ShardNumber, record: ChunkRecord, problem: Problem) -> None:
        is_data = kind_of(chunk) is ChunkKind.DATA
        finding = Finding.CONTENT_CHUNK_DAMAGED if is_data else Finding.CONTENT_MANIFEST_DAMAGED
        self._bad[record.birth] = Problem(finding, problem.message)
        self.report.found(shard_text(chunk, shard), *problem)

    async def _note_size(self, segment: SegmentId, sizes: dict[SegmentId, int]) -> None:
        sizes.pop(segment, None)
        try:
            sizes[segment] = await self._segments.room.size(segment)
        except StaleGrant:
            return  # the segment was removed; a record that still refers to it is damage

    def _overlaps(self, extents: dict[SegmentId, array[int]]) -> None:
        for segment, places in extents.items():
            end = 0
            for offset, length in sorted(zip(places[::2], places[1::2], strict=True)):
                if offset < end:
                    message = f"two chunks overlap at offset {offset}"
                    self.report.found(f"segment {segment:016x}", Finding.CHUNKS_OVERLAP, message)
                end = max(end, offset + length)

    async def payloads(self) -> None:
        """Check every payload against its CRC32C, and a whole chunk's against its id."""
        self.report.count("payload_bytes", 0)
        for page in pages(self._metadata, Table.CHUNKS, b"", b"\xff", lambda: 64):
            for key, value in page:
                await self._payload(chunk_id_of_key(key), shard_of_key(key), unpack_chunk_record(value))

    async def _payload(self, chunk: ChunkId, shard: ShardNumber, record: ChunkRecord) -> None:
        """Check one payload, at the place it had when it was read: compaction may move it during the read."""
        for _ in range(_LOOKS_AT_PAYLOAD):
            problem = await self._payload_problem(chunk, shard, record)
            now = self._record(chunk, shard)
            if now is None:
                return  # freed
            if now == record:
                break
            record = now
        else:
            problem = Problem(Finding.CHUNK_UNCHECKED, "was moved again and again, and is not checked")
            self.report.found(shard_text(chunk, shard), *problem)
            return
        if problem and record.birth not in self._bad:
            self._bad_chunk(chunk, shard, record, problem)
        self.report.count("payload_bytes", record.stored_bytes)

    async def _payload_problem(self, chunk: ChunkId, shard: ShardNumber, record: ChunkRecord) -> Problem | None:
        try:
            await self._chunks.verify(chunk, record, shard)
        except LakeError as error:
            return Problem(error.finding, error.message)
        return None

    # --- looking again -----------------------------------------------------------------------------

    def _record(self, chunk: ChunkId, shard: ShardNumber = WHOLE_CHUNK) -> ChunkRecord | None:
        with self._metadata.view() as view:
            return find_shard(view, chunk, shard)


def _misplaced(shard: ShardNumber, record: ChunkRecord, sizes: dict[SegmentId, int]) -> Problem | None:
    """Return the problem of a chunk's place, or of the lengths of a shard and its chunk, or None."""
    if shard != WHOLE_CHUNK and not may_be_of(record.stored_bytes, record.logical_bytes):
        told = f"its record says {record.stored_bytes} bytes of a chunk of {record.logical_bytes}"
        return Problem(Finding.CHUNK_RECORD_WRONG, told)
    size = sizes.get(record.segment)
    if size is None:
        return Problem(Finding.SEGMENT_MISSING, f"its segment {record.segment:016x} is missing")
    if record.offset + record.extent_bytes > size:
        return Problem(Finding.CHUNK_PAST_END, f"its segment {record.segment:016x} ends before it")
    return None
