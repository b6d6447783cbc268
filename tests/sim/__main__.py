"""Runs seeds of the simulator: `python -m tests.sim 7`, `--seeds 0 300`, or `7 --shrink` for one that fails."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import time
import traceback

import structlog

from tests.sim.shrink import SECONDS, shrink
from tests.sim.workloads.lives import Result
from tests.sim.world.world import ROUNDS, World, causes_of

STUCK_S = 300
"""Most seconds for a seed: it takes one.  After this time the process prints where it hangs."""


def main() -> int:
    """Run seeds; return 0 when every one kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seed", type=int, nargs="?", help="run this one, and show where it fails")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 50))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="lives before the quiet ones")
    parser.add_argument("--shrink", action="store_true", help="look for the fewest operations that fail")
    parser.add_argument("--only", help="operations of workloads that are done, as --shrink names them; -: none")
    parser.add_argument("--without", default="", help="rounds and faults that are left out, likewise")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for --shrink, at most")
    parser.add_argument("--log", action="store_true", help="show the engine's log")
    arguments = parser.parse_args()
    if not arguments.log:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if arguments.seed is None:
        return _run_many(range(*arguments.seeds), arguments.rounds)
    if arguments.shrink:
        return _shrink(arguments.seed, arguments.rounds, arguments.seconds)
    only = None if arguments.only is None else frozenset(arguments.only.split(","))
    try:
        without = arguments.without.split(",")
        say(f"seed {arguments.seed} {World(arguments.seed, arguments.rounds, only, without).run()}")
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        for cause in causes_of(error):
            say("".join(traceback.format_exception(cause)))
        return 1
    return 0


def _run_many(seeds: range, rounds: int) -> int:
    failed = 0
    for seed in seeds:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        began = time.monotonic()
        outcome = try_seed((seed, rounds))
        if isinstance(outcome, str):
            failed += 1
            say(outcome)
        else:
            say(f"seed {seed} {time.monotonic() - began:.2f} s {outcome}")
    say(f"{len(seeds)} seeds, {failed} failed")
    return 1 if failed else 0


def _shrink(seed: int, rounds: int, seconds: float) -> int:
    found = shrink(seed, rounds, say, seconds=seconds)
    if found is None:
        say(f"seed {seed} keeps the promises: there is nothing to shrink")
        return 0
    say(found.failure)
    say(f"{len(found.operations)} of {found.of} operations are left; again:")
    say(found.command())
    return 1


def try_seed(task: tuple[int, int]) -> Result | str:
    """Run a seed with so many rounds; return the result, or the failure with the line that repeats it."""
    seed, rounds = task
    try:
        return World(seed, rounds).run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        causes = "; ".join(f"{type(cause).__name__}: {cause}"[:400] for cause in causes_of(error))
        return f"FAILED {causes}\n  again: python -m tests.sim {seed} --rounds {rounds}"


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
