"""`python -m tests.flips --flips 10000 --seed 1`: flip bits, and print the tally by place."""

from __future__ import annotations

import argparse
import os
import time

from tests.flips.campaign import run_campaign
from tests.sim.__main__ import say


def main() -> int:
    """Flip bits; return 0 when nothing wrong was served and every live flip was reported."""
    parser = argparse.ArgumentParser(prog="python -m tests.flips")
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="PLACE", help="places whose name begins so")
    arguments = parser.parse_args()
    tally = run_campaign(arguments.flips, arguments.seed, arguments.jobs, arguments.only)
    for line in [*tally.failures, *tally.lines(), tally.figures(arguments.seed)]:
        say(line)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
