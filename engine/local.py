"""A store on a local folder with real disk, threads and clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine.arena import Arena
from engine.clock import SystemClock
from engine.crash_note import noting_crashes
from engine.disk import LocalDisk
from engine.dram_tier import DramTier
from engine.io_queue import open_io_queue
from engine.store import Store
from engine.store_opening import open_store
from lakefs.limits import GC_GRACE_S
from lakefs.offload import ThreadOffload
from lakefs.slabs import SLAB_BYTES

ENGINE_THREADS = 6
"""Two cores' worth of hashing, and calls that wait for the disk."""


@asynccontextmanager
async def open_local_store(
    data: Path,
    *,
    grace_s: float = GC_GRACE_S,
    upload_expiry_s: float = 0.0,
    io_uring: bool = True,
    dram_tier_bytes: int = 0,
) -> AsyncIterator[Store]:
    """Open (or create) the store in a folder; stopped cleanly at the end.  Arguments and errors: see `open_store`.

    `io_uring`: whether the disk is read that way where the kernel allows it.
    `dram_tier_bytes`: memory of the DRAM tier, in whole slabs; 0: none.
    """
    disk = LocalDisk(data)
    async with (
        _tier_of(dram_tier_bytes // SLAB_BYTES) as tier,
        ThreadOffload(ENGINE_THREADS, "lake") as offload,
        open_io_queue(offload, wanted=io_uring) as queue,
        open_store(
            disk,
            SystemClock(),
            offload,
            grace_s=grace_s,
            upload_expiry_s=upload_expiry_s,
            while_locked=lambda: noting_crashes(disk),
            io_queue=queue,
            tier=tier,
        ) as store,
    ):
        yield store


@asynccontextmanager
async def _tier_of(slabs_max: int) -> AsyncIterator[DramTier | None]:
    """A DRAM tier of so many slabs, whose memory is given back at the end; None for 0."""
    if not slabs_max:
        yield None
        return
    tier = DramTier(Arena(slabs_max))
    try:
        yield tier
    finally:
        tier.close()
