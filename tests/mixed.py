"""Mixed load on one engine, for `make torture`: what is read is what was put, and the engine's memory stays.

python -m tests.mixed --count 10000000 --seed 1
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from bench.harness.mixed_load import growth, slowing, watch_mixed
from bench.harness.process import EngineProcess
from tests.sim.__main__ import say

GROWTH_MAX: Final = 1.05


def main() -> int:
    """Run it; 0 when the engine's memory did not grow."""
    parser = argparse.ArgumentParser(prog="python -m tests.mixed")
    parser.add_argument("--count", type=int, default=1_000_000, help="operations, counted by object")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lake-mixed-") as folder:
        with EngineProcess(Path(folder)) as engine:
            samples = watch_mixed(engine, asked.count, asked.seed, say)
    grown = growth(samples)
    last = samples[-1]
    say(
        f"{asked.count} operations: RssAnon {last.private_bytes / 2**20:.1f} MiB at the end, {grown:.3f} x that after "
        f"the first tenth; p99 of gets {slowing(samples):.2f} x"
    )
    return 0 if grown <= GROWTH_MAX else 1


if __name__ == "__main__":
    raise SystemExit(main())
