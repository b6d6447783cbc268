"""Seeded runs of an engine with a DRAM tier: its answers are what was stored, and what is freed is not in the tier.

Several workloads put, read, remove and collect at once over a simulated disk and threads, while the tier, two small
slabs of plain memory, is filled, turned over, and forgets.  A planted bug shows that the check can fail.
"""

from __future__ import annotations

import random
from unittest import mock

import pytest
import trio

from engine.chunks.chunk_store import find_chunk
from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_shared_index
from engine.store.store import Store
from engine.tiers.arena import Arena
from engine.tiers.dram_source import SegmentSource
from engine.tiers.dram_tier import DramTier, Placement
from lakefs.errors import ChunkNotFound, StaleGrant
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from tests.shared_index_check import check_shared_index
from tests.sim.world.determinism import run_seeded
from tests.sim.world.offload import SimOffload
from tests.sim.world.sim_time import SimTime
from tests.store_rig import client_of, delete, gc, put, read, simulated_store

SLAB = 512 * KIB
SIZES = (5 * KIB, 30 * KIB, 64 * KIB, 64 * KIB + 1, 200 * KIB)
CONTENTS = 14
CUSTOMERS = 3
OPERATIONS = 60
LOOKS_BETWEEN_CHECKS = 9
SEEDS = range(6)


class PlainMemory:
    """Memory that nobody else can map."""

    descriptor = -1
    on_huge_pages = False

    def __init__(self, name: str, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))

    def close(self) -> None:
        self.view.release()


class World:
    """One run: its contents, and the places that were granted for them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.contents = [self.rng.randbytes(self.rng.choice(SIZES)) for _ in range(CONTENTS)]
        self.tier = DramTier(Arena(2, SLAB, PlainMemory))
        self.granted: list[tuple[Placement, bytes]] = []
        self.looks = self.told_slabs = 0

    async def main(self) -> dict[str, int]:
        offload = SimOffload(self.rng, slowest_s=0.001)
        async with simulated_store(offload=offload, tier=self.tier) as store:
            async with trio.open_nursery() as background:
                await background.start(run_shared_index, store, "memory", 800)
                async with trio.open_nursery() as workloads:
                    for number in range(CUSTOMERS):
                        workloads.start_soon(self._workload, store, number)
                await gc(client_of(store))
                self._look(store)
                assert check_shared_index(store)
                background.cancel_scope.cancel()
            figures = self.tier.statistics()
        assert figures["pinned_bytes"] == 0, "a reader left a pin"
        assert figures["fills"] == figures["chunks"] + figures["demotions"] + figures["forgotten"]
        self.tier.close()
        return figures | {"told_slabs": self.told_slabs}

    async def _workload(self, store: Store, number: int) -> None:
        client = client_of(store)
        for _ in range(OPERATIONS):
            index = min(int(self.rng.expovariate(0.4)), CONTENTS - 1)
            content, key = self.contents[index], f"{number}.{index}"
            await self._operate(client, self.rng.randrange(20), key, content)
            self._look(store)

    async def _operate(self, client: EmbeddedEngine, choice: int, key: str, content: bytes) -> None:
        chunk = data_chunk_id(content)
        if choice < 3:
            await put(client, key, content)
        elif choice < 5:
            index = key.partition(".")[2]
            await delete(client, *(f"{number}.{index}" for number in range(CUSTOMERS)))
        elif choice == 5:
            await gc(client)
        elif choice < 8:
            await self._read_name(client, key, content)
        else:
            await self._read_chunk(client, chunk, content)

    async def _read_name(self, client: EmbeddedEngine, key: str, content: bytes) -> None:
        reply = await client.call(m.OpenObjects([("bkt", key)], lease=False))
        answered = reply.body.joined()
        reply.body.release()
        assert answered in (b"", content)

    async def _read_chunk(self, client: EmbeddedEngine, chunk: ChunkId, content: bytes) -> None:
        place = self.tier.find(chunk)
        if place is not None:
            self.granted.append((place, content))
        try:
            assert await read(client, chunk) == content
        except (ChunkNotFound, StaleGrant):
            return  # removed by another workload

    def _look(self, store: Store) -> None:
        """Check what a reader by mapping would see now, what is in the tier, and what the shared index says of it."""
        self.looks += 1
        if not self.looks % LOOKS_BETWEEN_CHECKS:
            check_shared_index(store)
            self.told_slabs += store.shared_index is not None and len(store.shared_index.in_slabs)
        for place, content in self.granted[-20:]:
            number = place.slab * SLAB + place.offset
            if self.tier.arena._generations[number // (16 * KIB)] == place.generation:
                assert bytes(self.tier.extent(place)[: len(content)]) == content
        with store.metadata.view() as view:
            for content in self.contents:
                chunk = data_chunk_id(content)
                assert chunk not in self.tier or find_chunk(view, chunk), "what was freed is in the tier"
        assert self.tier.arena.memory_bytes <= 2 * SLAB < MIB + 1


def _run(seed: int) -> dict[str, int]:
    return run_seeded(World(seed).main, seed, clock=SimTime())


def test_what_an_engine_with_a_tier_answers_is_what_was_stored() -> None:
    figures = [_run(seed) for seed in SEEDS]
    for name in ("hits", "fills", "demotions", "forgotten", "told_slabs"):
        assert sum(figure[name] for figure in figures), f"no run met {name}"


def test_the_same_seed_is_the_same_run() -> None:
    assert _run(3) == _run(3)


def test_a_tier_that_does_not_hear_of_frees_is_noticed() -> None:
    errors = AssertionError, BaseExceptionGroup
    with mock.patch.object(SegmentSource, "on_gone", return_value=None), pytest.raises(errors) as raised:
        for seed in SEEDS:
            _run(seed)
    assert "what was freed is in the tier" in repr(raised.value)
