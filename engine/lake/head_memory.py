"""The memory of a machine's head: its DRAM tier as planned, and the shared index of that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial

from engine.fabric.engine_fabric import EngineFabric
from engine.format.layouts import StoreIdentity
from engine.head.head_tier import HeadMemory
from engine.lake.plan import TierPlan
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from engine.tiers.tier_index import open_tier_index
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.ports import Offload


@asynccontextmanager
async def head_memory(
    plan: TierPlan, identity: StoreIdentity, offload: Offload, fabric: EngineFabric
) -> AsyncIterator[HeadMemory]:
    """Open the head's DRAM tier as planned, and its shared index.  EngineBusy: memory is short."""
    slabs_max = plan.size_bytes // SLAB_BYTES
    if not slabs_max:
        yield HeadMemory()
        return
    arena = await offload.run(partial(Arena, slabs_max, registered=fabric.registered))
    with closing(DramTier(arena)) as tier:
        async with open_tier_index(tier, offload, identity, plan.hot_index, plan.hot_index_entries) as index:
            yield HeadMemory(tier, index)
