"""The model-based test for as long as you let it: `python -m tests.mount --sequences 20000`.

    python -m tests.mount --sequences 20000 --mounts 2        a new store, its engine and two mounts
    python -m tests.mount --on passthrough --bug lost-last-byte
    python -m tests.mount --plain FOLDER --mounted FOLDER [--mounted FOLDER]
    python -m tests.mount --seed 17 --sequences 1 [--show]

Each difference is printed with the shortest script found that shows it.  Exit code 1 when there was one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mount.hunt import hunt
from tests.mount.model import Ground
from tests.mount.mounts import lake, passthrough
from tests.mount.planted import BUGS
from tests.mount.steps import sequence


def main() -> int:
    """Parse the command line, and run."""
    options = _parse()
    seeds = range(options.seed, options.seed + options.sequences)
    with tempfile.TemporaryDirectory(prefix="lake-") as name, _ground(options, Path(name)) as ground:
        if options.show:
            for seed in seeds:
                _say("\n".join(map(str, sequence(seed, mounts=len(ground.mounts)))))
            return 0
        failed = _parallel(seeds, ground, options.jobs, options.stop_after)
    _say(f"{len(seeds)} sequences of system calls from seed {seeds.start} on, {failed} differed from the local disk")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mount", description="Hold a mount against a local disk.")
    parser.add_argument("--sequences", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--show", action="store_true", help="print the steps instead of running them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="sequences at a time, on the same mounts")
    parser.add_argument("--stop-after", type=int, default=10, metavar="N", help="differences in each job")
    parser.add_argument("--on", choices=("lake", "passthrough"), default="lake")
    parser.add_argument("--mounts", type=int, choices=(1, 2), default=2)
    parser.add_argument("--bug", choices=BUGS, default="", help="planted in the pass-through")
    parser.add_argument("--plain", type=Path, metavar="DIR", help="the local folder; default a new one")
    parser.add_argument("--mounted", type=Path, metavar="DIR", action="append", help="folders that are mounted already")
    return parser.parse_args()


@contextmanager
def _ground(options: argparse.Namespace, folder: Path) -> Iterator[Ground]:
    plain = options.plain or folder / "plain"
    plain.mkdir(exist_ok=True)
    if options.mounted:
        yield Ground(plain, tuple(options.mounted))
    elif options.on == "passthrough":
        with passthrough(folder, mounts=options.mounts, bug=options.bug) as mounts:
            yield Ground(plain, tuple(mount.folder for mount in mounts))
    else:
        with lake(folder, mounts=options.mounts) as mounted:
            yield Ground(plain, tuple(mounted.folders))


def _parallel(seeds: range, ground: Ground, jobs: int, stop_after: int) -> int:
    """Deal the seeds out to jobs and run them; return how many differences there were in all."""
    if jobs == 1:
        return _hunt(seeds, ground, "s", stop_after)
    children: list[int] = []
    for job in range(jobs):
        child = os.fork()
        if not child:
            code = 255
            try:
                code = min(_hunt(seeds[job::jobs], ground, f"j{job}", stop_after), 254)
            finally:
                os._exit(code)
        children.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _hunt(seeds: range, ground: Ground, label: str, stop_after: int) -> int:
    began = time.monotonic()
    failed = 0
    for number, finding in enumerate(hunt(seeds, ground, label), 1):
        if finding is not None:
            failed += 1
            _say(f"seed {finding.seed} differs:\n{finding.script()}\n")
            if failed >= stop_after:
                break
        if number % 500 == 0:
            _say(f"{number} sequences, {failed} failed, {number / (time.monotonic() - began):.0f}/s")
    return failed


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
