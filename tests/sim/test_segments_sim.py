"""Segments under random work, faults and power loss: nothing stored is lost, no two extents meet.

One seed is one run.  A failing one is run again with: pytest 'tests/sim/test_segments_sim.py' -k 'SEED-'
"""

from __future__ import annotations

import random

import pytest
import trio

from engine.format.sizes import SegmentSizes
from lakefs.errors import DiskFailed, LakeError, StoreFull
from lakefs.limits import KIB, MIB
from tests.lengths import repeated
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.sim.world.segment_world import World

SEEDS = repeated(24, 60)
BOOTS = 4
WRITERS = 4
STEPS = 8
SIZES = SegmentSizes(
    large_segment=768 * KIB, small_segment=200 * KIB, large_extend=256 * KIB, small_fill=48 * KIB, headroom=64 * KIB
)


async def _writer(world: World, rng: random.Random) -> None:
    """Store, give up, free, and be cancelled now and then; a full or failed disk ends nothing."""
    for _ in range(STEPS):
        choice = rng.randrange(10)
        try:
            with trio.CancelScope() as scope:
                if rng.randrange(8) == 0:
                    scope.deadline = trio.current_time()
                if choice < 5:
                    lengths = [rng.choice([1, 100, 5000, 65_535]) for _ in range(rng.randrange(1, 4))]
                    await world.store_small([world.payload(length) for length in lengths])
                elif choice < 8:
                    await world.store_large(world.payload(rng.choice([65_536, 70_000, 200_000, 300_001])))
                elif choice == 8:
                    place, _ = await world.write_large(world.payload(65_536))
                    world.segments.in_flight.settle(place)
                else:
                    await _free_some(world, rng)
        except (StoreFull, DiskFailed):
            continue
        except LakeError:
            return  # read-only after the planted failure


async def _free_some(world: World, rng: random.Random) -> None:
    freed = [record for record in list(world.stored) if rng.randrange(3) == 0]
    for record in freed:
        del world.stored[record]
    await world.segments.room.punch([(r.segment, r.offset, r.extent_bytes) for r in freed])


def _plant_faults(disk: SimDisk, rng: random.Random) -> None:
    if rng.randrange(3) == 0:
        operation = rng.choice(["pwrite", "sync_data", "allocate", "open", "sync_folder", "truncate"])
        error = rng.choice([StoreFull("planted"), DiskFailed("planted")])
        if operation != "sync_data" or isinstance(error, DiskFailed):
            disk.fail_next(operation, error, skip=rng.randrange(20))
    if rng.randrange(2) == 0:
        disk.crash_at = rng.randrange(1, 120)


async def _boot(world: World, rng: random.Random) -> None:
    """Run one life of the process; it ends by a clean stop, or by SimCrashed."""
    await world.check()
    async with trio.open_nursery() as nursery:
        for _ in range(WRITERS):
            nursery.start_soon(_writer, world, random.Random(rng.random()))
    assert not any(world.segments.in_flight.count(segment) for segment in world.segments.register.kinds)
    await world.check()
    if not world.segments.gate.reason:
        await world.collect()
        await world.check()
    await world.segments.close()


def _run(seed: int, capacity_bytes: int) -> int:
    rng = random.Random(seed)
    disk = SimDisk(rng, capacity_bytes=capacity_bytes, supports_direct=seed % 3 > 0)

    async def main() -> int:
        world = World(disk, sizes=SIZES, seed=seed)
        await world.segments.open()
        stored = 0
        for _ in range(BOOTS):
            current = world.disk
            assert isinstance(current, SimDisk)
            try:
                await _boot(world, rng)
            except* (SimCrashed, DiskFailed, StoreFull):
                pass
            stored += len(world.stored)
            heir = current.kill() if rng.randrange(3) == 0 else current.crash()
            await world.reopen(heir)
            await world.check()
            _plant_faults(heir, rng)
        return stored

    return run_seeded(main, seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_work_with_faults_and_power_loss_loses_nothing_stored(seed: int) -> None:
    assert _run(seed, 64 * MIB) > 0


@pytest.mark.parametrize("seed", range(SEEDS // 3))
def test_the_same_on_a_disk_that_is_soon_full(seed: int) -> None:
    _run(seed, 2 * MIB)


def test_a_seed_is_a_run() -> None:
    assert _run(7, 64 * MIB) == _run(7, 64 * MIB)
