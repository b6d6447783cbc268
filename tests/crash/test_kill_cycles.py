"""Cycles of load and SIGKILL on one store: nothing acknowledged is lost, nothing is torn, damaged or leaked.

`LAKE_CRASH_SEED` seeds them; a failure prints how to repeat it.  `make torture` runs a thousand
(`tests.crash.cycles`) beside fifty of these.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.cycles import Cycles
from tests.lengths import repeated

pytestmark = pytest.mark.thorough

CYCLES = repeated(30, 50)
SEED = os.environ.get("LAKE_CRASH_SEED", "") or str(random.SystemRandom().randrange(10**9))


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_at_any_moment_or_step_at_which_the_engine_dies() -> None:
    with TemporaryDirectory(prefix="lake-") as name, Cycles(Path(name), SEED) as cycles:
        cycles.run(CYCLES, look_every=CYCLES // 2)
    sys.stdout.write(f"{cycles.tally}\n")
    assert cycles.tally.cycles == CYCLES
    assert cycles.tally.acknowledged > 5 * CYCLES
    assert len(cycles.tally.at_steps) > 5
