"""`python -m tests.fuzz`: a number of inputs for each reader of bytes, or for one of them.

Prints for each how many were read and refused, the slowest, and the memory that all took; ends with 1 when one was read
wrong, and says which seed has it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from dataclasses import dataclass

from tests.fuzz.inputs import Inputs
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.sim.__main__ import say

SLOW_S = 1.0
"""Of CPU; the median takes some 20 us."""
MEMORY_BYTES_MAX = 64 << 20
"""That all inputs of a run together may add to what the process holds at most."""


@dataclass
class Run:
    """What the inputs of one reader came to."""

    name: str
    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    slowest: bytes = b""
    grown_bytes: int = 0
    """What the process holds more since."""
    failure: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.inputs} inputs, {self.refused} refused, slowest "
            f"{self.slowest_s * 1000:.1f} ms (input of {len(self.slowest)} bytes), "
            f"{self.grown_bytes >> 10} KiB more memory"
        ) + (f"\nFAILED {self.failure}" if self.failure else "")


def run(target: Target, count: int, seed: int) -> Run:
    """So many inputs of one reader, the good and the kept ones first."""
    done = Run(target.name)
    inputs = Inputs(target.bases, target.tokens, seed)
    first = target.bases
    for number in range(count):
        data = first[number] if number < len(first) else inputs.next()
        began = time.thread_time()
        try:
            done.refused += target.refusal(data) is not None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            done.failure = f"{type(error).__name__}: {error}; seed {seed}, input {number}: {data[:2000]!r}"
            return done
        took_s = time.thread_time() - began
        done.inputs += 1
        if took_s > done.slowest_s:
            done.slowest_s, done.slowest = took_s, data
    if done.slowest_s > SLOW_S:
        done.failure = f"an input took {done.slowest_s:.1f} s of CPU; seed {seed}: {done.slowest[:2000]!r}"
    return done


def run_one(task: tuple[str, int, int]) -> Run:
    """So many inputs of the reader of that name; too much memory is a failure.  For a process of its own."""
    name, count, seed = task
    [target] = [target for target in TARGETS if target.name == name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = run(target, count, seed)
    done.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if done.grown_bytes > MEMORY_BYTES_MAX and not done.failure:
        done.failure = f"the inputs took {done.grown_bytes >> 20} MiB; seed {seed}"
    return done


def run_all(count: int, seed: int, names: list[str], jobs: int) -> bool:
    """Whether all inputs of these readers (none: of all) were read or refused, in bounded time and memory."""
    tasks = [(target.name, count, seed) for target in TARGETS if not names or target.name in names]
    results: list[Run] = []
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for done in pool.imap_unordered(run_one, tasks, chunksize=1):
            results.append(done)
            say(str(done))
    failed = sum(1 for done in results if done.failure)
    slowest = max(results, key=lambda done: done.slowest_s)
    say(
        f"{sum(done.inputs for done in results)} inputs of {len(results)} readers; slowest "
        f"{slowest.slowest_s * 1000:.0f} ms of CPU ({slowest.name}), most memory "
        f"{max(done.grown_bytes for done in results) >> 10} KiB; {failed} failed"
    )
    return not failed


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="readers at once")
    parser.add_argument("targets", nargs="*", help=", ".join(target.name for target in TARGETS))
    arguments = parser.parse_args()
    return 0 if run_all(arguments.inputs, arguments.seed, arguments.targets, arguments.jobs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
