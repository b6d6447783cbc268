"""A head with a DRAM tier of small slabs, over chunks in memory, and clients of it; for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio
import trio.testing

from engine.head.head import Head
from engine.host.clock import SystemClock
from engine.process.embedded import EmbeddedEngine
from engine.tiers.dram_tier import DramTier
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.errors import ClusterDegraded
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from tests.head_rig import Lake, lake_of

SLABS: Final = 3
LENGTHS: Final = [20 * KIB, 64 * KIB, 300 * KIB, 4 * MIB, 4 * MIB + 100 * KIB]
FEATURES: Final = m.FEATURE_EACH | m.FEATURE_SLABS | m.FEATURE_SHARED_INDEX | m.FEATURE_LENT_MEMORY
AWAY: Final = ClusterDegraded("too few members are up")


@dataclass
class World:
    """A head with a tier of small slabs over chunks in memory, and clients of it."""

    lake: Lake
    offload: ThreadOffload

    @property
    def tier(self) -> DramTier:
        return tier_of(self.lake.head)

    def client(self, *, descriptors: bool = True) -> EmbeddedEngine:
        return EmbeddedEngine(self.lake.head, descriptors=descriptors, features=FEATURES)

    @asynccontextmanager
    async def connected(self, *, descriptors: bool = True, check: Check = Check.BLAKE3) -> AsyncIterator[TrioLake]:
        client = self.client(descriptors=descriptors)
        lake = TrioLake(client, self.offload, check=check)
        try:
            yield lake
        finally:
            await lake.aclose()
            await client.aclose()

    async def warm(self, *contents: bytes) -> list[ChunkId]:
        """Store contents of one chunk each as objects, and read them until the tier has them."""
        async with self.connected(descriptors=False) as lake:
            for number, content in enumerate(contents):
                await lake.put(f"bkt/{number}", content, create_bucket=True)
                for _ in range(2):
                    assert await lake.get(f"bkt/{number}") == content
        chunks = [data_chunk_id(content) for content in contents]
        await in_tier(self.tier, chunks)
        return chunks

    def lose_members(self) -> None:
        """Have no chunk be read over members from now on."""
        self.lake.stripes.read_error = AWAY


def tier_of(head: Head) -> DramTier:
    tier = head.parts.tier.dram.tier
    assert tier is not None
    return tier


async def in_tier(tier: DramTier, chunks: Sequence[ChunkId]) -> None:
    with trio.fail_after(20):
        while not all(chunk in tier for chunk in chunks):
            await trio.lowlevel.checkpoint()


def run(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ThreadOffload(2, "head tier") as offload:
            async with lake_of(offload=offload, clock=SystemClock(), slabs=SLABS) as lake:
                with trio.fail_after(60):
                    await body(World(lake, offload))

    trio.run(main)
