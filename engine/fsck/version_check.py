"""Checks versions of an open store, for `engine.fsck.check`.

Every version must refer to a node, be in a bucket that exists, and be filed under its own key and order.

The content of a version's node is checked with all other nodes; this module names it, as `BUCKET/KEY, version ID`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final

import msgspec

from engine.format.layouts import NodeKind, Table, node_key, unpack_node
from engine.format.records import VersionRecord
from engine.fsck.report import Problem
from engine.metadata.metadata_store import Metadata
from engine.namespace.version_keys import bucket_of, group_of, group_of_key, is_null, order_key, path_of
from engine.namespace.versions import NULL, unpack_version
from engine.namespace.walk import paths_of, records, value_of
from engine.tables.number_set import NumberSet
from lakefs.errors import LakeError
from lakefs.findings import Finding
from lakefs.ids import NodeId

_KINDS = frozenset(kind for kind in NodeKind if kind not in (NodeKind.FOLDER, NodeKind.HIDDEN))


class VersionCheck:
    """Checks the table `versions`, page by page, beside writers.  Memory: the damaged records."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._records: Final = partial(records, metadata, Table.VERSIONS, b"\0", b"\xff" * 9)
        self._damaged: dict[bytes, Problem] = {}
        """Problems, by the key in the table."""
        self.count = 0

    async def run(self, named: NumberSet) -> None:
        """Check all records; adds their nodes to `named`."""
        async for key, value in self._records():
            self.count += 1
            try:
                record = unpack_version(value)
            except (LakeError, msgspec.DecodeError) as error:
                message = f"a version whose record cannot be read: {error}"
                self._damaged[key] = Problem(Finding.VERSION_UNREADABLE, message)
                continue
            named.add(NodeId(record.node))
            problem = self._problem(key, record)
            if problem and value_of(self._metadata, Table.VERSIONS, key) == value:
                self._damaged[key] = problem

    async def note_named(self, named: NumberSet) -> None:
        """Add the nodes that versions refer to."""
        async for _, value in self._records():
            try:
                named.add(NodeId(unpack_version(value).node))
            except (LakeError, msgspec.DecodeError):
                continue

    async def findings(self) -> list[tuple[str, Problem]]:
        """Return the damaged versions by name, with their problems."""
        return [(await self._name(key), problem) for key, problem in self._damaged.items()]

    async def paths_of(self, nodes: Collection[NodeId]) -> dict[NodeId, str]:
        """Return the names of those nodes that are versions."""
        found: dict[NodeId, bytes] = {}
        async for key, value in self._records():
            try:
                node = NodeId(unpack_version(value).node)
            except (LakeError, msgspec.DecodeError):
                continue
            if node in nodes:
                found[node] = key
        return {node: await self._name(key) for node, key in found.items()}

    def _problem(self, key: bytes, record: VersionRecord) -> Problem | None:
        path = path_of(key) or record.key
        if group_of(bucket_of(key), path) != group_of_key(key):
            return Problem(Finding.VERSION_MISFILED, "a version under another key than its own")
        if not is_null(key) and order_key(group_of_key(key), record.order) != key:
            return Problem(Finding.VERSION_MISFILED, "a version that says another order than it is filed under")
        with self._metadata.view() as view:
            value = view.get(Table.NODES, node_key(NodeId(record.node)))
            has_bucket = view.get(Table.BUCKETS, node_key(bucket_of(key))) is not None
        if value is None:
            message = f"a version that refers to node {record.node}, which is missing"
            return Problem(Finding.VERSION_NODE_MISSING, message)
        try:
            node = unpack_node(value)
        except (LakeError, ValueError) as error:
            return Problem(Finding.VERSION_NODE_UNREADABLE, f"a version whose node cannot be read: {error}")
        if node.kind not in _KINDS:
            return Problem(Finding.VERSION_KIND_WRONG, f"a version that is a {node.kind.name.lower()}")
        if not has_bucket:
            return Problem(Finding.VERSION_BUCKET_MISSING, "a version in a bucket that is gone")
        return None

    async def _name(self, key: bytes) -> str:
        value = value_of(self._metadata, Table.VERSIONS, key)
        path, bucket = path_of(key), bucket_of(key)
        if not path and value is not None:
            try:
                path = unpack_version(value).key
            except (LakeError, msgspec.DecodeError):
                path = group_of_key(key)[8:]
        names = await paths_of(self._metadata, [bucket])
        version = NULL if is_null(key) else f"{(1 << 64) - 1 - int.from_bytes(key[-8:], 'big'):016x}"
        return f"{names.get(bucket, f'node {bucket}/')}{path.decode(errors='replace')}, version {version}"
