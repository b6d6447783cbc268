"""How the seeds of the simulator are dealt out to tests."""

from __future__ import annotations

from functools import cache

from tests.sim.workloads.lives import Result
from tests.sim.world.world import run_seed

GROUP = 10


def groups(first: int, end: int) -> list[range]:
    """Seeds in groups, one test each."""
    return [range(start, min(start + GROUP, end)) for start in range(first, end, GROUP)]


def run_group(seeds: range) -> None:
    """Run them; the first that fails says how to run it again."""
    for seed in seeds:
        result_of(seed)


@cache
def result_of(seed: int) -> Result:
    """The run of a seed, once a process."""
    return run_seed(seed)
