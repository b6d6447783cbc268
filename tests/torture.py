"""A million odd inputs for each reader, 100,000 simulated crashes, 1,000 cycles of SIGKILL, 10,000 flipped bits.

`make torture`, or `python -m tests.torture --minutes 5 --inputs 0`.

Every failure is printed with the command that repeats it.  Exit code 0 when there was none, 1 otherwise.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.pool import Pool

import structlog

from tests.flips.campaign import run_campaign
from tests.fuzz.__main__ import run as run_inputs
from tests.fuzz.targets import TARGETS
from tests.sim.__main__ import say, try_seed
from tests.sim.lives import Result
from tests.sim.world import ROUNDS

BATCH_PER_JOB = 50
READERS = [target.name for target in TARGETS]


@dataclass
class Tally:
    """What all seeds came to."""

    began: float = field(default_factory=time.monotonic)
    seeds: int = 0
    lives: int = 0
    crashes: int = 0
    operations: int = 0
    faults: int = 0
    disk_operations: int = 0
    decisions: int = 0
    failures: list[str] = field(default_factory=list)
    figures: str = "no seeds"
    """Of the seeds, as of the last batch."""

    def add(self, outcome: Result | str) -> None:
        """Count one seed."""
        self.seeds += 1
        if isinstance(outcome, str):
            self.failures.append(outcome)
            say(outcome)
            return
        self.lives += outcome.lives
        self.crashes += outcome.crashes
        self.operations += outcome.operations
        self.faults += outcome.faults
        self.disk_operations += outcome.disk_operations
        self.decisions += outcome.decisions

    def add_inputs(self, outcome: str) -> None:
        """Note what the inputs of one reader came to."""
        say(outcome)
        if "FAILED" in outcome:
            self.failures.append(outcome)

    def __str__(self) -> str:
        minutes = (time.monotonic() - self.began) / 60
        counted = {"operations": self.operations, "faults": self.faults, "crashes": self.crashes}
        rates = ", ".join(
            f"{count} {what} ({count / minutes:.0f} a minute)" for what, count in counted.items()
        )
        return (
            f"{self.seeds} seeds in {minutes:.1f} min: {rates}; {self.lives} lives, {self.decisions} changes of "
            f"names, {self.disk_operations} operations of the disk; {len(self.failures)} failed"
        )


def main() -> int:
    """Run seeds until there were enough crashes and operations, the time is over, or one is asked to stop."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument(
        "--first", type=int, default=int(time.time()) * 1000, help="first seed (default: the time)"
    )
    parser.add_argument("--seeds", type=int, default=0, help="how many; 0: as many as it takes")
    parser.add_argument("--crashes", type=int, default=100_000, help="at least so many, simulated")
    parser.add_argument("--operations", type=int, default=1_000_000, help="at least so many, simulated")
    parser.add_argument("--minutes", type=float, default=600.0, help="no seed is begun after that")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS + 4, help="lives of a store before the quiet ones"
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each reader; 0: none")
    parser.add_argument("--flips", type=int, default=10_000, help="single bits of a small store; 0: none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cycles", type=int, default=1000, help="of SIGKILL of a real engine; 0: none")
    arguments = parser.parse_args()
    tally = Tally()
    if arguments.flips:
        flipped = run_campaign(arguments.flips, arguments.first, arguments.jobs)
        tally.failures += flipped.failures
        say("\n".join([*flipped.failures, *flipped.lines()]))
    with multiprocessing.get_context("fork").Pool(arguments.jobs, _be_quiet) as pool:
        try:
            tasks = [(name, arguments.inputs, arguments.first) for name in READERS]
            for told in pool.imap_unordered(_try_inputs, tasks):
                tally.add_inputs(told)
            _run_seeds(pool, arguments, tally)
        except KeyboardInterrupt:
            pool.terminate()
    if arguments.cycles:
        tally.add_inputs(_try_cycles(arguments.cycles, arguments.first))
    say(tally.figures)
    return 1 if tally.failures else 0


def _run_seeds(pool: Pool, arguments: argparse.Namespace, tally: Tally) -> None:
    """Batches of seeds, one after the other, with the rates so far after each."""
    last = arguments.first + arguments.seeds if arguments.seeds else 1 << 62
    first = arguments.first
    tally.began = time.monotonic()
    until = tally.began + 60 * arguments.minutes
    while first < last and time.monotonic() < until:
        batch = range(first, min(last, first + BATCH_PER_JOB * arguments.jobs))
        for outcome in pool.imap_unordered(try_seed, [(seed, arguments.rounds) for seed in batch]):
            tally.add(outcome)
        tally.figures = str(tally)
        say(tally.figures)
        first = batch.stop
        enough = tally.crashes >= arguments.crashes and tally.operations >= arguments.operations
        if enough and not arguments.seeds:
            return


def _be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _try_inputs(task: tuple[str, int, int]) -> str:
    name, count, seed = task
    [target] = [target for target in TARGETS if target.name == name]
    return str(run_inputs(target, count, seed)) if count else f"{name}: no inputs"


def _try_cycles(count: int, seed: int) -> str:
    command = [sys.executable, "-m", "tests.crash.cycles", "--cycles", str(count), "--seed", str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    last = done.stdout.splitlines()[-1:]
    return f"FAILED {' '.join(command)}: {last}" if done.returncode else "".join(last)


if __name__ == "__main__":
    raise SystemExit(main())
