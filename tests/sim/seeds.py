"""Deals the seeds of the simulator out to tests."""

from __future__ import annotations

from functools import cache

from tests.sim.workloads.lives import Result
from tests.sim.world.world import run_seed

GROUP = 10


def groups(first: int, end: int) -> list[range]:
    """Return the seeds in groups, one test each."""
    return [range(start, min(start + GROUP, end)) for start in range(first, end, GROUP)]


def run_group(seeds: range) -> None:
    """Run seeds; the first that fails prints how to run it again."""
    for seed in seeds:
        result_of(seed)


@cache
def result_of(seed: int) -> Result:
    """Return the result of a seed, which is run once a process."""
    return run_seed(seed)
