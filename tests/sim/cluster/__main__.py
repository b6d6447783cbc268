"""Runs histories of a simulated lake: `python -m tests.sim.cluster 7`, or `--seeds 0 300`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from functools import partial

import structlog

from tests.sim.cluster.scenes import SCENES, SceneWorld, scene_of
from tests.sim.cluster.world import LakeWorld

LOG_LINES = 150


def main() -> int:
    """Run histories; return 0 when every one kept the promises, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cluster")
    parser.add_argument("seed", type=int, nargs="?", help="run this one, and show its steps")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 50))
    parser.add_argument("--scene", choices=list(SCENES), help="run this scene with that seed")
    parser.add_argument("--scenes", type=int, nargs=2, metavar=("FIRST", "END"), help="run scenes, in turn")
    parser.add_argument("--etcd", action="store_true", help="over an etcd, with replicas of the names")
    parser.add_argument("--shards", type=int, help="so many names shards in the end, in a lake over an etcd")
    parser.add_argument("--log", action="store_true", help="show the engine's log")
    asked = parser.parse_args()
    if not asked.log:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    whole = partial(LakeWorld, has_etcd=asked.etcd, shards=asked.shards)
    if asked.seed is not None:
        scene, seed = asked.scene, asked.seed
        return _show(SceneWorld(scene, seed, has_etcd=asked.etcd) if scene else whole(seed))
    worlds = map(scene_of, range(*asked.scenes)) if asked.scenes else map(whole, range(*asked.seeds))
    failed = sum(not _run(world) for world in worlds)
    say(f"{len(range(*asked.scenes or asked.seeds))} histories, {failed} failed")
    return 1 if failed else 0


def _run(world: LakeWorld) -> bool:
    began = time.process_time()
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        say(failure_of(world, error))
        return False
    say(f"{time.process_time() - began:.2f} s {world.name}: {world.history}")
    return True


def _show(world: LakeWorld) -> int:
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


def failure_of(world: LakeWorld, error: Exception) -> str:
    """Return a failure in short, with the line that repeats it and shows the steps."""
    return f"FAILED {type(error).__name__}: {error}"[:1500] + f"\n  again: python -m tests.sim.cluster {world.name}"


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
