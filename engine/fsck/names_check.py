"""Checks the names of an open store, wherever their content lies: `engine.fsck.check` and fsck of a lake stand on it.

Every name and version must have its node, every node a name, every blob be as the caller's `BlobProblem` says, and the
index and journal must match their checksums.  Damaged objects are named last, all at once: paths cost passes over all
names.  A record that changed during the walk is read again before it is called damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import trio

from engine.format.layouts import Node, NodeKind, Table, node_key, unpack_name, unpack_node
from engine.fsck.report import Problem, Report
from engine.fsck.upload_check import BlobProblem, UploadCheck
from engine.fsck.version_check import VersionCheck
from engine.metadata.metadata_store import Metadata
from engine.namespace.walk import NAMES_END, pages, paths_of, value_of, walk_nodes
from engine.tables.number_set import NumberSet
from lakefs.errors import CorruptionError, IndexDamaged, LakeError
from lakefs.findings import Finding
from lakefs.ids import ROOT_NODE, BlobId, NodeId

_LOOKS_FOR_NAMES: Final = 3
_LookAtName = Callable[[bytes, NodeKind, NodeId], None]


class NamesCheck:
    """Checks the names of one store.  Memory: a bit for each node, and the damaged records."""

    def __init__(self, metadata: Metadata, report: Report, blob_problem: BlobProblem) -> None:
        self.damaged: Final[dict[NodeId, Problem]] = {}
        """Nodes whose content is damaged."""
        self._metadata = metadata
        self._report = report
        self._blob_problem = blob_problem
        self._nodes = NumberSet()
        self._bad_names: list[tuple[NodeId, bytes, Problem]] = []
        self._uploads = UploadCheck(metadata, blob_problem)
        self._versions = VersionCheck(metadata)

    async def index_and_journal(self) -> None:
        """Check the index against its sums, the journal and the checkpoint against their checksums."""
        self._report.count("records", 0)
        for check in (self._metadata.verify_index, self._metadata.verify_journal):
            try:
                self._report.count("records", await check())
            except CorruptionError as error:
                message = error.message
                if isinstance(error, IndexDamaged):
                    self._metadata.index_suspect.set()
                    message += "; the engine rebuilds it by itself, now or at its next start"
                self._report.found(error.subject, error.finding, message)

    # --- nodes and uploads -------------------------------------------------------------------------

    async def nodes(self) -> None:
        """Check that every node's blob exists, with its manifest's children, and that a symlink has a target."""
        self._report.count("nodes", 0)
        await walk_nodes(self._metadata, self._node)

    async def uploads(self) -> None:
        """Check that every part's blob exists, and its upload; uploads of removed buckets are garbage."""
        await self._uploads.run()
        for what, number in self._uploads.counts.items():
            self._report.count(what, number)
        if self._uploads.orphans:
            self._report.found(
                "store",
                Finding.UPLOADS_ORPHANED,
                f"{self._uploads.orphans} uploads are to buckets that are gone; gc removes them",
            )

    async def contents_again(self) -> None:
        """Check the blobs of nodes and parts again, after more chunks were found damaged."""
        await walk_nodes(self._metadata, self._content_of)
        await self._uploads.parts_again()

    async def _node(self, node_id: NodeId, node: Node) -> None:
        self._nodes.add(node_id)
        self._report.count("nodes", 1)
        await self._content_of(node_id, node)

    async def _content_of(self, node_id: NodeId, node: Node) -> None:
        if node.kind is NodeKind.SYMLINK:
            target = node.attributes.symlink_target
            if node.blob is not None or not target or node.size_bytes != len(target):
                problem = "a symlink that has a blob, no target, or another size than its target"
                self.damaged[node_id] = Problem(Finding.SYMLINK_DAMAGED, problem)
        elif node.blob is not None:
            await self._blob(node_id, node.blob, node.size_bytes)

    async def _blob(self, node_id: NodeId, blob: BlobId, size_bytes: int) -> None:
        try:
            problem = await self._blob_problem(blob, size_bytes)
        except LakeError as error:
            problem = Problem(error.finding, error.message)
        if problem and self._node_is(node_id, blob):
            self.damaged[node_id] = problem

    def _node_is(self, node_id: NodeId, blob: BlobId) -> bool:
        value = value_of(self._metadata, Table.NODES, node_key(node_id))
        return value is not None and unpack_node(value).blob == blob

    # --- names -------------------------------------------------------------------------------------

    async def names(self) -> None:
        """Check that every name's node exists and is of its kind, every version's too, and that no node is unnamed."""
        named = NumberSet()
        self._report.count("names", 0)
        await self._walk_names(named, self._name)
        await self._versions.run(named)
        self._report.count("versions", self._versions.count)
        for _ in range(_LOOKS_FOR_NAMES):
            if not await self._unnamed(named):
                return
            # The walk may have missed a name that was moved from behind its place to before it,
            # and an old version that became the present one as a node that was overwritten.
            await self._walk_names(named, lambda key, kind, node_id: None)
            await self._versions.note_named(named)
        for node_id in await self._unnamed(named):
            self._report.found(f"node {node_id}", Finding.NODE_UNNAMED, "has no name")

    async def _walk_names(self, named: NumberSet, look: _LookAtName) -> None:
        for page in pages(self._metadata, Table.NAMES, b"", NAMES_END):
            for key, value in page:
                kind, node_id = unpack_name(value)
                look(key, kind, node_id)
                named.add(node_id)
            await trio.lowlevel.checkpoint()

    def _name(self, key: bytes, kind: NodeKind, node_id: NodeId) -> None:
        node_value = value_of(self._metadata, Table.NODES, node_key(node_id))
        if node_value is None:
            self._bad_name(key, Finding.NAME_NODE_MISSING, f"refers to node {node_id}, which is missing")
        elif unpack_node(node_value).kind is not kind:
            self._bad_name(key, Finding.NAME_KIND_WRONG, f"says {kind.name.lower()}, its node says otherwise")
        self._report.count("names", 1)

    def _bad_name(self, key: bytes, finding: Finding, message: str) -> None:
        parent = NodeId(int.from_bytes(key[:8], "big"))
        self._bad_names.append((parent, key[8:], Problem(finding, message)))

    async def _unnamed(self, named: NumberSet) -> list[NodeId]:
        """Return nodes that the walk over nodes met, that still exist, and that no name or version refers to."""
        unnamed: list[NodeId] = []

        async def look(node_id: NodeId, node: Node) -> None:
            if node_id != ROOT_NODE and node_id in self._nodes and node_id not in named:
                unnamed.append(node_id)

        await walk_nodes(self._metadata, look)
        return unnamed

    # --- findings ----------------------------------------------------------------------------------

    async def report_damaged(self, others: Iterable[tuple[str, Problem]] = ()) -> None:
        """Report what is damaged, by name: uploads, versions and `others`, then objects and names."""
        for subject, problem in [*await self._uploads.findings(), *await self._versions.findings(), *others]:
            self._report.found(subject, *problem)
        wanted = {*self.damaged, *(parent for parent, _, _ in self._bad_names)}
        paths = await paths_of(self._metadata, wanted) if wanted else {}
        paths |= await self._versions.paths_of(self.damaged.keys() - paths.keys()) if self.damaged else {}
        for node_id, problem in self.damaged.items():
            self._report.found(paths.get(node_id, f"node {node_id}"), *problem)
        for parent, name, problem in self._bad_names:
            path = paths.get(parent, "" if parent == ROOT_NODE else f"node {parent}: ")
            self._report.found(path + name.decode(errors="replace"), *problem)
