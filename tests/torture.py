"""A million odd inputs for each reader, then seeds of the simulator for as long as you let it.

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

import structlog

from tests.fuzz.__main__ import run as run_inputs
from tests.fuzz.targets import TARGETS
from tests.sim.__main__ import say
from tests.sim.lives import Result
from tests.sim.world import ROUNDS, causes_of, run_seed

BATCH_PER_JOB = 50
READERS = [target.name for target in TARGETS]


@dataclass
class Tally:
    """What all seeds came to."""

    began: float = field(default_factory=time.monotonic)
    seeds: int = 0
    lives: int = 0
    crashes: int = 0
    disk_operations: int = 0
    decisions: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Result | str) -> None:
        """Count one seed."""
        self.seeds += 1
        if isinstance(outcome, str):
            self.failures.append(outcome)
            say(outcome)
            return
        self.lives += outcome.lives
        self.crashes += outcome.crashes
        self.disk_operations += outcome.disk_operations
        self.decisions += outcome.decisions

    def add_inputs(self, outcome: str) -> None:
        """Note what the inputs of one reader came to."""
        say(outcome)
        if "FAILED" in outcome:
            self.failures.append(outcome)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        return (
            f"{self.seeds} seeds in {seconds:.0f} s ({self.seeds / seconds:.1f}/s), {self.lives} lives, "
            f"{self.crashes} crashes, {self.disk_operations} operations of the disk, "
            f"{self.decisions} changes of names, {len(self.failures)} failed"
        )


def main() -> int:
    """Run seeds until the time is over, one is asked to stop, or the seeds are used up."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument(
        "--first", type=int, default=int(time.time()) * 1000, help="first seed (default: the time)"
    )
    parser.add_argument("--seeds", type=int, default=0, help="how many; 0: until the time is over")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS + 2, help="lives of a store before the quiet ones"
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each reader; 0: none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cycles", type=int, default=1000, help="of SIGKILL of a real engine; 0: none")
    arguments = parser.parse_args()
    last = arguments.first + arguments.seeds if arguments.seeds else 1 << 62
    tally = Tally()
    with multiprocessing.get_context("fork").Pool(arguments.jobs, _be_quiet) as pool:
        try:
            tasks = [(name, arguments.inputs, arguments.first) for name in READERS]
            for told in pool.imap_unordered(_try_inputs, tasks):
                tally.add_inputs(told)
            until = time.monotonic() + 60 * arguments.minutes
            first = arguments.first
            while first < last and time.monotonic() < until:
                batch = range(first, min(last, first + BATCH_PER_JOB * arguments.jobs))
                for outcome in pool.imap_unordered(_try_seed, [(seed, arguments.rounds) for seed in batch]):
                    tally.add(outcome)
                say(str(tally))
                first = batch.stop
        except KeyboardInterrupt:
            pool.terminate()
    if arguments.cycles:
        tally.add_inputs(_try_cycles(arguments.cycles, arguments.first))
    say(str(tally))
    return 1 if tally.failures else 0


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


def _try_seed(task: tuple[int, int]) -> Result | str:
    seed, rounds = task
    try:
        return run_seed(seed, rounds)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        causes = "; ".join(f"{type(cause).__name__}: {cause}"[:400] for cause in causes_of(error))
        return f"FAILED {causes}\n  again: python -m tests.sim --seed {seed} --rounds {rounds}"


if __name__ == "__main__":
    raise SystemExit(main())
