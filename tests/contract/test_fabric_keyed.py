"""Values of keys loaded into a pool by RDMA: the right bytes in their slots, and nothing anywhere else."""

from __future__ import annotations

import os

import pytest

from lakefs.content.verify import Check
from lakefs.errors import SessionLost
from lakefs.get.keyed import MISS
from lakefs.lake.spaces import SpaceSteps
from lakefs.limits import CHUNK_BYTES, KIB, MIB
from lakefs.wire import messages as m
from tests.contract.test_fabric_loads import POOL, Written, both_kinds, expected, laid_out, pool_of, written
from tests.fabric_liar import liar
from tests.fabric_rig import FabricWorld, RiggedLake, Run
from tests.simulated_fabric import Weather

__all__ = ["written"]
SIZES = (1, 4000, 64 * KIB, 300_000, CHUNK_BYTES, CHUNK_BYTES + 1)
KEYS = [b"key %d" % number for number in range(len(SIZES))]


async def space_of(lake: RiggedLake) -> SpaceSteps:
    """Open a space."""
    steps = lake.lake._driver.steps
    return SpaceSteps(steps, (await lake.run(steps.open_space("s", quota="10G"))).number)


@both_kinds
@pytest.mark.parametrize("check", list(Check))
def test_values_arrive_in_their_slots_and_nowhere_else(kind: str, check: Check, written: Written, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        values = [os.urandom(size) for size in SIZES]
        async with world.lake(kind, check=check) as lake, pool_of(lake) as pool:
            space = await space_of(lake)
            await lake.run(space.put_many(KEYS, values))
            offsets = laid_out(values)
            for rooms in ((), SIZES):
                pool.buffer[:] = b"\xaa" * POOL
                assert await lake.run(space.load(KEYS, pool, offsets, rooms)) == list(SIZES)
                assert bytes(pool.buffer) == expected(POOL, 0xAA, values, offsets)
            assert written.bytes == 2 * sum(SIZES)
            assert not lake.rdma.reason
            got = await lake.run(space.load([KEYS[1], b"none", KEYS[2]], pool, [0, 5000, 9000], [3999, 10, 64 * KIB]))
            assert got == [MISS, MISS, 64 * KIB]

    run(body, weather=Weather(loss=0.02, shuffle=True))


def test_the_key_of_another_s_memory_writes_nothing(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake("trio") as lake:
            space = await space_of(lake)
            value = os.urandom(MIB)
            await lake.run(space.put_many(KEYS[:1], [value]))
        async with liar(world) as client, liar(world) as other:
            with pytest.raises(SessionLost):
                await client.engine.call(m.KeyedLoad(0, space.number, KEYS[:1], [0], fabric=client.named()))
            await client.connect()
            await other.connect()
            stolen = client.named(key=other.region.remote_key, address=other.region.address)
            with pytest.raises(SessionLost):
                await client.engine.call(m.KeyedLoad(0, space.number, KEYS[:1], [0], fabric=stolen))
            assert bytes(other.memory) == bytes(MIB)
            await other.engine.call(m.KeyedLoad(0, space.number, KEYS[:1], [0], fabric=other.named()))
            assert bytes(other.memory) == value

    run(body)
