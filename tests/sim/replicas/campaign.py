"""`python -m tests.sim.replicas.campaign`: new histories of names with replicas until there were enough."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from collections import Counter

import structlog

from tests.sim.cluster.__main__ import say
from tests.sim.replicas.__main__ import failure_of
from tests.sim.replicas.world import History, ReplicasWorld

SAID_EVERY = 100


def try_seed(seed: int) -> History | str:
    """Run a history; return it, or its failure with the line that repeats it."""
    try:
        return ReplicasWorld(seed).run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        return failure_of(seed, error)


def run_campaign(first: int, histories: int, jobs: int) -> int:
    """Run that many histories; return how many failed."""
    began, failed = time.monotonic(), 0
    met: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(jobs, _be_quiet, maxtasksperchild=200) as pool:
        for count, outcome in enumerate(pool.imap_unordered(try_seed, range(first, first + histories)), 1):
            if isinstance(outcome, str):
                failed += 1
                say(outcome)
            else:
                met.update(outcome.met)
            if count % SAID_EVERY == 0 or count == histories:
                minutes = (time.monotonic() - began) / 60
                say(
                    f"{count} histories of names with replicas in {minutes:.1f} min: {met['operations']} operations, "
                    f"{met['failures']} of them cut short; {failed} failed"
                )
    return failed


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> int:
    """Run a campaign; return 0 when every history kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replicas.campaign")
    parser.add_argument("--histories", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="the first (default: the time)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    return 1 if run_campaign(asked.seed, asked.histories, asked.jobs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
