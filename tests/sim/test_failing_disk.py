"""What a failing disk must not lead to, found by the simulator and kept as small stories."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from engine.embedded import EmbeddedEngine
from engine.service import Service
from engine.store import Store, open_store
from lakefs.client.trio_lake import TrioLake
from lakefs.errors import DiskFailed, StoreReadOnly
from lakefs.limits import MIB
from lakefs.names import Name
from lakefs.offload import InlineOffload
from tests.sim.clock import SimClock
from tests.sim.disk import SimDisk


@asynccontextmanager
async def opened(disk: SimDisk) -> AsyncIterator[tuple[Store, TrioLake]]:
    async with open_store(disk, SimClock(), InlineOffload(), grace_s=0.0, verify_index=False) as store:
        engine = EmbeddedEngine(Service(store), descriptors=False)
        yield store, TrioLake(engine, InlineOffload())
        await engine.aclose()


def test_gc_frees_no_room_that_a_gc_before_it_has_freed_only_in_memory() -> None:
    """A cycle whose frees could not be made durable leaves them in the overlay, where the next one sees them."""
    disk = SimDisk(1, capacity_bytes=64 * MIB)

    async def fill() -> None:
        async with opened(disk) as (_, lake):
            await lake.put_many([(f"b/{number}", bytes([number]) * 9000) for number in range(10)])

    async def collect_twice() -> None:
        async with opened(disk) as (store, lake):
            await lake.run(lake.steps.remove_many([Name("b", str(number)) for number in range(5)]))
            before = await store.segments.allocated_bytes()
            disk.fail_next("sync_data", DiskFailed("planted"), path="journal/")
            for _ in range(2):
                with pytest.raises(StoreReadOnly):
                    await store.collector.run()
            assert await store.segments.allocated_bytes() == before

    async def look() -> None:
        async with opened(disk) as (store, _):
            assert (await store.check(full=True))["damage"] == 0

    trio.run(fill)
    trio.run(collect_twice)
    disk = disk.crash()
    trio.run(look)
