"""A few seeds of the simulator for `make test`; the others of `make test-all` follow in `test_seeds_first`."""

from __future__ import annotations

import pytest

from tests.sim.seeds import groups, run_group

SEEDS = range(1_000, 1_020)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", groups(SEEDS.start, SEEDS.stop), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_store_keeps_its_promises_through_stops_kills_and_power_losses(seeds: range) -> None:
    run_group(seeds)
