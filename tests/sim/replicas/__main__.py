"""Runs histories of names with replicas: `python -m tests.sim.replicas 7`, or `--seeds 0 300`."""

from __future__ import annotations

import argparse
import logging
import time
import traceback

import structlog

from tests.sim.cluster.__main__ import LOG_LINES, say
from tests.sim.replicas.scenes import SCENES, ReplicaScene
from tests.sim.replicas.world import ReplicasWorld


def main() -> int:
    """Run histories; return 0 when every one kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replicas")
    parser.add_argument("seed", type=int, nargs="?", help="run this one, and show its steps")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 50))
    parser.add_argument("--scene", choices=list(SCENES), help="run this scene with that seed")
    parser.add_argument("--log", action="store_true", help="show the product's log")
    asked = parser.parse_args()
    if not asked.log:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if asked.seed is not None:
        return _show(ReplicaScene(asked.scene, asked.seed) if asked.scene else ReplicasWorld(asked.seed))
    failed = sum(not _run(seed) for seed in range(*asked.seeds))
    say(f"{len(range(*asked.seeds))} histories, {failed} failed")
    return 1 if failed else 0


def _run(seed: int) -> bool:
    began = time.process_time()
    try:
        history = ReplicasWorld(seed).run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        say(failure_of(seed, error))
        return False
    say(f"{time.process_time() - began:.2f} s {history}")
    return True


def _show(world: ReplicasWorld) -> int:
    """Run one history, and show its steps."""
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        say("\n".join(world.history.log[-LOG_LINES:]))
        say("".join(traceback.format_exception(error)))
        return 1
    say("\n".join(world.history.log))
    say(str(world.history))
    return 0


def failure_of(seed: int, error: Exception) -> str:
    """Return a failure in short, with the line that repeats it and shows the steps."""
    return f"FAILED {type(error).__name__}: {error}"[:1500] + f"\n  again: python -m tests.sim.replicas {seed}"


if __name__ == "__main__":
    raise SystemExit(main())
