"""The report has wins and losses alike, keeps the words that people wrote, and its plots are whole XML."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench.harness.measure import three_digits
from bench.report import Found, collected, notes_of, write

ROW = {
    "scenario": "put-x", "what": "put / dd", "value": 0.5, "unit": "x", "goal": ">= 0.8x", "met": False,
    "spread": "0.4..0.6", "detail": "", "could_not_run": "",
}  # fmt: skip
SIDE = {
    "rounds": [{"p99_us": 5.0}, {"p99_us": 7.0}, {"p99_us": 6.0}],
    "median": {"p99_us": 6.0},
    "latencies_ns": [[4000, 90], [7000, 10]],
}


def run(scenarios: dict[str, Any], *, date: str = "2026-01-01T10:00:00+00:00", **more: Any) -> dict[str, Any]:
    for result in scenarios.values():
        result.setdefault("date", date)
        result.setdefault("generator", "none apart")
    machine = {"date": date, "commit": "abc", "kind": "box", "load": 0.1, "kernel": "6", "python": "3"}
    return {"machine": machine, "command": "x", "quick": False, "rounds": 5, "scenarios": scenarios} | more


def found_in(document: dict[str, Any]) -> list[Found]:
    return [Found(name, result, document) for name, result in document["scenarios"].items()]


def sampled() -> dict[str, Any]:
    return {
        "kind": "sampled", "title": "reads", "figure": "p99_us", "ours": "ours",
        "sides": {"ours": SIDE, "a<b": SIDE}, "rows": [ROW | {"scenario": "open-get-x", "goal": "-", "met": True}],
    }  # fmt: skip


def test_what_is_missed_is_told_with_its_words_and_what_has_none_is_named(tmp_path: Path) -> None:
    absent = ROW | {"what": "put / y", "could_not_run": "y is not here", "met": True}
    document = run({"put-x": {"rows": [ROW, absent]}})
    assert write(found_in(document), {}, tmp_path, tmp_path / "p") == ["put-x"]
    assert write(found_in(document), {"put-x": "See [why](benchmarks.md#why)."}, tmp_path, tmp_path / "p") == []
    page = (tmp_path / "performance" / "writing.md").read_text()
    for words in ("See [why](../benchmarks.md#why).", "could not run: y is not here", "make bench SCENARIO=put-x"):
        assert words in page
    first = (tmp_path / "performance.md").read_text()
    assert "1 goals, 0 met, 1 missed; 1 rows could not be run" in first
    assert "| [Writing](performance/writing.md) | 1 | 0 | 1 | 1 |" in first
    assert "| [put-x](performance/writing.md#put-x) | put / dd | 0.5 x | >= 0.8x |" in first


def test_what_a_mechanism_brings_is_on_the_first_page_met_or_missed(tmp_path: Path) -> None:
    goal = {"text": "<= 0.9x", "limit": 0.9, "at_least": False}
    targets = [{"figure": "cpu", "goal": goal, "against": "without", "side": ""}]
    for number, ratio in enumerate((0.5, 1.0)):
        row = ROW | {"scenario": "gain-x", "what": "x / without", "value": ratio, "goal": "<= 0.9x", "met": ratio < 0.9}
        sides = {name: SIDE | {"median": {"cpu": cpu}} for name, cpu in (("ours", 12.5), ("without", 25.0))}
        result = {"rows": [row], "title": "logs", "ours": "ours", "targets": targets, "sides": sides}
        folder = tmp_path / str(number)
        write(found_in(run({"gain-x": result})), {}, folder, folder / "p")
        verdict = "" if ratio < 0.9 else "**missed**: <= 0.9x"
        line = f"| [logs](performance/gains.md#gain-x) | 12.5 | 25 | {three_digits(ratio)} x | {verdict} |"
        assert line in (folder / "performance.md").read_text().splitlines()
        assert (folder / "performance" / "gains.md").exists()


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        ({}, "5 rounds"),
        ({"ours": [1.0, 2.0, 3.0], "theirs": {}}, "3 rounds"),
        ({"rounds": [{}]}, "1 round"),
        ({"cells": {"1": {"ours": {"rates": [1.0] * 5}}, "8": {"ours": {"rates": [1.0] * 2}}}}, "2 to 5 rounds"),
    ],
)
def test_a_scenario_says_how_many_rounds_it_had_itself(tmp_path: Path, measured: dict[str, Any], told: str) -> None:
    write(found_in(run({"put-x": {"rows": [ROW], **measured}})), {}, tmp_path, tmp_path / "p")
    assert f"UTC, {told}." in (tmp_path / "performance" / "writing.md").read_text()


def test_every_plot_that_the_page_shows_is_there_and_whole(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.svg").write_text("")
    write(found_in(run({"put-x": {"rows": [ROW]}, "open-get-x": sampled()})), {}, tmp_path, tmp_path / "p")
    page = "".join(path.read_text() for path in sorted((tmp_path / "performance").iterdir()))
    plots = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert plots == ["open-get-x-latency.svg", "open-get-x.svg", "tails-open-loops.svg", "writing.svg"]
    for name in plots:
        assert f"(../plots/{name})" in page
        ElementTree.fromstring((tmp_path / "plots" / name).read_text())


def test_profiles_stay_out_of_the_pages_and_old_pages_go(tmp_path: Path) -> None:
    profiled = sampled() | {"profile": {"server": {"main;write": 3, "main;sync": 1}}}
    (tmp_path / "performance").mkdir()
    (tmp_path / "performance" / "old.md").write_text("")
    write(found_in(run({"open-get-x": profiled})), {}, tmp_path, tmp_path / "profiles")
    assert [path.name for path in (tmp_path / "performance").iterdir()] == ["tails.md"]
    assert "sync" not in (tmp_path / "performance" / "tails.md").read_text()
    assert "sync" in (tmp_path / "profiles" / "open-get-x-server.md").read_text()
    assert not (tmp_path / "plots" / "open-get-x-server.svg").exists()


def test_of_several_runs_the_newest_on_the_newest_machine_counts_and_quick_ones_never(tmp_path: Path) -> None:
    documents = {
        "a": run({"put-x": {"rows": [ROW]}, "put-y": {"rows": []}}, date="2026-01-01"),
        "b": run({"put-x": {"rows": []}}, date="2026-01-02"),
        "c": run({"put-x": {"rows": [ROW]}}, date="2026-01-03", quick=True),
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(json.dumps(document))
    found = {one.name: one.run["machine"]["date"] for one in collected(sorted(tmp_path.iterdir()))}
    assert found == {"put-x": "2026-01-02", "put-y": "2026-01-01"}


def test_notes_are_by_heading(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("Words for readers.\n\n## put-x\n\nOne.\n\n### Profile\n\nTwo.\n\n## s3-\nThree.\n")
    assert notes_of(tmp_path / "n") == {"put-x": "One.\n\n### Profile\n\nTwo.", "s3-": "Three."}


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (999, "999"), (1234.5, "1234"), (12345, "12.3k")])
def test_a_figure_has_three_digits_that_matter(value: float, text: str) -> None:
    assert three_digits(value) == text
