"""Several mounts at once, for as long as you let them: `python -m tests.mount.shared --sequences 2000`.

    python -m tests.mount.shared --sequences 2000 --over tcp --mounts 3 --late
    python -m tests.mount.shared --seed 17 --sequences 1 [--show]

Each difference is printed with the shortest sequence found that shows it, and the line that repeats it.  Exit code 1
when there was one.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.mount.shared.ground import LATE_S, OVER, shared_mounts
from tests.mount.shared.hunt import Way, hunt
from tests.mount.shared.steps import sequence


def main() -> int:
    """Parse the command line, and run."""
    options = _parse()
    if options.show:
        for seed in range(options.seed, options.seed + options.sequences):
            way = Way(options.over[0], options.mounts, options.late, options.kills)
            _say("\n".join(map(str, sequence(seed, ranks=way.mounts, cuts=way.late, kills=way.kills))))
        return 0
    failed = 0
    ways = [Way(over, options.mounts, options.late, options.kills) for over in options.over]
    share = -(-options.sequences // len(ways))
    for number, way in enumerate(ways):
        first = options.seed + number * share
        failed += _run(way, range(first, min(first + share, options.seed + options.sequences)), options.stop_after)
    _say(f"{options.sequences} sequences of several mounts at once from seed {options.seed} on, {failed} differed")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mount.shared", description="Hold mounts against one folder.")
    parser.add_argument("--sequences", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--over", nargs="+", choices=OVER, default=list(OVER))
    parser.add_argument("--mounts", type=int, default=2, metavar="N")
    parser.add_argument("--late", action="store_true", help="notices are late, or lost with their connection")
    parser.add_argument("--kills", action="store_true", help="one mount is killed in each sequence")
    parser.add_argument("--show", action="store_true", help="print the steps instead of running them")
    parser.add_argument("--stop-after", type=int, default=10, metavar="N", help="differences of each way")
    return parser.parse_args()


def _run(way: Way, seeds: range, stop_after: int) -> int:
    began, failed = time.monotonic(), 0
    with shared_mounts(way.over, mounts=way.mounts, meddled=way.late, late_s=LATE_S if way.late else 0.0) as mounts:
        for number, finding in enumerate(hunt(seeds, mounts.ground(), way), 1):
            if finding:
                failed += 1
                _say(f"{finding}\n")
            if failed >= stop_after:
                break
            if number % 100 == 0:
                _say(
                    f"{number} sequences over {way.over}, {failed} failed, {number / (time.monotonic() - began):.1f}/s"
                )
    return failed


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
