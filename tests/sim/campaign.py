"""`python -m tests.sim.campaign`: new seeds until there were enough crashes and operations, with the rates."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from dataclasses import dataclass, field

import structlog

from tests.sim.__main__ import say, try_seed
from tests.sim.workloads.lives import Result
from tests.sim.world.world import ROUNDS

BATCH_PER_JOB = 20


@dataclass
class Tally:
    """The sums over all seeds."""

    began: float = field(default_factory=time.monotonic)
    seeds: int = 0
    lives: int = 0
    crashes: int = 0
    operations: int = 0
    faults: int = 0
    disk_operations: int = 0
    decisions: int = 0
    failed: int = 0

    def add(self, outcome: Result | str) -> None:
        """Count one seed; print a failure at once."""
        self.seeds += 1
        if isinstance(outcome, str):
            self.failed += 1
            say(outcome)
            return
        self.lives += outcome.lives
        self.crashes += outcome.crashes
        self.operations += outcome.operations
        self.faults += outcome.faults
        self.disk_operations += outcome.disk_operations
        self.decisions += outcome.decisions

    def __str__(self) -> str:
        minutes = (time.monotonic() - self.began) / 60
        counted = {"operations": self.operations, "faults": self.faults, "crashes": self.crashes}
        rates = ", ".join(f"{count} {what} ({count / minutes:.0f} a minute)" for what, count in counted.items())
        return (
            f"{self.seeds} seeds in {minutes:.1f} min: {rates}; {self.lives} lives, {self.decisions} changes of "
            f"names, {self.disk_operations} operations of the disk; {self.failed} failed"
        )


def run_campaign(first: int, crashes: int, operations: int, rounds: int, jobs: int) -> Tally:
    """Run batches of seeds, one after the other; print the sums after each."""
    tally = Tally()
    with multiprocessing.get_context("fork").Pool(jobs, _be_quiet) as pool:
        while tally.crashes < crashes or tally.operations < operations:
            batch = range(first, first + BATCH_PER_JOB * jobs)
            for outcome in pool.imap_unordered(try_seed, [(seed, rounds) for seed in batch]):
                tally.add(outcome)
            say(str(tally))
            first = batch.stop
    return tally


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> int:
    """Run a campaign; return 0 when every seed kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.campaign")
    parser.add_argument("--crashes", type=int, default=100_000, help="at least so many")
    parser.add_argument("--operations", type=int, default=1_000_000, help="at least so many")
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="the first (default: the time)")
    parser.add_argument("--rounds", type=int, default=ROUNDS + 4, help="lives of a store before the quiet ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    tally = run_campaign(asked.seed, asked.crashes, asked.operations, asked.rounds, asked.jobs)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
