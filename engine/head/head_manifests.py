"""Manifests and layouts at a head: read over members, the last few kept."""

from __future__ import annotations

from engine.chunks.manifests import CachedManifests
from engine.members.ports import Stripes, Wanted
from lakefs.errors import LakeError
from lakefs.ids import ChunkId


class HeadManifests(CachedManifests):
    """Reads manifest chunks.  ChunkNotFound, ClusterDegraded, ChunkDamaged."""

    def __init__(self, stripes: Stripes) -> None:
        super().__init__(self._payload)
        self._stripes = stripes

    async def _payload(self, chunk: ChunkId) -> memoryview:
        (got,) = await self._stripes.read([Wanted(chunk, 0)])
        if isinstance(got, LakeError):
            raise got
        return got.payload
