"""Run seeds of the simulator: `python -m tests.sim --seed 7`, or `--seeds 0 300`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import time
import traceback

import structlog

from tests.sim.world import ROUNDS, causes_of, run_seed

STUCK_S = 300
"""A seed takes a second; one that takes this long is shown where it hangs."""


def main() -> int:
    """0 when every seed kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int, help="run this one, and show where it fails")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 50))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="lives before the quiet ones")
    parser.add_argument("--log", action="store_true", help="show the engine's log")
    arguments = parser.parse_args()
    if not arguments.log:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seeds = range(*arguments.seeds) if arguments.seed is None else [arguments.seed]
    failed = 0
    for seed in seeds:
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        began = time.monotonic()
        try:
            result = run_seed(seed, arguments.rounds)
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
            failed += 1
            for cause in causes_of(error):
                lines = traceback.format_exception(cause)
                say(
                    "".join(lines) if arguments.seed is not None else f"{type(cause).__name__}: {cause}"[:700]
                )
            say(f"seed {seed} FAILED; again: python -m tests.sim --seed {seed} --rounds {arguments.rounds}")
        else:
            say(f"seed {seed} {time.monotonic() - began:.2f} s {result}")
    say(f"{len(seeds)} seeds, {failed} failed")
    return 1 if failed else 0


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
