"""`lake bench` measures every scenario, in bounded time, and leaves nothing: no process, no folder, no object."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from cli.bench.bench import LEVELS, bar, picture
from cli.bench.load import TRIALS, Content, Ground, run_trials
from fuse.kernel.mount_point import all_mounts
from lakefs import Lake
from lakefs.histogram import Histogram
from tests.e2e.mount_rig import private_mounts
from tests.e2e.served import LAKE, Served, environment, lake
from tests.e2e.test_mount_machine import own_dev

pytestmark = pytest.mark.thorough

QUICK = ("bench", "--seconds", "0.05")
FUSE = Path("/dev/fuse")


def engines_below(folder: Path) -> set[int]:
    """Return the processes of engines whose store is in the folder."""
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
    left_out = [scenario["name"] for scenario in found["scenarios"] if "left_out" in scenario]
    assert left_out == ([] if FUSE.exists() else ["mount-read"])
    for scenario in found["scenarios"]:
        if scenario["name"] in left_out:
            continue
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
    assert re.search(r"get of 4 KiB by name, one by one .* [um]s ", done.text)
    assert f"Engine: {served.server}" in done.text


def test_an_engine_in_the_environment_is_not_measured_unasked(served: Served, tmp_path: Path) -> None:
    done = served("bench", "--seconds", "0.05", "stat", "--json", "--dir", tmp_path)
    assert json.loads(done.text)["engine"].startswith("a temporary one")


def test_a_bench_that_is_ended_takes_its_engine_and_store_along(tmp_path: Path) -> None:
    ended_when(lambda: bool(engines_below(tmp_path)), tmp_path, "stat", "put-one")
    assert engines_below(tmp_path) == set()


def ended_when(begun: Callable[[], bool], folder: Path, *scenarios: str) -> None:
    """Send SIGTERM once it has begun; nothing may be left in the folder, where it keeps all that it makes."""
    command = [*LAKE, "bench", "--seconds", "60", *scenarios, "--dir", str(folder)]
    process = subprocess.Popen(
        command, env=environment() | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not begun():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(folder.iterdir()) == []


def mounts_below(folder: Path) -> list[Path]:
    return [entry.mount_point for entry in all_mounts() if entry.mount_point.is_relative_to(folder)]


@pytest.mark.fuse
def test_a_mount_of_ones_own_engine_is_measured_read_only(served: Served) -> None:
    buckets = served.good("ls").lines
    done = served("bench", "--own", "--seconds", "0.05", "mount-read", "--json")
    assert done.code == 0, done
    [scenario] = json.loads(done.text)["scenarios"]
    assert scenario["bytes_per_s"] > 0
    assert served.good("ls").lines == buckets


@pytest.mark.fuse
def test_a_bench_that_is_ended_takes_its_mount_along(tmp_path: Path) -> None:
    ended_when(lambda: bool(mounts_below(tmp_path)), tmp_path, "mount-read")
    assert mounts_below(tmp_path) == []


@pytest.mark.fuse
def test_without_a_fuse_device_the_mount_is_left_out_and_a_failure_only_to_who_asked_for_it(
    served: Served, tmp_path: Path
) -> None:
    told = []
    for asked in (["mount-read"], []):
        (dev := tmp_path / f"dev-{len(asked)}").mkdir()
        command = [*private_mounts(own_dev(dev, None)), *LAKE, *QUICK, "--own", *asked]
        done = subprocess.run(command, env=environment(served.server), capture_output=True, text=True)
        told.append((done.returncode, "left out: there is no /dev/fuse (modprobe fuse;" in done.stdout))
    assert told == [(1, True), (0, True)]


def test_a_store_without_an_engine_has_no_mount_to_measure() -> None:
    ground = Ground(cast(Lake, None))
    [outcome] = run_trials(ground, [trial for trial in TRIALS if trial.name == "mount-read"], 0.05)
    assert outcome.left_out == "a mount needs an engine that serves (--server)"


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
