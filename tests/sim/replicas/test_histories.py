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
    "killed": 20,
    "power lost": 15,
    "stopped": 25,
    "restarted": 5,
    "slow": 10,
    "disk lost": 15,
    "way: SILENT": 10,
    "way: CUT": 10,
    "way: LATE": 10,
    "etcd killed": 5,
    "etcd stopped": 5,
    "etcd separated": 5,
    "etcd full": 5,
    "compacted": 5,
    "failures": 100,
    "operations": 3000,
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
