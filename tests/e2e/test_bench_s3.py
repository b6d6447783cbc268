"""The S3 bench, on little data: every row is measured or says why not, and the tables are printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.served import ROOT, environment

pytestmark = pytest.mark.thorough

TRIED = ("s3-put-1m-signed", "s3-rate-get-4k", "s3-crowd", "s3-memory")
"""One of each kind; python -m bench.run --quick runs all."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Run the bench quickly; return what it printed, and what it wrote."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench.run", *TRIED, "--quick", "--rounds", "1", "--dir", str(folder)]
    done = subprocess.run(
        [*command, "--json", str(folder / "out.json")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(Path(folder).iterdir()) == [folder / "out.json"]
    return done.stdout, json.loads((folder / "out.json").read_text())["scenarios"]


@pytest.mark.slow
def test_every_row_is_measured_or_says_why_not(ran: tuple[str, dict[str, Any]]) -> None:
    _, scenarios = ran
    assert list(scenarios) == list(TRIED)
    rows = [row for scenario in scenarios.values() for row in scenario["rows"]]
    assert all((row["value"] > 0) != bool(row["could_not_run"]) for row in rows)
    assert {row["scenario"] for row in rows} == set(TRIED)


@pytest.mark.slow
def test_ours_is_measured_whoever_else_is_there(ran: tuple[str, dict[str, Any]]) -> None:
    _, scenarios = ran
    figures = scenarios["s3-put-1m-signed"]["sides"]["ours"]["median"]
    assert figures["server_cpu_us"] > 0
    assert figures["p50_us"] > 0
    cells = scenarios["s3-rate-get-4k"]["cells"]
    assert all(cell["ours"]["answered"][0] > 0 for cell in cells.values())


@pytest.mark.slow
def test_the_table_of_rates_is_printed(ran: tuple[str, dict[str, Any]]) -> None:
    printed, _ = ran
    table = printed.partition("\nS3 GET of 4 KiB\n")[2]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip(" -") for line in lines] == ["connections", "", "1", "8"]
    assert len({len(line) for line in lines}) == 1
