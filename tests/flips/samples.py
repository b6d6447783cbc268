"""Small real stores to flip bits in: few records, long names, so that LMDB's trees are three levels deep all the same.

`make_stopped` leaves a store after a clean stop: checkpoint, index, nothing needed of the journal.  `make_killed`
leaves one as SIGKILL does: acknowledged groups that only the journal has, behind a checkpoint and an older index.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from engine.format.sizes import MetadataSizes, SegmentSizes, StoreSizes
from engine.host.clock import SystemClock
from engine.host.crash_marker import noting_crashes
from engine.host.local_disk import LocalDisk
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Store
from lakefs.client.trio.lake import TrioLake
from lakefs.host.offload import InlineOffload
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m

SIZES = StoreSizes(
    MetadataSizes(journal_fill=64 * KIB),
    SegmentSizes(large_segment=8 * MIB, small_segment=256 * KIB, large_extend=MIB, small_fill=64 * KIB),
    part_bytes_min=1,
)
KEPT = "kept"
"""A bucket that keeps versions."""
BUCKETS = ("plain", KEPT)
_OBJECT_BYTES = (0, 1, 700, 5000, 40_000, 64 * KIB, 200 * KIB)
_PART_BYTES = (90_000, 66_000, 10_000)
_LONG_NAMES = 80
_LONG_NAME_HEX = 220
"""Bytes of random name, twice as long in text: a page holds eight such names, and the pages above as many keys."""


@asynccontextmanager
async def opened(data: Path) -> AsyncIterator[tuple[Store, EmbeddedEngine, TrioLake]]:
    """Open the store as `lake serve` does but for sizes and threads: what is handed to threads runs inline."""
    disk = LocalDisk(data)
    offload = InlineOffload()
    async with open_store(
        disk, SystemClock(), offload, grace_s=0.0, sizes=SIZES, while_locked=lambda _: noting_crashes(disk)
    ) as store:
        engine = EmbeddedEngine(Service(store))
        lake = TrioLake(engine, offload)
        try:
            yield store, engine, lake
        finally:
            with trio.CancelScope(shield=True):
                await lake.aclose()
                await engine.aclose()


def make_stopped(data: Path) -> None:
    """Make a store with three lives and a clean stop."""
    generator = random.Random(11)
    trio.run(_first_life, data, generator)
    trio.run(_second_life, data, generator)
    trio.run(_second_life, data, generator)


def make_killed(data: Path) -> None:
    """Make a store that was killed after acknowledged writes that its index has not."""
    make_stopped(data)
    if not (child := os.fork()):
        trio.run(_last_life, data, random.Random(12))
    os.waitpid(child, 0)


async def _first_life(data: Path, generator: random.Random) -> None:
    async with opened(data) as (_, engine, lake):
        for bucket in BUCKETS:
            await lake.create_bucket(bucket)
        await lake.set_bucket("kept", versioning="enabled")
        for size in _OBJECT_BYTES:
            await lake.put(f"plain/sizes/{size}", generator.randbytes(size))
        for name in ("plain/large", "plain/in parts"):
            upload = await lake.create_upload(name)
            parts = [
                (number, (await lake.put_part(upload, number, generator.randbytes(size))).etag)
                for number, size in enumerate(_PART_BYTES, 1)
            ]
            if name == "plain/large":  # the other upload stays unfinished
                await lake.complete_upload(upload, parts)
        await lake.copy("plain/large", "plain/copy of large")
        names = [f"plain/many/{_long(generator)}{'/' * (n % 2)}{n:04}" for n in range(_LONG_NAMES)]
        await lake.put_many([(name, name.encode() * 3) for name in names])
        await lake.create_access_key()
        await lake.make_folder("plain/empty folder")
        attributes = m.ObjectAttributes(xattrs={"user.note": generator.randbytes(3000)}, tags={"team": "blue"})
        await engine.call(m.MakeSymlink("plain", "link", b"sizes/700", attributes))
        await engine.call(m.SetAttributes("plain", "sizes/700", tags={"state": "kept"}, mtime_ns=7 * 10**18))
        xattrs: dict[str, bytes | None] = {"user.large": generator.randbytes(3000)}
        await engine.call(m.SetAttributes("plain", "sizes/5000", xattrs=xattrs))


def _long(generator: random.Random) -> str:
    return generator.randbytes(_LONG_NAME_HEX).hex()


async def _second_life(data: Path, generator: random.Random) -> None:
    """Make changes, so that the index has older copies of its pages, and room that was given up."""
    async with opened(data) as (store, _, lake):
        for turn in range(6):
            await lake.put("kept/again and again", generator.randbytes(3000 + turn))
        for number in range(20):
            await lake.put(f"plain/later/{generator.randbytes(2).hex()}", generator.randbytes(50 * number))
        async for entry in lake.ls("plain/many/"):
            if generator.random() < 0.1:
                await lake.put(f"plain/{entry.key}", generator.randbytes(90))
        await lake.gc()
        await store.scrubber.advance(1.0, rate_bytes_per_s=0)


async def _last_life(data: Path, generator: random.Random) -> None:
    async with opened(data) as (store, _, lake):
        for number in range(12):
            await lake.put(f"plain/last/{number}", generator.randbytes(900 * number + 1))
        await lake.remove("plain/sizes/1")
        await lake.put("plain/sizes/700", generator.randbytes(100))
        await store.metadata.sync()
        os._exit(0)
