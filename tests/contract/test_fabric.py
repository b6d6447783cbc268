"""The simulated RDMA network: the port's contract, in good weather and bad, and bugs that the contract must find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lakefs.transport.fabric import Fabric
from tests.contract.fabric_suite import *
from tests.simulated_fabric import SimulatedWire, Weather

WEATHERS = {"fair": Weather(), "rough": Weather(loss=0.2, shuffle=True, delay_s=0.0005)}


@dataclass
class SimulatedRig:
    """Fabrics of one simulated wire."""

    wire: SimulatedWire

    def open(self) -> Fabric:
        """Open one more fabric."""
        return self.wire.fabric()


@pytest.fixture(params=WEATHERS)
def rig(request: pytest.FixtureRequest) -> Iterator[SimulatedRig]:
    with SimulatedWire(7, WEATHERS[request.param]) as wire:
        yield SimulatedRig(wire)
