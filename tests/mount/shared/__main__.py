"""Several mounts at once, for as long as you let them: `python -m tests.mount.shared --sequences 2000`.

    python -m tests.mount.shared --sequences 2000            by Unix socket and TCP, late notices, killed mounts
    python -m tests.mount.shared --sequences 500 --over tcp --mounts 3 --late
    python -m tests.mount.shared --seed 17 --sequences 1 --over unix --mounts 2 [--show]

With each hundred sequences, one step after another, come some in which all mounts work at once (`load.mixed`). Each
difference is printed with the shortest sequence found that shows it, and the line that repeats it.  Exit code 1 when
there was one.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.mount.shared.at_once import at_once
from tests.mount.shared.ground import OVER, shared_mounts
from tests.mount.shared.hunt import WAYS, Way, hunt

AT_ONCE_EVERY = 20
AT_ONCE_STEPS = 200


def main() -> int:
    """Parse the command line, and run."""
    options = _parse()
    way = Way(options.over or OVER[0], options.mounts, options.late, options.kills)
    ways = [way] if options.over or options.late or options.kills else list(WAYS)
    if options.show:
        for seed in range(options.seed, options.seed + options.sequences):
            _say("\n".join(map(str, way.steps(seed))))
        return 0
    failed, end = 0, options.seed + options.sequences
    share = -(-options.sequences // len(ways))
    for number, one in enumerate(ways):
        first = options.seed + number * share
        failed += _run(one, range(first, max(first, min(first + share, end))), options.stop_after)
    _say(f"{options.sequences} sequences of several mounts at once from seed {options.seed} on, {failed} differed")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mount.shared", description="Hold mounts against one folder.")
    parser.add_argument("--sequences", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--over", choices=OVER, help="one way only: the mounts' connection")
    parser.add_argument("--mounts", type=int, default=2, metavar="N", help="of one way")
    parser.add_argument("--late", action="store_true", help="notices are late, or lost with their connection")
    parser.add_argument("--kills", action="store_true", help="one mount is killed in each sequence")
    parser.add_argument("--show", action="store_true", help="print the steps instead of running them")
    parser.add_argument("--stop-after", type=int, default=10, metavar="N", help="differences of each way")
    return parser.parse_args()


def _run(way: Way, seeds: range, stop_after: int) -> int:
    if not seeds:
        return 0
    began, failed = time.monotonic(), 0
    with shared_mounts(way.over, mounts=way.mounts, meddled=way.late, late_s=way.late_s) as mounts:
        for seed, finding in zip(seeds, hunt(seeds, mounts.ground(), way), strict=True):
            wrong = [] if seed % AT_ONCE_EVERY else at_once(mounts, seed, AT_ONCE_STEPS)
            if finding:
                _say(f"{finding}\n")
            if wrong:
                _say(f"all mounts at once, {way.options()} --seed {seed} --sequences 1:\n" + "\n".join(wrong) + "\n")
            failed += bool(finding) + bool(wrong)
            if failed >= stop_after:
                break
    _say(f"{len(seeds)} sequences, {way.options()}: {failed} failed, {time.monotonic() - began:.0f} s")
    return failed


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
