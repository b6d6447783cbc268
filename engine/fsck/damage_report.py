"""The objects that damaged chunks belong to: every name, version, upload part and keyed value that refers to them.

One pass over nodes, parts and values; a manifest that many objects share is read once.  Pages are views of their own,
so an object that changes during the pass may be reported as it was before.

Memory: the owners found, of at most `CHUNKS_MAX` chunks, and a bit for each manifest without damage below it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final

import trio

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import Manifests
from engine.chunks.quarantine import Quarantine
from engine.format.keyed import VALUES_BEGIN, VALUES_END, unpack_value
from engine.format.layouts import Node, Table
from engine.fsck.keyed_check import value_name
from engine.fsck.report import Problem
from engine.fsck.upload_check import UploadCheck
from engine.fsck.version_check import VersionCheck
from engine.metadata.metadata_store import Metadata
from engine.namespace.walk import pages, paths_of, walk_nodes
from engine.tables.number_set import NumberSet
from engine.uploads.keys import PARTS_BEGIN, PARTS_END
from engine.uploads.lifecycle import unpack_part
from lakefs.errors import LakeError
from lakefs.ids import EMPTY_CHUNK, WHOLE_CHUNK, BlobId, ChunkId, ChunkKind, NodeId, chunk_of, kind_of, shard_text

CHUNKS_MAX: Final = 1000
"""Most chunks listed in one report; all are counted."""
_Found = frozenset[ChunkId]
_NOTHING: Final[_Found] = frozenset()


async def damage_report(metadata: Metadata, manifests: Manifests, quarantine: Quarantine) -> list[dict[str, Any]]:
    """Return the quarantined chunks: id, reason, time, and the names of all objects that contain them; JSON-able.

    Which objects a shard belongs to is not known here: the names are not a member's own.
    """
    noted = quarantine.noted(CHUNKS_MAX)
    whole = [item.chunk for item in noted if item.shard == WHOLE_CHUNK]
    owners = await owners_of(metadata, manifests, whole) if whole else {}
    return [
        {
            "chunk": shard_text(item.chunk, item.shard),
            "code": item.code,
            "reason": item.reason,
            "found": datetime.fromtimestamp(item.time_ns / 1e9, UTC).isoformat(timespec="seconds"),
            "objects": owners[item.chunk] if item.shard == WHOLE_CHUNK else [],
        }
        for item in noted
    ]


async def owners_of(metadata: Metadata, manifests: Manifests, chunks: Collection[ChunkId]) -> dict[ChunkId, list[str]]:
    """Return for each chunk the objects, versions, parts and keyed values that refer to it, by name; sorted."""
    search = _Search(metadata, manifests, frozenset(chunks))
    await search.nodes()
    await search.parts()
    await search.values()
    return await search.named()


class _Search:
    def __init__(self, metadata: Metadata, manifests: Manifests, wanted: _Found) -> None:
        self._metadata = metadata
        self._manifests = manifests
        self._wanted = wanted
        self._below: dict[ChunkId, _Found] = {}
        """Manifests that are damaged, or have damage below them, with the wanted chunks found there."""
        self._whole = NumberSet()
        self._nodes: dict[ChunkId, list[NodeId]] = {chunk: [] for chunk in wanted}
        self._parts: dict[ChunkId, list[bytes]] = {chunk: [] for chunk in wanted}
        self._values: dict[ChunkId, list[bytes]] = {chunk: [] for chunk in wanted}

    async def nodes(self) -> None:
        async def look(node_id: NodeId, node: Node) -> None:
            for chunk in _NOTHING if node.blob is None else await self._in_blob(node.blob):
                self._nodes[chunk].append(node_id)

        await walk_nodes(self._metadata, look)

    async def parts(self) -> None:
        for page in pages(self._metadata, Table.UPLOADS, PARTS_BEGIN, PARTS_END):
            for key, value in page:
                for chunk in await self._in_blob(BlobId(unpack_part(value).blob)):
                    self._parts[chunk].append(key)
            await trio.lowlevel.checkpoint()

    async def values(self) -> None:
        for page in pages(self._metadata, Table.KEYED, VALUES_BEGIN, VALUES_END):
            for key, record in page:
                for chunk in self._wanted.intersection(unpack_value(record).chunks):
                    self._values[chunk].append(key)
            await trio.lowlevel.checkpoint()

    async def named(self) -> dict[ChunkId, list[str]]:
        """Return the owners found, by name."""
        nodes = {node for found in self._nodes.values() for node in found}
        paths = await paths_of(self._metadata, nodes) if nodes else {}
        if nodes - paths.keys():
            paths |= await VersionCheck(self._metadata).paths_of(nodes - paths.keys())
        uploads = UploadCheck(self._metadata, _no_problem)
        owners: dict[ChunkId, list[str]] = {}
        for chunk in self._wanted:
            names = [paths.get(node, f"node {node}") for node in self._nodes[chunk]]
            names += [await uploads.name_of(key) for key in self._parts[chunk]]
            names += [value_name(self._metadata, key) for key in self._values[chunk]]
            owners[chunk] = sorted(names)
        return owners

    async def _in_blob(self, blob: BlobId) -> _Found:
        chunk = chunk_of(blob)
        if chunk == EMPTY_CHUNK:
            return _NOTHING
        if kind_of(chunk) is ChunkKind.DATA:
            return self._wanted & {chunk}
        return await self._in_manifest(chunk)

    async def _in_manifest(self, chunk: ChunkId) -> _Found:
        known = self._below.get(chunk)
        if known is not None:
            return known
        with self._metadata.view() as view:
            record = find_chunk(view, chunk)
        if record is None or record.birth in self._whole:
            return _NOTHING
        found = set(self._wanted & {chunk})
        try:
            manifest = await self._manifests.read(chunk)
        except LakeError:
            entries: list[ChunkId] = []  # the manifest itself is damaged, so its children are unknown
        else:
            entries = [entry.chunk for entry in manifest.entries]
        for entry in entries:
            if kind_of(entry) is ChunkKind.DATA:
                found |= self._wanted & {entry}
            else:
                found |= await self._in_manifest(entry)
        if found:
            self._below[chunk] = frozenset(found)
        else:
            self._whole.add(record.birth)
        return frozenset(found)


async def _no_problem(blob: BlobId, size_bytes: int) -> Problem | None:
    return None
