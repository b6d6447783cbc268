"""A disk that fails to sync or to read, and a clock that is set back, under a real store in this process.

A failed sync is never tried again: from then on nothing is acknowledged, reads are served, and what was acknowledged is
there when the store is opened anew.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk, LocalFile
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Store
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import ChunkDamaged, DiskFailed, LakeError, StoreReadOnly
from lakefs.host.offload import ThreadOffload
from lakefs.ports import Clock, Disk

KIB = 1 << 10
MIB = 1 << 20
YEAR_NS = 365 * 24 * 3600 * 10**9


class FailingFile(LocalFile):
    """A file whose syncs and reads fail when its disk says so."""

    __slots__ = ("disk", "path")

    def __init__(self, descriptor: int, path: str, direct: bool, disk: FailingDisk) -> None:
        super().__init__(descriptor, path, direct)
        self.disk = disk
        self.path = path

    def sync_data(self) -> None:
        self.disk.attempt("sync", self.path)
        super().sync_data()

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        self.disk.attempt("read", self.path)
        return super().pread_into(buffer, offset)

    def preadv_cached_into(self, buffers: Sequence[memoryview], offset: int) -> bool:
        self.disk.attempt("read", self.path)
        return super().preadv_cached_into(buffers, offset)


class FailingDisk(LocalDisk):
    """A local disk; `fail` names what fails from now on: an operation, and the end or beginning of paths."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fail: tuple[str, str] | None = None
        self.failures = 0

    def open(self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False) -> LocalFile:
        file = super().open(path, create=create, direct=direct, read_only=read_only)
        own = FailingFile(os.dup(file.fileno()), path, file.direct, self)
        file.close()
        return own

    def attempt(self, operation: str, path: str) -> None:
        if self.fail is not None and operation == self.fail[0] and self.fail[1] in path:
            self.failures += 1
            raise DiskFailed(f"cannot {operation} {path}: Input/output error", subject=path)


@asynccontextmanager
async def opened(disk: Disk, clock: Clock | None = None) -> AsyncIterator[tuple[TrioLake, Store]]:
    async with (
        ThreadOffload(3, "faults") as offload,
        open_store(disk, clock or SystemClock(), offload, grace_s=0.0) as store,
    ):
        engine = EmbeddedEngine(Service(store))
        lake = TrioLake(engine, offload)
        try:
            yield lake, store
        finally:
            await lake.aclose()
            await engine.aclose()


def contents() -> dict[str, bytes]:
    return {"bkt/packed": os.urandom(1000), "bkt/one": os.urandom(300 * KIB), "bkt/many": os.urandom(9 * MIB)}


async def read_all(lake: TrioLake, stored: dict[str, bytes]) -> None:
    for name, content in stored.items():
        assert await lake.get(name) == content, name


async def refused(lake: TrioLake, attempt: Callable[[], Awaitable[Any]]) -> LakeError:
    with pytest.raises((StoreReadOnly, DiskFailed)) as caught:
        await attempt()
    return caught.value


@pytest.mark.parametrize("where", ["journal/", ".large", ".small"])
def test_a_failed_sync_is_final_and_loses_nothing_acknowledged(tmp_path: Path, where: str) -> None:
    stored = contents()
    doubtful = {"bkt/doubtful packed": os.urandom(2000), "bkt/doubtful large": os.urandom(5 * MIB)}

    async def fail() -> None:
        disk = FailingDisk(tmp_path)
        async with opened(disk) as (lake, store):
            for name, content in stored.items():
                await lake.put(name, content, create_bucket=True)
            disk.fail = ("sync", where)
            victim = "bkt/doubtful packed" if where != ".large" else "bkt/doubtful large"
            first = await refused(lake, lambda: lake.put(victim, doubtful[victim], create_bucket=True))
            assert "Input/output error" in first.message
            failures = disk.failures
            assert failures == 1

            disk.fail = None  # the disk works again, but the engine does not rely on that
            for name, content in doubtful.items():
                error = await refused(lake, partial(lake.put, name, content))
                assert "restart" in error.message, error
            for attempt in (
                lambda: lake.remove("bkt/packed"),
                lambda: lake.create_bucket("another"),
                lambda: lake.move("bkt/packed", "bkt/moved"),
            ):
                await refused(lake, attempt)
            await read_all(lake, stored)
            status = await lake.status()
            assert status["state"] == "read-only"
            assert "Input/output error" in status["reason"]
            assert store.hello(descriptors=True).read_only
        assert disk.failures == failures

    async def reopen() -> None:
        async with opened(LocalDisk(tmp_path)) as (lake, _):
            await read_all(lake, stored)
            for name, content in doubtful.items():
                assert not await lake.exists(name) or await lake.get(name) == content
            assert (await lake.gc())["live_chunks"] >= 4
            assert (await lake.fsck(full=True))["damage"] == 0
            await lake.put("bkt/after", b"after", create_bucket=True)
            assert (await lake.status())["state"] == "serving"

    trio.run(fail)
    trio.run(reopen)


def test_a_segment_that_cannot_be_read_fails_its_objects_and_is_healed_by_putting_them_again(tmp_path: Path) -> None:
    stored = contents()

    async def main() -> None:
        disk = FailingDisk(tmp_path)
        async with opened(disk) as (lake, _):
            for name, content in stored.items():
                await lake.put(name, content, create_bucket=True)
        async with opened(disk) as (lake, _):
            disk.fail = ("read", "0000000000000001")
            harmed = []
            for name, content in stored.items():
                try:
                    assert await lake.get(name) == content
                except ChunkDamaged as error:
                    harmed.append(error.subject)
            assert harmed
            for name in harmed:
                await lake.put(name, stored[name], create_bucket=True)
            await read_all(lake, stored)
            assert (await lake.status())["state"] == "serving"

    trio.run(main)


class WanderingClock:
    """A wall clock that is set back between any two looks at it; time itself goes on."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._back_ns = 0

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall_ns(self) -> int:
        self._back_ns += YEAR_NS
        return max(0, self._clock.wall_ns() - self._back_ns)


def test_a_wall_clock_that_goes_back_changes_what_is_shown_and_nothing_else(tmp_path: Path) -> None:
    stored = contents()

    async def main() -> None:
        clock = WanderingClock()
        for round_number in range(3):
            async with opened(LocalDisk(tmp_path), clock) as (lake, _):
                for name, content in stored.items():
                    await lake.put(f"{name} {round_number}", content, create_bucket=True)
                    await lake.put(name, content[::-1] if round_number % 2 else content, create_bucket=True)
                await lake.remove(f"bkt/one {round_number}")
                await lake.gc()
                assert (await lake.fsck(full=True))["damage"] == 0
        async with opened(LocalDisk(tmp_path)) as (lake, _):
            await read_all(lake, stored)
            times = [entry.mtime_ns async for entry in lake.ls("bkt/")]
            assert len(times) == 9 - 3 + 3 - 0
            assert all(time_ns >= 0 for time_ns in times)
            assert (await lake.fsck(full=True))["damage"] == 0

    trio.run(main)
