"""The gc generation that names have joined: recorded, never going back, and looked at in the step that binds."""

from __future__ import annotations

import msgspec
import pytest
import trio

from engine.format.generation import JOINED_KEY, pack_joined, unpack_joined
from engine.format.layouts import Table
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.requests.bind import BindGate
from engine.tables.views import Transaction
from lakefs.errors import SessionLost, StoreUnusable
from lakefs.ids import GcGeneration
from lakefs.wire.messages import Answered
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import opened, run


def test_a_joined_generation_is_recorded_and_the_gate_knows_it_in_the_step() -> None:
    async def scenario() -> None:
        disk = SimDisk()
        async with opened(disk) as metadata:
            gate = BindGate()
            joined = JoinedGeneration(metadata, gate)
            gate.check(Answered(0, 1))
            for generation in (3, 3, 2):
                await joined.join(GcGeneration(generation))
                assert (joined.number, gate.joined_generation) == (3, 3)
        async with opened(disk) as metadata:
            gate = BindGate()
            joined = JoinedGeneration(metadata, gate)
            assert (joined.number, gate.joined_generation) == (3, 3)
            gate.check(Answered(2, 1))
            with pytest.raises(SessionLost, match="offer the chunks again"):
                gate.check(Answered(1, 1))

    run(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_bound_on_old_answers_is_bound_before_the_generation_is_joined(seed: int) -> None:
    """A binding that was not refused joined its group before the record, so a walk behind the record meets it."""

    async def scenario() -> None:
        async with opened(SimDisk()) as metadata:
            gate = BindGate()
            joined = JoinedGeneration(metadata, gate)
            bound: list[int] = []

            def bind(txn: Transaction) -> None:
                gate.check(Answered(1, 1))
                assert txn.get(Table.COUNTERS, JOINED_KEY) is None, "bound behind the record"
                txn.put(Table.NAMES, b"name %d" % len(bound), b"value")
                bound.append(1)

            async def writer() -> None:
                with pytest.raises(SessionLost):
                    for _ in range(100):
                        await metadata.commit(bind)
                        await trio.lowlevel.checkpoint()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer)
                for _ in range(seed * 3):
                    await trio.lowlevel.checkpoint()
                await joined.join(GcGeneration(3))
            assert len(bound) < 100

    run(scenario, seed)


def test_a_record_of_another_release_is_refused_by_name() -> None:
    assert unpack_joined(pack_joined(7)).generation == 7
    with pytest.raises(StoreUnusable, match="joined gc generation has version 2"):
        unpack_joined(msgspec.msgpack.encode([2, 7]))
    with pytest.raises(StoreUnusable, match="joined gc generation cannot be read"):
        unpack_joined(b"\xff")
