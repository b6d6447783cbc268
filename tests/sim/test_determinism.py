"""A seed is one exact run: the same operations of the disk, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sim.world.world import run_seed

_ROOT = Path(__file__).resolve().parents[2]
_PRINT_TRACE = "from tests.sim.world.world import run_seed; print(run_seed({seed}).trace)"


def test_a_seed_gives_the_same_operations_of_the_disk_each_time() -> None:
    first = run_seed(5)
    assert first.disk_operations > 100
    assert run_seed(5) == first


def test_another_seed_gives_another_run() -> None:
    assert run_seed(5).trace != run_seed(6).trace


def test_a_seed_does_not_depend_on_the_process_or_on_how_it_hashes() -> None:
    traces = set()
    for hashing in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_TRACE.format(seed=11)],
            env={**os.environ, "PYTHONHASHSEED": hashing},
            cwd=_ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        traces.add(done.stdout.split()[-1])
    assert traces == {run_seed(11).trace}
