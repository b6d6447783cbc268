"""Failures that the simulator found on a failing disk, kept as small tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from engine.format.sizes import MetadataSizes, StoreSizes
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Store
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import DiskFailed, StoreReadOnly
from lakefs.host.offload import InlineOffload
from lakefs.limits import KIB, MIB
from lakefs.names import Name
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk

pytestmark = pytest.mark.thorough

SIZES = StoreSizes(metadata=MetadataSizes(journal_file=16 * KIB, journal_fill=4 * KIB))


@asynccontextmanager
async def opened(disk: SimDisk) -> AsyncIterator[tuple[Store, TrioLake]]:
    async with open_store(disk, SimClock(), InlineOffload(), grace_s=0.0, verify_index=False, sizes=SIZES) as store:
        engine = EmbeddedEngine(Service(store), descriptors=False)
        yield store, TrioLake(engine, InlineOffload())
        await engine.aclose()


def test_gc_frees_no_room_that_a_gc_before_it_has_freed_only_in_memory() -> None:
    """A cycle whose frees were not made durable leaves them in the overlay, where the next cycle sees them."""
    disk = SimDisk(1, capacity_bytes=64 * MIB)

    async def fill() -> None:
        async with opened(disk) as (_, lake):
            await lake.put_many([(f"bkt/{number}", bytes([number]) * 9000) for number in range(10)], create_bucket=True)

    async def collect_twice() -> None:
        async with opened(disk) as (store, lake):
            driver = driver_of(lake)
            await driver.run(driver.steps.remove_many([Name("bkt", str(number)) for number in range(5)]))
            before = await store.segments.room.allocated_bytes()
            disk.fail_next("sync_data", DiskFailed("planted"), path="journal/")
            for _ in range(2):
                with pytest.raises(StoreReadOnly):
                    await store.collector.run()
            assert await store.segments.room.allocated_bytes() == before

    async def look() -> None:
        async with opened(disk) as (store, _):
            assert (await store.check(full=True))["damage"] == 0

    trio.run(fill)
    trio.run(collect_twice)
    disk = disk.crash()
    trio.run(look)


def test_a_superseded_journal_file_that_a_crash_brought_back_is_no_damage() -> None:
    """Without a sync between their removals, a power loss may bring back any of these files, not just the newest."""
    disk = SimDisk(3, capacity_bytes=64 * MIB)
    oldest: list[tuple[str, bytes]] = []

    async def put_and_rotate() -> None:
        async with opened(disk) as (_, lake):
            for number in range(12):
                await lake.put(f"bkt/{number}", bytes([number]) * 100, create_bucket=True)
            path = f"journal/{disk.list_folder('journal')[0]}"
            oldest.append((path, read_whole(disk, path)))

    async def open_and_die() -> None:
        async with opened(disk):
            raise SimCrashed

    async def look() -> None:
        async with opened(disk) as (store, lake):
            assert len([entry async for entry in lake.ls("bkt")]) == 12
            assert (await store.check(full=True))["damage"] == 0

    trio.run(put_and_rotate)
    with suppress(SimCrashed, BaseExceptionGroup):
        trio.run(open_and_die)
    disk = disk.kill()
    superseded, empty = disk.list_folder("journal")
    ((path, content),) = oldest
    assert path < f"journal/{superseded}" < f"journal/{empty}"
    disk.unlink(f"journal/{superseded}")
    write_whole(disk, path, content)
    trio.run(look)


def read_whole(disk: SimDisk, path: str) -> bytes:
    file = disk.open(path, read_only=True)
    buffer = bytearray(file.size())
    file.pread_into(memoryview(buffer), 0)
    file.close()
    return bytes(buffer)


def write_whole(disk: SimDisk, path: str, content: bytes) -> None:
    file = disk.open(path, create=True)
    file.pwrite(content, 0)
    file.close()
