"""Runs everything that is too long for `make test`, each part with its goal: `make torture`, hours.

    python -m tests.torture                          all of it
    python -m tests.torture --share 0.01             a hundredth of each
    python -m tests.torture --only simulator flips   these parts

A part is a program of its own.  It says what failed and how to repeat that, prints its figures as its last line, and
exits with 0 when nothing failed.  Parts that use all cores run one after the other.  Beside them run those of a single
process, also one after the other, and the part that mostly waits.  A part that fails does not stop the next.  The last
lines give the result of each.  Exit code 0 when nothing failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.sim.__main__ import say


@dataclass(frozen=True)
class Part:
    """A program, and the amount of work that it gets."""

    module: str
    counts: dict[str, int]
    """Options and their numbers, for the whole part."""
    has_jobs: bool = True
    waits: bool = False
    """The part mostly waits: it runs beside the others."""

    def command(self, share: float, seed: int, jobs: int) -> list[str]:
        """Return the part's command line."""
        command = [sys.executable, "-m", self.module, "--seed", str(seed)]
        for option, count in self.counts.items():
            command += [option, str(max(1, round(count * share)))]
        return command + (["--jobs", str(jobs)] if self.has_jobs else [])


PARTS = {
    "simulator": Part("tests.sim.campaign", {"--crashes": 100_000, "--operations": 1_000_000}),
    "lakes": Part("tests.sim.cluster.campaign", {"--histories": 5000}),
    "etcd-lakes": Part("tests.sim.cluster.etcd_campaign", {"--histories": 5000}),
    "replicas": Part("tests.sim.replicas.campaign", {"--histories": 5000}),
    "etcd-room": Part("tests.sim.replicas.room", {"--hours": 24}, has_jobs=False, waits=True),
    "cycles": Part("tests.crash.cycles", {"--cycles": 1000}, has_jobs=False),
    "mount-cycles": Part("tests.crash.mount_cycles", {"--count": 200}, has_jobs=False),
    "gc": Part("tests.crash.fire", {"--cycles": 500}, has_jobs=False),
    "gc-hour": Part("tests.crash.fire", {"--cycles": 60, "--minutes": 60}, has_jobs=False, waits=True),
    "keyed": Part("tests.crash.keyed_fire", {"--minutes": 10}, has_jobs=False),
    "door": Part("tests.door.oracle", {"--requests": 100_000}, has_jobs=False),
    "registers": Part("tests.door.registers", {"--rounds": 1000}, has_jobs=False),
    "known": Part("tests.known.registers", {"--rounds": 1000}, has_jobs=False),
    "mixed": Part("tests.mixed", {"--count": 10_000_000}, has_jobs=False),
    "flips": Part("tests.flips", {"--flips": 10_000}),
    "mount": Part("tests.mount", {"--sequences": 10_000}),
    "shared-mounts": Part("tests.mount.shared", {"--sequences": 4_000}, has_jobs=False),
    "inputs": Part("tests.fuzz", {"--inputs": 1_000_000}),
    "door-inputs": Part("tests.fuzz.door_inputs", {"--inputs": 1_000_000}, has_jobs=False),
    "lengths": Part("tests.lengths", {}, has_jobs=False),
    "lake-suites": Part("tests.lake_suites", {}, has_jobs=False),
    "shared-memory": Part("tests.fuzz.sanitized_modules", {"--inputs": 20_000}, has_jobs=False),
}


LANES: tuple[Callable[[Part], bool], ...] = (
    lambda part: part.has_jobs,
    lambda part: not part.has_jobs and not part.waits,
    lambda part: part.waits,
)
"""Parts of different lanes run beside each other, those of one lane one after the other."""


@dataclass(frozen=True)
class Ran:
    """The result of a part."""

    name: str
    failed: bool
    minutes: float
    figures: str

    def __str__(self) -> str:
        return f"{'FAILED' if self.failed else 'passed'}  {self.name}, {self.minutes:.1f} min: {self.figures}"


def run_part(name: str, command: list[str]) -> Ran:
    """Run a part to its end, and print what it prints."""
    say(f"--- {name}: {' '.join(command[1:])}")
    began = time.monotonic()
    last = "it said nothing"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.rstrip("\n")
            say(last)
    return Ran(name, process.returncode != 0, (time.monotonic() - began) / 60, last)


def run_lane(commands: dict[str, list[str]]) -> list[Ran]:
    """Run parts one after the other."""
    return [run_part(name, command) for name, command in commands.items()]


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--share", type=float, default=1.0, help="of each part's number")
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="default: the time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of each part")
    asked = parser.parse_args()
    commands = {name: PARTS[name].command(asked.share, asked.seed, asked.jobs) for name in asked.only}
    with ThreadPoolExecutor(len(LANES)) as pool:
        lanes = [
            pool.submit(run_lane, {name: command for name, command in commands.items() if is_of(PARTS[name])})
            for is_of in LANES
        ]
        ran = [part for lane in lanes for part in lane.result()]
    say("\n".join(["", *map(str, ran)]))
    return 1 if any(part.failed for part in ran) else 0


if __name__ == "__main__":
    raise SystemExit(main())
