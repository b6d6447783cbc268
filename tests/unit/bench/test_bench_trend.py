"""A trend has what was recorded, compares like with like, and reports what costs over a tenth more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.trend import changes, record


def result(value: float, *, spread: str = "", goal: str = ">= 1x", date: str = "2026-01-02") -> dict[str, Any]:
    row = {"what": "work / a", "unit": "x", "value": value, "spread": spread, "goal": goal, "could_not_run": ""}
    return {"rows": [row], "date": date}


def document(found: dict[str, Any], *, kind: str = "box", quick: bool = False) -> dict[str, Any]:
    machine = {"commit": "abc", "kind": kind, "kernel": "6", "python": "3", "load": 0.1}
    return {"machine": machine, "rounds": 5, "quick": quick, "scenarios": {"s": found}}


@pytest.mark.parametrize(
    ("before", "now", "goal", "told", "costs"),
    [
        (1.0, 0.85, ">= 1x", ["WORSE "], True),
        (1.0, 1.15, ">= 1x", ["better"], False),
        (1.0, 1.15, "<= 1x", ["WORSE "], True),
        (1.0, 1.15, "-", ["moved "], False),
        (1.0, 0.95, ">= 1x", [], False),
    ],
)
def test_what_moves_by_more_than_a_tenth_is_told(
    before: float, now: float, goal: str, told: list[str], costs: bool, tmp_path: Path
) -> None:
    record(document(result(before, goal=goal, date="2026-01-01")), tmp_path)
    found, new = changes(document(result(now, goal=goal)), tmp_path)
    assert [change.told()[:6] for change in found] == told
    assert any(change.costs for change in found) == costs
    assert new == []


def test_a_change_whose_rounds_reach_the_old_value_is_noise(tmp_path: Path) -> None:
    record(document(result(1.2e4, date="2026-01-01")), tmp_path)
    found, _ = changes(document(result(1e4, spread="8k..13k")), tmp_path)
    assert [change.costs for change in found] == [False]
    assert "within the spread" in found[0].told()


def test_only_the_last_older_line_of_the_same_kind_of_machine_counts(tmp_path: Path) -> None:
    for value, kind, date in ((1.0, "box", "2026-01-01"), (9.0, "other", "2026-01-01"), (9.0, "box", "2026-01-03")):
        record(document(result(value, date=date), kind=kind), tmp_path)
    assert changes(document(result(1.0)), tmp_path) == ([], [])
    assert changes(document(result(1.0), kind="third"), tmp_path) == ([], ["s"])


def test_of_a_sampled_scenario_our_own_figures_count(tmp_path: Path) -> None:
    def sampled(rate: float, date: str) -> dict[str, Any]:
        side = {
            "rounds": [{"operations_per_s": rate, "p50_us": 5.0}],
            "median": {"operations_per_s": rate, "p50_us": 5.0},
        }
        return {"kind": "sampled", "ours": "mine", "sides": {"mine": side}, "rows": [], "date": date}

    [path] = record(document(sampled(100, "2026-01-01")), tmp_path)
    assert set(json.loads(path.read_text())["figures"]) == {"operations_per_s", "p50_us"}
    found, _ = changes(document(sampled(50, "2026-01-02")), tmp_path)
    assert [(change.what, change.costs) for change in found] == [("operations_per_s", True)]


def test_a_quick_run_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quick"):
        record(document(result(1), quick=True), tmp_path)
    assert list(tmp_path.iterdir()) == []
