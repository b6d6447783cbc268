"""More seeds of the simulator: whatever happens, the engine keeps its promises; `make torture` runs all of them."""

from __future__ import annotations

import pytest

from tests.lengths import repeated
from tests.sim.seeds import groups, run_group

pytestmark = pytest.mark.thorough
END = repeated(265, 430)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", groups(215, END), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_store_keeps_its_promises_through_stops_kills_and_power_losses(seeds: range) -> None:
    run_group(seeds)
