"""A registered slab: no peer reaches its memory when that is released, and its grants name what peers READ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.fabric.engine_fabric import EngineFabric
from engine.fabric.registered_slab import RegisteredSlab, remote_grant
from engine.memory.sealed_memory import SealedMemory
from lakefs.limits import MIB
from lakefs.transport.fabric import Remote
from lakefs.wire.grants import Grant
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_FABRIC
from tests.simulated_fabric import SimulatedFabric, SimulatedWire


@pytest.fixture
def device() -> Iterator[SimulatedFabric]:
    with SimulatedWire() as wire:
        yield wire.fabric()


class Slab(SealedMemory):
    """Memory that notes how many regions of a device are open when it is released."""

    device: SimulatedFabric
    open_at_close: int | None = None

    def close(self) -> None:
        self.open_at_close = len(self.device.regions)
        super().close()


def test_the_registration_ends_before_the_memory_is_released(device: SimulatedFabric) -> None:
    memory = Slab("slab", MIB)
    memory.device = device
    fabric = EngineFabric(device)
    slab = fabric.registered(memory)
    assert [region.remote for region in device.regions.values()] == [Remote.READ]
    assert fabric.statistics()["registered_bytes"] == MIB
    slab.close()
    assert memory.open_at_close == 0
    assert not device.regions
    assert fabric.statistics()["registered_bytes"] == 0, "a slab that was given up is counted"


def test_a_grant_for_reads_names_key_and_address_of_the_cell(device: SimulatedFabric) -> None:
    slab = EngineFabric(device).registered(SealedMemory("slab", MIB))
    assert isinstance(slab, RegisteredSlab)
    found = remote_grant(slab, Grant(MEDIUM_DRAM, 3, 65536, 70_000, 70_000, 0, 99, 12))
    region = slab.region
    assert found == Grant(MEDIUM_FABRIC, region.remote_key, region.address + 65536, 70_000, 70_000, 0, 99)
    slab.close()


def test_memory_that_may_not_be_registered_is_used_as_it_is_and_has_no_grants() -> None:
    with SimulatedWire() as wire:
        fabric = EngineFabric(wire.fabric(registered_bytes_max=0))
        memory = SealedMemory("slab", MIB)
        assert fabric.registered(memory) is memory
        assert remote_grant(memory, Grant(MEDIUM_DRAM)) is None
        assert "may be locked" in fabric.reason
        assert EngineFabric(None, "none").registered(memory) is memory
        memory.close()
