"""Prints the way to a violation that a weakened rule permits, or explores a model that holds.

python -m tests.models                             their names
python -m tests.models generations sweeps_below    the shortest trace
python -m tests.models "stripes 1+2"               states and seconds
"""

from __future__ import annotations

import sys
import time

from tests.models.catalogue import LARGE, LARGEST, SMALL, SPARE, WEAKENED
from tests.models.explore import explore
from tests.sim.__main__ import say


def main(asked: list[str]) -> int:
    """Explore the model that the arguments name."""
    weakened = WEAKENED | SPARE
    makers = {name: case.make for name, case in (SMALL | LARGE | LARGEST).items()}
    makers |= {" ".join(name): make for name, make in weakened.items()}
    make = makers.get(" ".join(asked))
    if make is None:
        say("\n".join(makers))
        return int(bool(asked))
    began = time.process_time()
    explored = explore(make())
    if explored.violation is not None:
        say(str(explored.violation))
    say(f"{explored.states} states in {time.process_time() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
