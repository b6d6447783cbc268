"""The RDMA device of an engine: opened as configured, named in the reason if it is not, closed at the end."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from engine.fabric.engine_fabric import EngineFabric
from engine.process.rdma_device import rdma_device, rdma_of_heads
from lakefs.config.settings import load
from lakefs.errors import ConfigError, FabricFailed
from lakefs.limits import BOUNCE_BUFFERS
from lakefs.transport.fabric import Fabric, Remote
from tests.simulated_fabric import SimulatedFabric, SimulatedWire

ON_TCP = {"native": "127.0.0.1:7000"}


def opened(flags: dict[str, str], found: Fabric | str, *, by_heads: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Return the names of devices that were opened, and the state that `lake status` shows."""
    asked: list[str] = []

    def open_fabric(name: str) -> Fabric | str:
        asked.append(name)
        return found

    async def main() -> dict[str, Any]:
        config = load(file="/dev/null", environ={"HOME": "/home/a"}, flags=flags)
        async with (rdma_of_heads if by_heads else rdma_device)(config, open_fabric) as fabric:
            assert isinstance(fabric, EngineFabric)
            return fabric.statistics()

    return asked, trio.run(main)


def test_beside_tcp_the_first_device_is_used_and_closed_at_the_end() -> None:
    with SimulatedWire() as wire:
        device: SimulatedFabric = wire.fabric()
        asked, state = opened(ON_TCP, device)
        assert asked == [""]
        assert state == {
            "state": "on",
            "device": "simulated",
            "reason": "",
            "queue_pairs": 0,
            "queue_pairs_made": 0,
            "registered_bytes": 0,
        }
        with pytest.raises(FabricFailed):
            device.open_link(Remote.READ)


def test_without_tcp_or_switched_off_no_device_is_looked_for() -> None:
    for flags in ({}, {**ON_TCP, "rdma": "off"}):
        asked, state = opened(flags, "never asked")
        assert asked == []
        assert state["state"] == "off"
        assert "off" in state["reason"]


def test_a_machine_without_a_device_serves_over_tcp_with_the_reason() -> None:
    asked, state = opened(ON_TCP, "there is no RDMA device")
    assert asked == [""]
    assert state == {"state": "off", "reason": "there is no RDMA device"}


def test_a_named_device_has_to_be_usable() -> None:
    with pytest.raises(ConfigError, match="rdma = mlx5_0: no port is active"):
        opened({**ON_TCP, "rdma": "mlx5_0"}, "no port is active")
    with SimulatedWire() as wire:
        asked, state = opened({"rdma": "mlx5_0:1:3"}, wire.fabric())  # also without TCP
        assert asked == ["mlx5_0:1:3"]
        assert state["state"] == "on"


def test_a_process_whose_heads_use_the_device_only_looks_at_one_that_was_named() -> None:
    unused = {"state": "off", "reason": "the heads of this machine use it"}
    assert opened(ON_TCP, "never asked", by_heads=True) == ([], unused)
    assert opened({**ON_TCP, "rdma": "off"}, "never asked", by_heads=True) == ([], unused)
    with SimulatedWire() as wire:
        device: SimulatedFabric = wire.fabric()
        assert opened({**ON_TCP, "rdma": "mlx5_0"}, device, by_heads=True) == (["mlx5_0"], unused)
        with pytest.raises(FabricFailed):
            device.open_link(Remote.READ)
    with pytest.raises(ConfigError, match="rdma = mlx5_0: no port is active"):
        opened({**ON_TCP, "rdma": "mlx5_0"}, "no port is active", by_heads=True)


def test_a_head_moves_bytes_through_its_share_of_the_buffers() -> None:
    async def buffers_of(heads: str, device: SimulatedFabric) -> int:
        config = load(file="/dev/null", environ={"HOME": "/home/a"}, flags={**ON_TCP, "heads": heads})
        async with rdma_device(config, lambda name: device) as fabric:
            assert fabric._bounces is not None
            return fabric._bounces.count_max

    with SimulatedWire() as wire:
        found = [trio.run(buffers_of, heads, wire.fabric()) for heads in ("1", "4")]
    assert found == [BOUNCE_BUFFERS, BOUNCE_BUFFERS // 4]
