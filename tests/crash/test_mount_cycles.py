"""Ten cycles of SIGKILL under programs on a mount, and a check that they can fail.  `make torture` runs two hundred."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.mount_cycles import MountCycles

CYCLES = 10
PLANTED_CYCLES = 200  # far more than needed: only a test that is about to fail runs so many
SEED = os.environ.get("LAKE_CRASH_SEED", "") or str(random.SystemRandom().randrange(10**9))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
    pytest.mark.thorough,
]


def test_what_returned_on_a_mount_outlives_the_mount_and_what_was_synced_the_engine() -> None:
    with TemporaryDirectory(prefix="lake-") as name, MountCycles(Path(name), SEED) as cycles:
        cycles.run(CYCLES)
    sys.stdout.write(f"{cycles.tally}\n")
    assert cycles.tally.cycles == CYCLES
    assert cycles.tally.returned > 5 * CYCLES


@pytest.mark.parametrize("bug", ["early-rename", "sync-forgets-engines"])
def test_a_mount_that_promises_too_much_is_caught(bug: str) -> None:
    with TemporaryDirectory(prefix="lake-") as name, MountCycles(Path(name), "planted", bug=bug) as cycles:
        with pytest.raises(AssertionError, match=r"^cycle \d+:"):
            cycles.run(PLANTED_CYCLES)
        sys.stdout.write(f"{bug}: caught in cycle {cycles.tally.cycles + 1}\n")
