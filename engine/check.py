"""fsck: does what the store says of itself hold together?

`check_store` looks at an open store, page by page, beside readers and writers.  Quick: every record of the index
against its checksum and the tables' sums; the journal and the newest checkpoint; every chunk's place against its
segment and its neighbours; every name, node and manifest against what it refers to.  Full: also every payload against
its CRC32C and its id.

A finding is `damage` (something that was stored cannot be served as it was) or a `note` (garbage that gc
collects).  Nothing is changed.  What changes while the walk goes on is looked at again before it is called damage.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from engine.chunks import Chunks, find_chunk
from engine.format import (
    ChunkRecord,
    NodeKind,
    Table,
    chunk_id_of_key,
    node_key,
    unpack_chunk_record,
    unpack_name,
    unpack_node,
)
from engine.manifests import Manifests
from engine.metadata import Metadata
from engine.names import iter_nodes
from engine.number_set import NumberSet
from engine.segments import Segments
from lakefs.errors import CorruptionError, LakeError
from lakefs.ids import (
    EMPTY_CHUNK,
    ROOT_NODE,
    BlobId,
    ChunkId,
    ChunkKind,
    NodeId,
    SegmentId,
    chunk_id_of,
    id_text,
    kind_of,
)
from lakefs.limits import GC_BATCH
from lakefs.manifest import check_child

FINDINGS_MAX: Final = 1000
"""Findings listed one by one; all are counted."""


@dataclass
class Report:
    """What a check found."""

    level: str
    damage: int = 0
    notes: int = 0
    findings: list[dict[str, str]] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    def found(self, severity: str, subject: str, message: str) -> None:
        """Add a finding."""
        if severity == "damage":
            self.damage += 1
        else:
            self.notes += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append({"severity": severity, "object": subject, "message": message})

    def count(self, what: str, number: int) -> None:
        """Add to what was looked at."""
        self.checked[what] = self.checked.get(what, 0) + number

    def as_json(self) -> dict[str, Any]:
        """The report as `lake fsck --json` prints it."""
        return {
            "level": self.level,
            "damage": self.damage,
            "notes": self.notes,
            "checked": self.checked,
            "findings": self.findings,
        }


async def check_store(
    metadata: Metadata, segments: Segments, chunks: Chunks, manifests: Manifests, *, full: bool
) -> dict[str, Any]:
    """Check an open store.  The report; errors of the check itself are raised."""
    check = _Check(metadata, segments, chunks, manifests, Report("full" if full else "quick"))
    await check.index_and_journal()
    await check.nodes()
    await check.names()
    await check.places()
    if full:
        await check.payloads()
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
        self._referred = NumberSet()
        self._nodes = NumberSet()

    async def index_and_journal(self) -> None:
        """The index against its sums, the journal and the checkpoint against their checksums."""
        for check in (self._metadata.verify_index, self._metadata.verify_journal):
            try:
                self.report.count("records", await check())
            except CorruptionError as error:
                self.report.found("damage", error.subject, error.message)

    # --- names and nodes ---------------------------------------------------------------------------

    async def nodes(self) -> None:
        """Every node's blob is there, its manifest's children with it."""
        after = NodeId(0)
        while True:
            with self._metadata.view() as view:
                page = iter_nodes(view, after, GC_BATCH)
            if not page:
                return
            after = page[-1][0]
            for node_id, node in page:
                self._nodes.add(node_id)
                if node.blob is not None:
                    await self._blob(node_id, node.blob, node.size_bytes)
            self.report.count("nodes", len(page))
            await trio.lowlevel.checkpoint()

    async def _blob(self, node_id: NodeId, blob: BlobId, size_bytes: int) -> None:
        try:
            problem = await self._blob_problem(blob, size_bytes)
        except LakeError as error:
            problem = error.message
        if problem and self._node_is(node_id, blob):
            self.report.found("damage", f"node {node_id}", problem)

    async def _blob_problem(self, blob: BlobId, size_bytes: int) -> str:
        top = ChunkId(blob)
        if top == EMPTY_CHUNK:
            return "" if size_bytes == 0 else f"an empty blob with a size of {size_bytes}"
        if kind_of(top) is ChunkKind.DATA:
            return self._chunk_problem(top, size_bytes)
        record = self._record(top)
        if record is None:
            return f"its manifest {id_text(top)} is missing"
        if record.birth in self._referred:
            return ""
        self._referred.add(record.birth)
        root = await self._manifests.read(top)
        if root.size_bytes != size_bytes:
            return f"its manifest says {root.size_bytes} bytes, the node {size_bytes}"
        pending = [root]
        while pending:
            manifest = pending.pop()
            for entry in manifest.entries:
                if manifest.level == 0:
                    if problem := self._chunk_problem(entry.chunk, entry.size_bytes):
                        return problem
                    continue
                child_record = self._record(entry.chunk)
                if child_record is None:
                    return f"manifest {id_text(entry.chunk)} is missing"
                if child_record.birth not in self._referred:
                    self._referred.add(child_record.birth)
                    child = await self._manifests.read(entry.chunk)
                    check_child(entry, manifest, child)
                    pending.append(child)
            await trio.lowlevel.checkpoint()
        return ""

    def _chunk_problem(self, chunk: ChunkId, size_bytes: int) -> str:
        record = self._record(chunk)
        if record is None:
            return f"chunk {id_text(chunk)} is missing"
        self._referred.add(record.birth)
        if record.logical_bytes != size_bytes:
            return f"chunk {id_text(chunk)} has {record.logical_bytes} bytes where {size_bytes} are expected"
        return ""

    async def names(self) -> None:
        """Every name's node exists and is of its kind; every node has one name."""
        named = NumberSet()
        after = b""
        while True:
            with self._metadata.view() as view:
                page = _page(view.scan(Table.NAMES, after, b"\xff" * 9))
                for key, value in page:
                    kind, node_id = unpack_name(value)
                    self._name(view.get(Table.NODES, node_key(node_id)), key, kind, node_id, named)
            if not page:
                break
            after = page[-1][0] + b"\0"
            self.report.count("names", len(page))
            await trio.lowlevel.checkpoint()
        await self._unnamed(named)

    def _name(
        self, node_value: bytes | None, key: bytes, kind: NodeKind, node_id: NodeId, named: NumberSet
    ) -> None:
        shown = f"name {key[8:].decode(errors='replace')!r} in node {int.from_bytes(key[:8], 'big')}"
        if node_value is None:
            self.report.found("damage", shown, f"refers to node {node_id}, which is missing")
        elif unpack_node(node_value).kind is not kind:
            self.report.found("damage", shown, f"says {kind.name.lower()}, its node says otherwise")
        named.add(node_id)

    async def _unnamed(self, named: NumberSet) -> None:
        after = ROOT_NODE
        while True:
            with self._metadata.view() as view:
                page = iter_nodes(view, after, GC_BATCH)
            if not page:
                return
            after = page[-1][0]
            for node_id, _ in page:
                if node_id in self._nodes and node_id not in named:
                    self.report.found("damage", f"node {node_id}", "has no name")
            await trio.lowlevel.checkpoint()

    # --- chunks ------------------------------------------------------------------------------------

    async def places(self) -> None:
        """Every chunk lies inside its segment and overlaps no other; chunks that nothing refers to are noted."""
        sizes = {segment: await self._segments.size(segment) for segment in self._segments.all_ids()}
        extents: dict[SegmentId, array[int]] = {}
        garbage_count = garbage_bytes = 0
        after = b""
        while True:
            with self._metadata.view() as view:
                page = _page(view.scan(Table.CHUNKS, after, b"\xff"))
            if not page:
                break
            after = page[-1][0] + b"\0"
            for key, value in page:
                record = unpack_chunk_record(value)
                self._place(key, record, sizes, extents)
                if record.birth not in self._referred:
                    garbage_count += 1
                    garbage_bytes += record.extent_bytes
            self.report.count("chunks", len(page))
            await trio.lowlevel.checkpoint()
        self._overlaps(extents)
        if garbage_count:
            self.report.found(
                "note",
                "store",
                f"{garbage_count} chunks ({garbage_bytes} bytes) are referred to by nothing; gc frees them",
            )

    def _place(
        self,
        key: bytes,
        record: ChunkRecord,
        sizes: dict[SegmentId, int],
        extents: dict[SegmentId, array[int]],
    ) -> None:
        subject = id_text(chunk_id_of_key(key))
        size = sizes.get(record.segment)
        if size is None:
            self.report.found("damage", subject, f"its segment {record.segment:016x} is missing")
        elif record.offset + record.extent_bytes > size:
            self.report.found("damage", subject, f"its segment {record.segment:016x} ends before it")
        extents.setdefault(record.segment, array("Q")).extend((record.offset, record.extent_bytes))

    def _overlaps(self, extents: dict[SegmentId, array[int]]) -> None:
        for segment, places in extents.items():
            end = 0
            for offset, length in sorted(zip(places[::2], places[1::2], strict=True)):
                if offset < end:
                    self.report.found(
                        "damage", f"segment {segment:016x}", f"two chunks overlap at offset {offset}"
                    )
                end = max(end, offset + length)

    async def payloads(self) -> None:
        """Every payload against its CRC32C and its id."""
        after = b""
        while True:
            with self._metadata.view() as view:
                page = _page(view.scan(Table.CHUNKS, after, b"\xff"), limit=64)
            if not page:
                return
            after = page[-1][0] + b"\0"
            for key, value in page:
                await self._payload(chunk_id_of_key(key), unpack_chunk_record(value))

    async def _payload(self, chunk: ChunkId, record: ChunkRecord) -> None:
        try:
            payload = await self._chunks.read(record)
            good = await self._chunks.offload.run(chunk_id_of, kind_of(chunk), payload) == chunk
            problem = "" if good else "its bytes do not hash to its id"
        except LakeError as error:
            problem = error.message
        if problem and self._record(chunk) == record:
            self.report.found("damage", id_text(chunk), problem)
        self.report.count("payload_bytes", record.stored_bytes)

    # --- looking again -----------------------------------------------------------------------------

    def _record(self, chunk: ChunkId) -> ChunkRecord | None:
        with self._metadata.view() as view:
            return find_chunk(view, chunk)

    def _node_is(self, node_id: NodeId, blob: BlobId) -> bool:
        with self._metadata.view() as view:
            value = view.get(Table.NODES, node_key(node_id))
        return value is not None and unpack_node(value).blob == blob


def _page(scan: Iterator[tuple[bytes, bytes]], limit: int = GC_BATCH) -> list[tuple[bytes, bytes]]:
    page: list[tuple[bytes, bytes]] = []
    for entry in scan:
        page.append(entry)
        if len(page) == limit:
            break
    return page
