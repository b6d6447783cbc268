"""The contest with other mounts: rows that run are measured, rows that cannot say why, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness.contest import Contender, Contest, CouldNotRun, Run
from bench.harness.measure import Bench, Scale
from bench.peers.s3_mounts import TOOLS
from bench.peers.s3_stores import STORES, StoreUnavailable
from bench.scenarios.mount_peers import SCENARIOS

TRIED = ("peers-read", "peers-write", "peers-copy", "peers-memory")
"""One of each kind; python -m bench.run --quick runs all."""
QUICK = Scale(quick=True, rounds=1)


def need_peers() -> None:
    """Skip without the mounts that are compared, or without any store for them."""
    missing = [tool.name for tool in TOOLS if shutil.which(tool.name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    reasons: list[str] = []
    for kind in STORES:
        try:
            kind.program(fetch=False)
        except StoreUnavailable as reason:
            reasons.append(str(reason))
    if len(reasons) == len(STORES):
        pytest.skip("; ".join(reasons))


def mount_points() -> list[str]:
    return [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def processes_that_name(folder: Path) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command:
            found.append(command.decode(errors="replace"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_row_is_measured_or_says_why_not_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    need_peers()
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    rows, measured = scenario.run(Bench(tmp_path, QUICK))
    tools = {tool.name for tool in TOOLS}
    seen = {row.what.rpartition(" / ")[2].split(" ")[0] for row in rows}
    assert seen == tools
    assert all((row.value > 0) != bool(row.could_not_run) for row in rows)
    assert all(value > 0 for value in measured["ours"])
    assert [point for point in mount_points() if str(tmp_path) in point] == []
    assert processes_that_name(tmp_path) == []


@contextmanager
def running(values: Sequence[float], ended: list[str], name: str) -> Iterator[Run]:
    """A side that returns these values in turn, and then cannot go on."""
    left = iter(values)

    def run() -> float:
        for value in left:
            return value
        raise CouldNotRun("no more")

    yield run
    ended.append(name)


def contest(sides: dict[str, Sequence[float]], ended: list[str]) -> Contest:
    """Make a contest of `ours` and others by name; the tool is the name's first word."""

    def contender(name: str) -> Contender:
        return Contender(name, name.split()[0], lambda: running(sides[name], ended, name))

    @contextmanager
    def set_up(bench: Bench) -> Iterator[tuple[Contender, Sequence[Contender]]]:
        yield contender("ours"), [contender(name) for name in sides if name != "ours"]

    return Contest("c", "work", "s", higher_is_better=False, set_up=set_up)


def test_the_warm_up_does_not_count_and_the_ratio_is_ours_to_theirs(tmp_path: Path) -> None:
    ended: list[str] = []
    rows, measured = contest({"ours": [9, 1, 1, 2], "a on x": [9, 2, 4, 4]}, ended).run(
        Bench(tmp_path, Scale(quick=False, rounds=3))
    )
    assert measured["ours"] == [1, 1, 2]
    assert [(row.value, row.met, row.what) for row in rows] == [(0.5, True, "work / a on x")]
    assert sorted(ended) == ["a on x", "ours"]


def test_the_next_of_a_tool_takes_part_when_the_first_cannot(tmp_path: Path) -> None:
    rows, measured = contest({"ours": [1, 1], "a on x": [], "a on y": [1, 2], "a on z": [1, 1]}, []).run(
        Bench(tmp_path, QUICK)
    )
    assert [row.what for row in rows] == ["work / a on y", "work / a on x"]
    assert rows[0].value == 0.5
    assert measured["could_not_run"] == {"a on x": "no more"}
    assert rows[1].could_not_run == "no more"


def test_who_fails_in_a_counted_round_has_no_figure(tmp_path: Path) -> None:
    rows, _ = contest({"ours": [1, 1, 1, 1], "a on x": [1, 1]}, []).run(Bench(tmp_path, Scale(quick=False, rounds=3)))
    assert [(row.what, row.value, row.could_not_run) for row in rows] == [("work / a on x", 0, "no more")]


def test_a_failure_of_ours_is_one_of_the_scenario(tmp_path: Path) -> None:
    with pytest.raises(CouldNotRun):
        contest({"ours": []}, []).run(Bench(tmp_path, QUICK))
