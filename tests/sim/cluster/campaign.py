"""`python -m tests.sim.cluster.campaign`: new histories of a lake until there were enough, with their rates."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable

import structlog

from tests.sim.cluster.__main__ import failure_of, say
from tests.sim.cluster.scenes import scene_of
from tests.sim.cluster.world import History, LakeWorld

SAID_EVERY = 50
NO_FAULTS = (
    *("operations", "failures", "keyed operations", "keyed hits", "healed", "waited for the full pass"),
    *("operations on buckets", "copy across", "rename across", "uploads aborted", "names shard added"),
)
"""Counts of a history that are of no fault."""
TrySeed = Callable[[int], History | str]


def try_seed(seed: int) -> History | str:
    """Run a history, every third a scene; return it, or its failure with the line that repeats it."""
    return outcome_of(scene_of(seed // 3) if seed % 3 == 2 else LakeWorld(seed))


def outcome_of(world: LakeWorld) -> History | str:
    """Run a history; return it, or its failure with the line that repeats it."""
    try:
        return world.run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        return failure_of(world, error)


def run_campaign(first: int, histories: int, jobs: int, try_one: TrySeed = try_seed, what: str = "a lake") -> int:
    """Run that many histories; return how many failed."""
    began, failed = time.monotonic(), 0
    met: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(jobs, _be_quiet, maxtasksperchild=200) as pool:
        for count, outcome in enumerate(pool.imap_unordered(try_one, range(first, first + histories)), 1):
            if isinstance(outcome, str):
                failed += 1
                say(outcome)
            else:
                met.update(outcome.met)
            if count % SAID_EVERY == 0 or count == histories:
                minutes = (time.monotonic() - began) / 60
                faults = sum(met.values()) - sum(met[what] for what in NO_FAULTS)
                say(
                    f"{count} histories of {what} in {minutes:.1f} min: {met['operations']} operations of clients, "
                    f"{faults} faults; {failed} failed"
                )
    return failed


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main(try_one: TrySeed = try_seed, what: str = "a lake", module: str = "campaign") -> int:
    """Run a campaign; return 0 when every history kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.sim.cluster.{module}")
    parser.add_argument("--histories", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="the first (default: the time)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    return 1 if run_campaign(asked.seed, asked.histories, asked.jobs, try_one, what) else 0


if __name__ == "__main__":
    raise SystemExit(main())
