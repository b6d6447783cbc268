"""Reads manifests: checks and parses them, and caches the last few.

The cache is bounded by the number of entries it may hold; a chunk's bytes never change, so no entry becomes stale.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import trio

from engine.chunks.chunk_store import Chunks, find_chunk
from engine.metadata.metadata_store import Metadata
from lakefs.content.manifest import Manifest, check_child, parse
from lakefs.errors import ChunkDamaged, ChunkNotFound, InvalidArgument, StaleGrant
from lakefs.ids import ChunkId, id_text

CACHE_ENTRIES: Final = 65_536
"""Most entries of all cached manifests, about 200 bytes each: 13 MiB."""


class Manifests:
    """Reads manifest chunks."""

    def __init__(self, metadata: Metadata, chunks: Chunks) -> None:
        self._metadata = metadata
        self._chunks = chunks
        self._cache: OrderedDict[ChunkId, Manifest] = OrderedDict()
        self._cached_entries = 0

    async def read(self, chunk: ChunkId) -> Manifest:
        """Return the manifest.  ChunkNotFound, ChunkDamaged (also when its bytes are not a manifest)."""
        cached = self._cache.get(chunk)
        if cached is not None:
            self._cache.move_to_end(chunk)
            return cached
        payload = await self._payload(chunk)
        try:
            manifest = parse(payload)
        except InvalidArgument as error:
            raise ChunkDamaged(f"manifest {id_text(chunk)}: {error.message}", subject=id_text(chunk)) from error
        self._remember(chunk, manifest)
        return manifest

    async def _payload(self, chunk: ChunkId) -> bytes:
        """Return its bytes; locates them again if they were moved during the read."""
        while True:
            with self._metadata.view() as view:
                record = find_chunk(view, chunk)
            if record is None:
                raise ChunkNotFound(f"manifest {id_text(chunk)} is not in the store", subject=id_text(chunk))
            try:
                return await self._chunks.read(chunk, record)
            except StaleGrant:
                await trio.lowlevel.checkpoint()

    async def layout(self, top: ChunkId, chunks_max: int) -> tuple[list[ChunkId], list[int]] | None:
        """Return data chunks and lengths of a blob in order; None when they are more than `chunks_max`."""
        chunks: list[ChunkId] = []
        lengths: list[int] = []
        pending = [await self.read(top)]
        while pending:
            manifest = pending.pop()
            if len(chunks) + len(manifest.entries) > chunks_max:
                return None
            if manifest.level == 0:
                chunks.extend(entry.chunk for entry in manifest.entries)
                lengths.extend(entry.size_bytes for entry in manifest.entries)
                continue
            children: list[Manifest] = []
            for entry in manifest.entries:
                child = await self.read(entry.chunk)
                check_child(entry, manifest, child)
                children.append(child)
            pending.extend(reversed(children))
        return chunks, lengths

    def _remember(self, chunk: ChunkId, manifest: Manifest) -> None:
        if chunk in self._cache:
            return
        self._cache[chunk] = manifest
        self._cached_entries += len(manifest.entries)
        while self._cached_entries > CACHE_ENTRIES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_entries -= len(dropped.entries)
            assert self._cached_entries >= 0
