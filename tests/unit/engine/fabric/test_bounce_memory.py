"""Bounce memory: the buffers of one process, and of the heads that divide them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
import trio

from engine.fabric.bounce_memory import BounceMemory
from lakefs.host.offload import InlineOffload
from lakefs.limits import BOUNCE_BUFFERS, BOUNCE_BYTES, MIB
from tests.simulated_fabric import SimulatedFabric, SimulatedWire

SHARES = {1: 15, 2: 7, 4: 3, 7: 2, 8: 2, 64: 2}


@pytest.fixture
def device() -> Iterator[SimulatedFabric]:
    with SimulatedWire() as wire:
        yield wire.fabric()


@pytest.mark.parametrize("sharers", SHARES)
def test_as_many_buffers_are_made_as_are_this_process_s_share(sharers: int, device: SimulatedFabric) -> None:
    async def main() -> None:
        memory = BounceMemory(device, sharers)
        assert memory.registered_bytes == 0
        async with AsyncExitStack() as stack:
            for _ in range(SHARES[sharers]):
                await stack.enter_async_context(memory.taken(InlineOffload()))
            with trio.move_on_after(0.01) as waiting:
                async with memory.taken(InlineOffload()):
                    pass
            assert waiting.cancelled_caught, "one more was to be had"
        assert memory.registered_bytes == device.registered_bytes == SHARES[sharers] * BOUNCE_BYTES
        memory.close()
        assert not device.regions

    trio.run(main)


def test_up_to_seven_heads_register_no_more_than_one_engine() -> None:
    assert SHARES[1] == BOUNCE_BUFFERS
    for sharers, share in SHARES.items():
        assert sharers > 7 or sharers * share * BOUNCE_BYTES <= 64 * MIB
