"""`python -m tests.fuzz`: a number of inputs for each reader of bytes, or for one of them.

The first tenth is guided: an input that reaches what none has reached before is kept, and changed further; with
`--keep` it is added to the corpus.  Prints for each reader how many inputs were read and refused, the slowest, and the
memory that all took.  Exits with 1 when one was read wrong, and prints the seed that shows it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import dataclass, field
from typing import NoReturn

from tests.fuzz.coverage import Coverage
from tests.fuzz.inputs import Inputs, keep_inputs
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.sim.__main__ import say

SLOW_S = 1.0
"""Seconds of CPU after which an input is too slow; the median takes some 20 us."""
HANG_S = 20.0
"""Seconds of CPU, tracing included, after which an input is given up."""
GUIDED_MAX = 30_000
"""The most inputs that are guided: they are some ten times as slow as the others."""
KEPT_BYTES_MAX = 2048
MEMORY_BYTES_MAX = 64 << 20
"""The most memory that all inputs of a run together may add to the process."""


@dataclass
class Run:
    """The results of one reader's inputs."""

    name: str
    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    slowest: bytes = b""
    grown_bytes: int = 0
    """Memory that the process holds more than before."""
    steps: int = 0
    found: list[bytes] = field(default_factory=list)
    """Inputs that reached what none before them did."""
    failure: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.inputs} inputs, {self.refused} refused, slowest "
            f"{self.slowest_s * 1000:.1f} ms (input of {len(self.slowest)} bytes), "
            f"{self.grown_bytes >> 10} KiB more memory; {len(self.found)} that reached something new, "
            f"{self.steps} steps reached"
        ) + (f"\nFAILED {self.failure}" if self.failure else "")


def run(target: Target, count: int, seed: int) -> Run:
    """Run so many inputs of one reader, the good and the kept ones first; the first tenth is guided."""
    done = Run(target.name)
    inputs = Inputs(target.bases, target.tokens, seed)
    first = target.bases
    coverage = Coverage()
    guided = min(count // 10, GUIDED_MAX)
    for number in range(count):
        data = first[number] if number < len(first) else inputs.next()
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
        began = time.thread_time()
        try:
            done.refused += target.survives(data) is not None
            took_s = time.thread_time() - began
            if number < guided and coverage.is_new(target.survives, data) and number >= len(first):
                inputs.keep(data)
                done.found.append(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            done.failure = f"{type(error).__name__}: {error}; seed {seed}, input {number}: {data[:2000]!r}"
            return done
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        done.inputs += 1
        if took_s > done.slowest_s:
            done.slowest_s, done.slowest = took_s, data
    done.steps = len(coverage.steps)
    if done.slowest_s > SLOW_S:
        done.failure = f"an input took {done.slowest_s:.1f} s of CPU; seed {seed}: {done.slowest[:2000]!r}"
    return done


def _hangs(*_: object) -> NoReturn:
    raise TimeoutError(f"it was not read within {HANG_S} s of CPU")


def run_one(task: tuple[str, int, int]) -> Run:
    """Run so many inputs of the reader of that name; too much memory is a failure.  For a process of its own."""
    name, count, seed = task
    [target] = [target for target in TARGETS if target.name == name]
    signal.signal(signal.SIGVTALRM, _hangs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = run(target, count, seed)
    done.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if done.grown_bytes > MEMORY_BYTES_MAX and not done.failure:
        done.failure = f"the inputs took {done.grown_bytes >> 20} MiB; seed {seed}"
    return done


def run_all(count: int, seed: int, names: list[str], jobs: int, *, keep: bool = False) -> bool:
    """Run inputs of these readers (none: of all); return whether each was read or refused, within time and memory.

    `keep`: add the inputs that reached something new to the corpus.
    """
    tasks = [(target.name, count, seed) for target in TARGETS if not names or target.name in names]
    results: list[Run] = []
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        for done in pool.imap_unordered(run_one, tasks, chunksize=1):
            results.append(done)
            say(str(done))
            if keep and not done.failure:
                keep_inputs(done.name, [data for data in done.found if len(data) <= KEPT_BYTES_MAX])
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
    parser.add_argument("--keep", action="store_true", help="add what reached something new to the corpus")
    parser.add_argument("targets", nargs="*", help=", ".join(target.name for target in TARGETS))
    arguments = parser.parse_args()
    count, seed, names, jobs = arguments.inputs, arguments.seed, arguments.targets, arguments.jobs
    return 0 if run_all(count, seed, names, jobs, keep=arguments.keep) else 1


if __name__ == "__main__":
    raise SystemExit(main())
