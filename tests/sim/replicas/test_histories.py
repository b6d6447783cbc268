"""Histories of names with replicas: whatever happens, each name is a register, and nothing acknowledged is lost."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.sim.replicas.world import History, ReplicasWorld
from tests.sim.seeds import groups

pytestmark = pytest.mark.slow

SEEDS = range(50)
MUST_HAPPEN = {
    "killed": 8,
    "power lost": 8,
    "stopped": 15,
    "restarted": 3,
    "divided": 15,
    "slow": 3,
    "disk lost": 8,
    "way: SILENT": 3,
    "way: CUT": 3,
    "way: LATE": 3,
    "etcd killed": 3,
    "etcd stopped": 3,
    "etcd separated": 3,
    "etcd full": 3,
    "compacted": 3,
    "failures": 60,
    "operations": 2000,
}


@cache
def history_of(seed: int) -> History:
    """Return a seed's history, which is run once a process."""
    world = ReplicasWorld(seed)
    try:
        return world.run()
    except Exception as error:
        error.add_note("\n".join([*world.history.log[-60:], f"again: python -m tests.sim.replicas {seed}"]))
        raise


@pytest.mark.parametrize("seeds", groups(SEEDS.start, SEEDS.stop), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_names_with_replicas_are_registers_whatever_happens(seeds: range) -> None:
    for seed in seeds:
        history_of(seed)


def test_the_histories_come_across_everything_that_they_are_meant_to() -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        met.update(history_of(seed).met)
    assert {what: met[what] for what, least in MUST_HAPPEN.items() if met[what] < least} == {}


def test_a_seed_is_the_same_history_each_time() -> None:
    assert ReplicasWorld(1).run().log == history_of(1).log
