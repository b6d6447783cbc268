"""The demonstration and the measurements run to their end, on little data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.scenarios import SCENARIOS
from tests.e2e import test_bench_peers, test_bench_s3
from tests.e2e.served import ROOT, environment

pytestmark = pytest.mark.thorough

TRIED = (
    "put-small-one",
    "grant-crc32c",
    "dedup-model",
    "open-get-4k",
    "open-s3-get-4k",
    "loader",
    "fsspec-ranges",
    "mount-ways-open",
    "s3-processes-get-4k",
)
"""One of each kind that no other test runs; python -m bench.run --quick runs all."""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=environment()
    )


def make_model(folder: Path, tensor_bytes: int = 1 << 20, count: int = 12) -> None:
    """Make a folder like those of models: weights, and small files beside them."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "1_Pooling" / "config.json").write_text("{}\n")
    (folder / "config.json").write_text('{"layers": 12}\n')
    members = {
        f"layer.{index}": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [index * tensor_bytes, (index + 1) * tensor_bytes],
        }
        for index in range(count)
    }
    header = json.dumps(members).encode()
    content = len(header).to_bytes(8, "little") + header + os.urandom(count * tensor_bytes)
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.slow
def test_the_demo_succeeds_and_cleans_up(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    kept = ROOT / ".demo"
    before = set(kept.iterdir()) if kept.exists() else set()
    done = run("bench.demo", "--model", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    for words in (
        "put v1",
        "put v2",
        "compared byte by byte: the same",
        "S3, read by boto3",
        "stop, start",
        "nothing is damaged",
    ):
        assert words in done.stdout
    assert set(kept.iterdir()) == before


def test_the_demo_fails_aloud_when_there_is_no_model(tmp_path: Path) -> None:
    done = run("bench.demo", "--model", tmp_path)
    assert done.returncode == 1
    assert "FAILED" in done.stderr


@pytest.mark.slow
def test_a_scenario_of_each_kind_runs(tmp_path: Path) -> None:
    done = run("bench.run", *TRIED, "--quick", "--rounds", "1", "--dir", tmp_path, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["scenarios"]) == set(TRIED)
    for scenario in found["scenarios"].values():
        assert scenario["rows"]
        assert scenario["generator"]
        assert scenario["elapsed_s"] > 0
    for name in ("open-get-4k", "open-s3-get-4k", "loader"):
        figures = found["scenarios"][name]["sides"]["ours"]["median"]
        assert all(figures[figure] > 0 for figure in ("operations_per_s", "bytes_per_s", "p999_us", "server_cpu_us"))
    assert found["scenarios"]["put-small-one"]["sides"]["ours"]["median"].get("device_bytes_per_byte", 2) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_no_kind_of_scenario_is_left_out() -> None:
    tried = {type(SCENARIOS[name]) for name in (*TRIED, *test_bench_s3.TRIED, *test_bench_peers.TRIED)}
    assert {type(scenario) for scenario in SCENARIOS.values()} == tried


def test_what_no_longer_fits_into_the_time_is_listed(tmp_path: Path) -> None:
    done = run("bench.run", "startup", "--within", "1", "--dir", tmp_path, "--json", tmp_path / "out.json")
    assert done.returncode == 0
    [row] = json.loads((tmp_path / "out.json").read_text())["scenarios"]["startup"]["rows"]
    assert row["could_not_run"].endswith("make bench SCENARIO=startup")


def test_an_unknown_scenario_is_refused() -> None:
    done = run("bench.run", "nonsense")
    assert done.returncode == 2
    assert "put-large" in done.stderr
