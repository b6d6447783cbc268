"""`python -m bench.trend [FILE]`: changes since a scenario was last recorded on such a machine.

`bench/trends/NAME.jsonl` has a line for each recorded run (`--record`; nothing else writes there): the machine and
its kind, the commit, the date, and the figures with their spread.  A result is compared with the last older line of
the same kind of machine.  A figure that changed by more than `CHANGE` is printed; if one is worse, the exit code is
1.  A change whose old value lies within the new spread is printed as `within the spread`: noise, until it happens
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness.measure import spread_values, three_digits
from bench.harness.process import ROOT
from bench.harness.sampled import FIGURES

TRENDS: Final = ROOT / "bench" / "trends"
OUT: Final = ROOT / "bench" / "out"
CHANGE: Final = 0.10
_HIGHER: Final = "higher"
_LOWER: Final = "lower"


@dataclass(frozen=True)
class Point:
    """A figure of one run: its median, its spread, and which direction is better (empty: unknown)."""

    value: float
    low: float
    high: float
    better: str


def points_of(result: Mapping[str, Any]) -> dict[str, Point]:
    """Return the figures of one scenario's result, by title."""
    if result.get("kind") == "sampled":
        return dict(_sampled_points(result))
    found: dict[str, Point] = {}
    for row in result["rows"]:
        if row["could_not_run"]:
            continue
        low, high = spread_values(row["spread"], row["value"])
        better = {">": _HIGHER, "<": _LOWER}.get(row["goal"][:1], "")
        found[f"{row['what']}, {row['unit']}".rstrip(", ")] = Point(row["value"], low, high, better)
    return found


def _sampled_points(result: Mapping[str, Any]) -> Iterator[tuple[str, Point]]:
    rounds = result["sides"][result["ours"]]["rounds"]
    for name, value in result["sides"][result["ours"]]["median"].items():
        values = [found[name] for found in rounds]
        unit = FIGURES.get(name)
        better = "" if unit is None else _HIGHER if unit.higher_is_better else _LOWER
        yield name, Point(value, min(values), max(values), better)


def line_of(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the line that records one scenario of a run."""
    machine = document["machine"]
    result = document["scenarios"][name]
    return {
        "date": result["date"],
        "commit": machine["commit"],
        "kind": machine["kind"],
        "machine": {part: machine[part] for part in ("kernel", "python", "load")},
        "rounds": document["rounds"],
        "figures": {what: vars(point) for what, point in points_of(result).items()},
    }


def record(document: Mapping[str, Any], folder: Path = TRENDS) -> list[Path]:
    """Add a line for each measured scenario; ValueError for a quick run, whose figures mean nothing."""
    if document["quick"]:
        raise ValueError("a quick run is not recorded: its figures mean nothing")
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    for name in document["scenarios"]:
        line = line_of(document, name)
        if line["figures"]:
            path = folder / f"{name}.jsonl"
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            written.append(path)
    return written


def last_recorded(folder: Path, name: str, kind: str, before: str) -> dict[str, Any] | None:
    """Return the last line of a scenario from such a machine and from before that date; None if there is none."""
    path = folder / f"{name}.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    older = [line for line in lines if line["kind"] == kind and line["date"] < before]
    return older[-1] if older else None


@dataclass(frozen=True)
class Change:
    """A figure that moved by more than `CHANGE`."""

    scenario: str
    what: str
    before: Point
    now: Point
    commit: str

    @property
    def ratio(self) -> float:
        """The new value divided by the old."""
        return self.now.value / self.before.value

    @property
    def within_spread(self) -> bool:
        """True if the old value lies within the spread of the new rounds."""
        return self.now.low <= self.before.value <= self.now.high

    @property
    def costs(self) -> bool:
        """True if the figure is worse, beyond noise."""
        worse = _LOWER if self.ratio > 1 else _HIGHER
        return self.now.better == worse and not self.within_spread

    def told(self) -> str:
        """Return the change as one line."""
        known = {_HIGHER: self.ratio > 1, _LOWER: self.ratio < 1}.get(self.now.better)
        word = "moved " if known is None else "better" if known else "WORSE "
        noise = ", within the spread" if self.within_spread else ""
        values = f"{three_digits(self.before.value)} -> {three_digits(self.now.value)}"
        return f"{word} {self.ratio - 1:+.0%}  {self.scenario}: {self.what}: {values}{noise} (since {self.commit})"


def changes(document: Mapping[str, Any], folder: Path = TRENDS) -> tuple[list[Change], list[str]]:
    """Return the figures that moved by more than `CHANGE`, and the scenarios without an older line to compare
    with."""
    found: list[Change] = []
    new: list[str] = []
    for name in document["scenarios"]:
        now = line_of(document, name)
        before = last_recorded(folder, name, now["kind"], now["date"])
        if before is None:
            new.append(name)
            continue
        for what, point in now["figures"].items():
            old = before["figures"].get(what)
            if old and old["value"] and abs(point["value"] / old["value"] - 1) > CHANGE:
                found.append(Change(name, what, Point(**old), Point(**point), before["commit"]))
    return found, new


def newest(folder: Path = OUT) -> Path | None:
    """Return the newest result that a run wrote."""
    return max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)


def main() -> int:
    """Run the command; exit code 1 if a figure is worse than it was."""
    parser = argparse.ArgumentParser(prog="python -m bench.trend", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="of bench.run; default the newest of bench/out")
    parser.add_argument("--record", action="store_true", help="add it to bench/trends")
    options = parser.parse_args()
    file = options.file or newest()
    if file is None:
        print("there is no result in bench/out: make bench", file=sys.stderr)
        return 2
    document = json.loads(file.read_text())
    found, new = changes(document)
    for change in found:
        print(change.told())
    if new:
        print(f"nothing recorded on {document['machine']['kind']} before: {', '.join(new)}")
    if not found and len(new) < len(document["scenarios"]):
        print(f"nothing moved by more than {CHANGE:.0%}")
    if options.record:
        print(f"recorded: {len(record(document))} scenarios in {TRENDS}")
    return 1 if any(change.costs for change in found) else 0


if __name__ == "__main__":
    sys.exit(main())
