"""`lake bench` measures every scenario, in bounded time, and leaves nothing: no process, no folder, no object."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

from cli.bench import LEVELS, bar, picture
from cli.bench_load import TRIALS, Content
from lakefs.histogram import Histogram
from tests.e2e.served import LAKE, Served, environment, lake

QUICK = ("bench", "--seconds", "0.05")


def engines_below(folder: Path) -> set[int]:
    """Processes of engines whose store is there."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"serve\0" in command and os.fsencode(folder) in command:
            found.add(int(path.parent.name))
    return found


def test_a_temporary_engine_is_measured_and_gone_afterwards(tmp_path: Path) -> None:
    done = lake(*QUICK, "--json", "--dir", tmp_path)
    assert done.code == 0, done
    found = json.loads(done.text)
    assert [scenario["name"] for scenario in found["scenarios"]] == [trial.name for trial in TRIALS]
    for scenario in found["scenarios"]:
        assert scenario["calls"] >= 1
        assert scenario["operations_per_s"] > 0
        assert 0 < scenario["p50_us"] <= scenario["p99_us"] <= scenario["p999_us"]
    assert list(tmp_path.iterdir()) == []
    assert engines_below(tmp_path) == set()


def test_ones_own_engine_is_left_as_it_was(served: Served) -> None:
    buckets = served.good("ls").lines
    done = served("bench", "--own", "--seconds", "0.05", "get-small", "put-one", "locate")
    assert done.code == 0, done
    assert served.good("ls").lines == buckets
    assert re.search(r"get of 4 KiB by name, one by one .* us ", done.text)
    assert f"Engine: {served.server}" in done.text


def test_an_engine_in_the_environment_is_not_measured_unasked(served: Served, tmp_path: Path) -> None:
    done = served("bench", "--seconds", "0.05", "stat", "--json", "--dir", tmp_path)
    assert json.loads(done.text)["engine"].startswith("a temporary one")


def test_a_bench_that_is_ended_takes_its_engine_and_store_along(tmp_path: Path) -> None:
    command = [*LAKE, "bench", "--seconds", "60", "stat", "put-one", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not engines_below(tmp_path):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert engines_below(tmp_path) == set()


def test_what_is_wrong_is_told() -> None:
    done = lake("bench", "nonsense")
    assert done.code == 2
    assert "put-large" in done.err
    assert lake("bench", "--dir", "/nowhere").code == 74
    assert lake("bench", "--seconds", "1000").code == 2
    assert lake("--server", "unix:/tmp/no-such-lake.sock", "bench").code == 69


def test_contents_are_all_different_in_every_chunk() -> None:
    content = Content()
    made = [bytes(content.make(size)) for size in (16, 4096, 4096, 2 << 20)]
    assert [len(one) for one in made] == [16, 4096, 4096, 2 << 20]
    assert made[1] != made[2]
    assert made[3][: 1 << 20] != made[3][1 << 20 :]


def test_pictures_are_of_what_was_counted() -> None:
    histogram = Histogram()
    histogram.record(1_000_000, 8)
    histogram.record(100_000_000)
    drawn = picture(histogram)
    assert {cell for cell in drawn if cell != " "} == {LEVELS[-1], LEVELS[1]}
    assert drawn.index(LEVELS[-1]) < drawn.index(LEVELS[1])
    assert bar(5, 10) == "█" * 8
    assert bar(0, 0) == ""
