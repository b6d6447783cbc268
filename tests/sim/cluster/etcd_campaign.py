"""`python -m tests.sim.cluster.etcd_campaign`: as `tests.sim.cluster.campaign`, of lakes over an etcd."""

from __future__ import annotations

from tests.sim.cluster.campaign import main, outcome_of
from tests.sim.cluster.world import History, LakeWorld


def try_etcd_seed(seed: int) -> History | str:
    """Run a history over an etcd; return it, or its failure with the line that repeats it."""
    return outcome_of(LakeWorld(seed, has_etcd=True))


if __name__ == "__main__":
    raise SystemExit(main(try_etcd_seed, "a lake over an etcd", "etcd_campaign"))
