"""Runs histories of a simulated lake: `python -m tests.sim.cluster 7`, or `--seeds 0 300`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

import structlog

from tests.sim.cluster.world import LakeWorld

LOG_LINES = 150


def main() -> int:
    """Run histories; return 0 when every one kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cluster")
    parser.add_argument("seed", type=int, nargs="?", help="run this one, and show its steps")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 50))
    parser.add_argument("--log", action="store_true", help="show the engine's log")
    asked = parser.parse_args()
    if not asked.log:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seeds = range(*asked.seeds) if asked.seed is None else [asked.seed]
    failed = 0
    for seed in seeds:
        began = time.process_time()
        world = LakeWorld(seed)
        try:
            found = world.run()
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
            failed += 1
            if asked.seed is not None:
                say("\n".join(world.history.log[-LOG_LINES:]))
                say("".join(traceback.format_exception(error)))
            say(f"FAILED seed {seed}: {type(error).__name__}: {error}"[:1500])
            say(f"  again: python -m tests.sim.cluster {seed}")
        else:
            if asked.seed is not None:
                say("\n".join(found.log))
            say(f"{time.process_time() - began:.2f} s {found}")
    say(f"{len(seeds)} histories, {failed} failed")
    return 1 if failed else 0


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
