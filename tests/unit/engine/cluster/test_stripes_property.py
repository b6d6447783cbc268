"""Random stores, losses and returns against a model: what was acknowledged is readable while enough shards are up."""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from engine.members.ports import Wanted
from lakefs.errors import ClusterDegraded, LakeError, StoreFull
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB
from tests.unit.engine.cluster.stripe_rig import Fault, Rig, bytes_of, id_of, in_lake, payload_of

SIZES = (1, 4 * KIB, 64 * KIB, 64 * KIB + 1, 200_000, 300_000)
STATES = (Fault.NONE, Fault.NONE, Fault.NONE, Fault.NONE, Fault.AWAY, Fault.LOST, Fault.FULL, Fault.ANSWER_LOST)
PROTECTIONS = (("4+2", 6), ("4+2", 7), ("4+2", 3), ("2+1", 3), ("2+1", 5), ("1+1", 2), ("1+1", 3))
_GONE = (Fault.AWAY, Fault.LOST)


@settings(max_examples=12)
@given(st.sampled_from(PROTECTIONS), st.integers(0, 1 << 32))
def test_acknowledged_chunks_are_readable_while_enough_shards_are_up(lake: tuple[str, int], seed: int) -> None:
    protection, count = lake
    rng = random.Random(seed)

    async def body(rig: Rig) -> None:
        acknowledged: list[bytes] = []
        for step in range(14):
            for number in range(count):
                if rng.random() < 0.3:
                    rig.members.faults[id_of(number)] = rng.choice(STATES)
            payloads = [payload_of(rng.choice(SIZES), step * 10 + index) for index in range(rng.randint(1, 3))]
            try:
                if rng.random() < 0.3 and acknowledged:
                    payloads = [rng.choice(acknowledged)]
                    stored = await rig.present([data_chunk_id(payloads[0])])
                else:
                    await rig.store(*payloads)
                    stored = [True]
            except (ClusterDegraded, StoreFull):
                stored = [False]
            if all(stored):
                acknowledged += payloads
                for payload in payloads:
                    await _check_answer(rig, payload)
            await _check_reads(rig, acknowledged, rng)

    in_lake(body, protection, count)


async def _up(rig: Rig, payload: bytes) -> dict[int, list[int]]:
    """Return the shards of a chunk that members have which are not gone, and which members have each."""
    gone = {number for number in range(len(rig.stores)) if rig.members.faults.get(id_of(number)) in _GONE}
    held = {shard: [*{*numbers} - gone] for shard, numbers in (await rig.shards(payload)).items()}
    return {shard: numbers for shard, numbers in held.items() if numbers}


async def _check_answer(rig: Rig, payload: bytes) -> None:
    """Check that a chunk outlives the next member, and is noted as dirty unless it lies as the table says."""
    held = await _up(rig, payload)
    needed = rig.code.data_shards(len(payload))
    for number in range(len(rig.stores)):
        left = sum(numbers != [number] for numbers in held.values())
        assert left >= needed or set(held) == set(rig.code.shards(len(payload))), "it outlives one more member"
    at_home = all(rig.home(payload, shard) in held.get(shard, []) for shard in rig.code.shards(len(payload)))
    assert at_home or rig.table.partition_of(data_chunk_id(payload)) in await rig.dirty()


async def _check_reads(rig: Rig, acknowledged: list[bytes], rng: random.Random) -> None:
    """Read a few chunks: right bytes when enough shards are up, else an error."""
    for payload in rng.sample(acknowledged, min(3, len(acknowledged))):
        if rng.random() < 0.5:
            rig.forget()
        offset = rng.choice([0, 0, rng.randrange(len(payload))])
        length = rng.choice([0, rng.randint(1, len(payload) - offset)])
        known = rng.choice([0, len(payload)])
        [got] = await rig.stripes.read([Wanted(data_chunk_id(payload), known, offset, length)])
        if isinstance(got, LakeError):
            assert len(await _up(rig, payload)) < rig.code.data_shards(len(payload)), got
        else:
            assert bytes_of(got, offset, length) == (payload[offset : offset + length] if length else payload[offset:])
