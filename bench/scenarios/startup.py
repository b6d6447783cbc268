"""The time of a command, from the shell to its end."""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Final

from bench.harness.measure import Bench, Figure, Scenario, Single, at_most, timed
from bench.harness.process import ROOT, EngineProcess, clean_environment, lake_command

RUNS: Final = 15


def measure(bench: Bench) -> dict[str, float]:
    """Return medians of several runs, in milliseconds, and that of a bare interpreter."""
    runs = bench.scale.pick(RUNS, 3)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        lake.put("bench/x", b"x")
        command = lake_command()
        return {
            "lake --version": _median_ms([*command, "--version"], runs),
            "lake stat": _median_ms([*command, "--server", engine.address, "stat", "bench/x"], runs),
            "bare python": _median_ms([sys.executable, "-c", "pass"], runs),
        }


def _median_ms(command: list[str], runs: int) -> float:
    environment = clean_environment()

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)

    run()
    return 1000 * statistics.median(timed(run) for _ in range(runs))


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "startup",
        "a command, wall clock",
        (Figure("lake --version", at_most(80, " ms"), "ms"), Figure("lake stat", at_most(110, " ms"), "ms")),
        measure,
    ),
)
