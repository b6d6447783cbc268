"""RDMA over rxe0: the contract of the port, real deaths, links that go down, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakefs.transport.fabric import Fabric
from lakefs.transport.rdma import open_fabric
from tests.contract.fabric_suite import *

pytestmark = [pytest.mark.slow, pytest.mark.lab("rdma")]


class RdmaRig:
    """Fabrics on rxe0."""

    def __init__(self) -> None:
        self.opened: list[Fabric] = []

    def open(self) -> Fabric:
        """Open one more fabric."""
        fabric = open_fabric("rxe0")
        assert not isinstance(fabric, str), fabric
        self.opened.append(fabric)
        return fabric


@pytest.fixture
def rig() -> Iterator[RdmaRig]:
    made = RdmaRig()
    yield made
    for fabric in made.opened:
        fabric.close()
