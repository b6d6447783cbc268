"""Chunks of a DRAM tier are loaded into a pool without a request, at one engine and at a head; also if it is shrunk."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
import trio

from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.process.shared_index_life import run_shared_index
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.opening import open_store
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import InvalidArgument, SourceChanged
from lakefs.host.new_memory import new_memory
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineService
from tests.head_rig import SLAB_BYTES, lake_of
from tests.store_rig import SMALL_SIZES

LENGTHS: Final = (64 * KIB, 64 * KIB, 20 * KIB, 50_001)
OFFSETS: Final = [0, 400_000, 500_000, 600_000]
POOL: Final = MIB


@dataclass
class Hot:
    """A server of either kind with a tier that has these contents, and a client of it, of one thread."""

    engine: BlockingEngine
    lake: Lake
    tier: DramTier
    contents: list[bytes]

    @property
    def chunks(self) -> list[bytes]:
        return [data_chunk_id(content) for content in self.contents]

    def put_and_note(self) -> None:
        for number, content in enumerate(self.contents):
            self.lake.put(f"bkt/{number}", content, create_bucket=True)
        for _ in range(2):
            self.engine.finish(self.engine.start(m.NoteReads(self.chunks)))

    def load_until_slabs_are_mapped(self) -> None:
        with self.lake.pool(size_bytes=POOL) as pool:
            offsets = OFFSETS[: len(self.contents)]
            for _ in range(2):  # behind the first one the client has the index, behind the second one the slabs
                assert self.lake.load_many(self.chunks, pool, offsets) == list(map(len, self.contents))


Opened = Callable[[Path], AbstractAsyncContextManager[tuple[EngineService, DramTier]]]


@asynccontextmanager
async def _one_engine(folder: Path) -> AsyncIterator[tuple[EngineService, DramTier]]:
    tier = DramTier(Arena(3, SLAB_BYTES))
    async with ThreadOffload(2, "engine") as offload:
        disk = LocalDisk(folder / "store")
        async with open_store(disk, SystemClock(), offload, grace_s=0.0, sizes=SMALL_SIZES, tier=tier) as store:
            async with trio.open_nursery() as nursery:
                await nursery.start(run_shared_index, store, "memory", 500)
                yield Service(store), tier
                nursery.cancel_scope.cancel()
    tier.close()


@asynccontextmanager
async def _head(folder: Path) -> AsyncIterator[tuple[EngineService, DramTier]]:
    async with ThreadOffload(2, "head") as offload:
        async with lake_of(offload=offload, clock=SystemClock(), slabs=3) as lake:
            tier = lake.head.parts.tier.dram.tier
            assert tier is not None
            yield lake.head, tier


@pytest.fixture(params=[_one_engine, _head], ids=["engine", "head"])
def opened(request: pytest.FixtureRequest) -> Opened:
    found: Opened = request.param
    return found


def run(
    opened: Opened,
    folder: Path,
    body: Callable[[Hot], None],
    check: Check = Check.NONE,
    lengths: Sequence[int] = LENGTHS,
) -> None:
    """Run `body` in a thread once the tier has contents of these lengths, and the client has mapped its slabs."""

    async def main() -> None:
        async with opened(folder) as (service, tier), trio.open_nursery() as nursery:
            server = Server(service, TrioNetwork(), token=None)
            address = await nursery.start(server.listen_and_serve, f"unix:{folder}/socket")
            engine = await trio.to_thread.run_sync(connect_blocking, address)
            lake = Lake(engine, check=check)
            hot = Hot(engine, lake, tier, [os.urandom(length) for length in lengths])
            try:
                await trio.to_thread.run_sync(hot.put_and_note)
                with trio.fail_after(20):
                    while not all(ChunkId(chunk) in tier for chunk in hot.chunks):
                        await trio.lowlevel.checkpoint()
                await trio.to_thread.run_sync(hot.load_until_slabs_are_mapped)
                await trio.to_thread.run_sync(body, hot)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(lake.close)
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("check", list(Check))
def test_a_pool_is_filled_from_slabs_without_a_request(opened: Opened, tmp_path: Path, check: Check) -> None:
    def body(hot: Hot) -> None:
        driver = driver_of(hot.lake)
        with hot.lake.pool(size_bytes=POOL) as pool:
            with mock.patch.object(type(driver), "run", side_effect=AssertionError("the engine was asked")):
                assert hot.lake.load_many(hot.chunks, pool, OFFSETS) == list(LENGTHS)
            for offset, content in zip(OFFSETS, hot.contents, strict=True):
                assert bytes(pool.buffer[offset : offset + len(content)]) == content

    run(opened, tmp_path, body, check)


def test_a_pool_that_was_shrunk_is_an_error_and_no_signal(opened: Opened, tmp_path: Path) -> None:
    def body(hot: Hot) -> None:
        descriptor = new_memory(POOL)
        with hot.lake.pool(size_bytes=POOL, descriptor=descriptor) as pool:
            assert hot.lake.load_many(hot.chunks, pool, OFFSETS) == list(LENGTHS)
            os.ftruncate(descriptor, 64 * KIB)
            with pytest.raises((SourceChanged, InvalidArgument)):
                hot.lake.load_many(hot.chunks, pool, OFFSETS)
            assert hot.lake.load_many(hot.chunks[:1], pool, [0]) == [64 * KIB]
        os.close(descriptor)

    run(opened, tmp_path, body)


@pytest.mark.parametrize("check", [Check.BLAKE3, Check.CRC32C])
def test_bits_that_flip_in_a_slab_are_noticed_and_the_right_ones_are_loaded(
    opened: Opened, tmp_path: Path, check: Check
) -> None:
    def body(hot: Hot) -> None:
        place = hot.tier.find(ChunkId(hot.chunks[2]))
        assert place is not None
        hot.tier.extent(place)[9] ^= 1
        with hot.lake.pool(size_bytes=POOL) as pool:
            assert hot.lake.load_many(hot.chunks, pool, OFFSETS) == list(LENGTHS)
            for offset, content in zip(OFFSETS, hot.contents, strict=True):
                assert bytes(pool.buffer[offset : offset + len(content)]) == content

    run(opened, tmp_path, body, check)


@pytest.mark.parametrize("check", list(Check))
def test_long_chunks_and_those_that_have_left_are_loaded_too(opened: Opened, tmp_path: Path, check: Check) -> None:
    def body(hot: Hot) -> None:
        with hot.lake.pool(size_bytes=POOL) as pool:
            for _ in range(2):
                assert hot.lake.load_many(hot.chunks, pool, OFFSETS[:2]) == [300 * KIB, 64 * KIB]
                for offset, content in zip(OFFSETS[:2], hot.contents, strict=True):
                    assert bytes(pool.buffer[offset : offset + len(content)]) == content
                    pool.buffer[offset : offset + len(content)] = bytes(len(content))
                trio.from_thread.run_sync(hot.tier.forget, ChunkId(hot.chunks[1]))

    run(opened, tmp_path, body, check, lengths=(300 * KIB, 64 * KIB))
