"""The named steps: each is in the code once, none costs anything when off, and an armed one ends the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine.host.failpoints as failpoints
from engine.host.failpoints import ALL_POINTS, VARIABLE, armed
from lakefs.errors import ConfigError

ROOT = Path(failpoints.__file__).parents[2]


def test_every_step_is_named_once_and_reached_at_one_place() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "engine").rglob("*.py")))
    called = re.findall(r'reached\("([^"]+)"\)', source)
    replaced = re.findall(r'points="([^"]+)"', source)  # the steps of `replace_small_file`
    steps = re.findall(r'reached\(f"\{points\}\.([^"]+)"\)', source)
    assert sorted([*called, *[f"{name}.{step}" for name in replaced for step in steps]]) == sorted(ALL_POINTS)
    assert steps == ["synced", "renamed", "durable"]
    assert len(set(ALL_POINTS)) == len(ALL_POINTS)


def test_without_the_variable_a_step_does_nothing() -> None:
    assert VARIABLE not in os.environ
    assert failpoints.reached is failpoints._nothing


@pytest.mark.parametrize("setting", ["", "nowhere:1", "large.written", "large.written:x", "large.written:1:OFF"])
def test_a_setting_that_names_no_step_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        armed(setting)


def test_the_process_ends_the_third_time_it_comes_to_its_step() -> None:
    script = (
        "from engine.host.failpoints import reached\n"
        "for turn in range(5):\n"
        "    reached('journal.synced'); reached('journal.written'); print(turn, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={VARIABLE: "journal.written:3"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (-9, b"0\n1\n")
