"""`python -m bench.run [SCENARIO...]`: measure, print a table, write JSON to bench/out/.

Figures are honest only on a quiet machine; the spread beside each shows how quiet it was.  `--quick` moves almost
nothing: it shows that every scenario works, and its figures mean nothing.

A run of all ends within 75 minutes: a scenario that no longer fits is listed with that reason.

A scenario that fails has its traceback printed and its reason in the result; the others still run, and the exit code
reports it.  The results are written after each scenario, so that an interrupted run keeps them.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.machine import machine
from bench.harness.measure import ROUNDS_MIN, Bench, Row, Scale, run_scenario
from bench.harness.plan import BY_NAME_ONLY, WHOLE_RUN_S, expected_s, generator_of
from bench.harness.process import ROOT
from bench.harness.sampled import Sampled
from bench.scenarios import SCENARIOS
from bench.trend import record

OUT = ROOT / "bench" / "out"
WITHIN_S = WHOLE_RUN_S - 60.0
"""Leaves room for a last scenario that takes longer than planned."""


def main() -> int:
    """Run the command.  Exit code 0 if every scenario ran, whatever it measured; 1 if one failed."""
    options = _parse()
    wanted = options.scenario or [""]
    names = [name for word in wanted for name in SCENARIOS if _meant(word, name)]
    if not options.scenario:
        names = [name for name in names if not name.startswith(BY_NAME_ONLY)]
    unknown = [word for word in wanted if not any(_meant(word, name) for name in SCENARIOS)]
    if unknown:
        print(f"no such scenario: {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    if options.plan:
        return _print_plan(names)
    if options.record and options.quick:
        print("a quick run is not recorded: its figures mean nothing", file=sys.stderr)
        return 2
    # So that processes are stopped and mounts removed on SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    OUT.mkdir(parents=True, exist_ok=True)
    target = options.json or OUT / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    within_s = options.within or (math.inf if options.scenario else WITHIN_S)
    rounds = options.rounds or (2 if options.quick else ROUNDS_MIN)
    with tempfile.TemporaryDirectory(dir=options.dir or OUT, prefix="work-") as work:
        whole = _Whole(Path(work), Scale(options.quick, rounds, not options.quick and not options.no_profile), target)
        try:
            whole.warn_of(names)
            for name in names:
                if whole.fits(name, within_s):
                    whole.take(name)
        finally:
            whole.close()
    missed = sum(not row.met for row in whole.rows)
    print(f"{len(whole.rows)} figures, {missed} outside their goal; written to {target}")
    if options.record:
        record(json.loads(target.read_text()))
    if whole.failed:
        print(f"failed: {', '.join(whole.failed)}", file=sys.stderr)
    return 1 if whole.failed else 0


class _Whole:
    """All scenarios of one run: their results, and the file that holds them."""

    def __init__(self, work: Path, scale: Scale, target: Path) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._begin_s = time.monotonic()
        self._work = work
        self._scale = scale
        self._target = target
        self._shared: dict[str, Any] = {}
        self._scenarios: dict[str, Any] = {}
        self._document = {
            "machine": machine(work),
            "command": shlex.join(["python", "-m", "bench.run", *sys.argv[1:]]),
            "quick": scale.quick,
            "rounds": scale.rounds,
            "scenarios": self._scenarios,
        }

    def warn_of(self, names: Sequence[str]) -> None:
        """Report before the first scenario which ones lack disk space, while the user can still act."""
        bench = Bench(self._work, self._scale)
        for name in names:
            scenario = SCENARIOS[name]
            if isinstance(scenario, Sampled) and (lack := scenario.lack_of_disk(bench)):
                print(f"{name} will not run: {lack}; --dir says where else to measure", file=sys.stderr)

    def fits(self, name: str, within_s: float) -> bool:
        """Return True if there is time for it; otherwise list it with that reason."""
        elapsed_s = time.monotonic() - self._begin_s
        if self._scale.quick or elapsed_s + expected_s(name, SCENARIOS[name]) <= within_s:
            return True
        reason = f"the time of the whole run was over; alone: make bench SCENARIO={name}"
        self._note(name, [Row(name, name, 0, "", "-", met=True, spread="", could_not_run=reason)], {}, 0.0)
        return False

    def take(self, name: str) -> None:
        """Run one scenario, print it, and write the results so far."""
        folder = self._work / name
        folder.mkdir()
        begin = time.monotonic()
        try:
            rows, measured = run_scenario(SCENARIOS[name], Bench(folder, self._scale, self._shared))
        except Exception as error:  # noqa: BLE001 - the others are to run
            traceback.print_exc()
            self.failed.append(name)
            reason = f"{type(error).__name__}: {error}"
            rows, measured = [Row(name, name, 0, "", "-", met=False, spread="", could_not_run=reason)], {}
        shutil.rmtree(folder, ignore_errors=True)
        self._note(name, rows, measured, time.monotonic() - begin)

    def _note(self, name: str, rows: Sequence[Row], measured: dict[str, Any], elapsed_s: float) -> None:
        """Write a scenario's rows to the file, and print them."""
        found = {
            "rows": [asdict(row) for row in rows],
            "elapsed_s": round(elapsed_s, 1),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "generator": generator_of(name),
        }
        self.rows.extend(rows)
        self._scenarios[name] = found | measured
        self._target.write_text(json.dumps(self._document, indent=1) + "\n")
        for row in rows:
            print(_line(row), flush=True)
        if "table" in measured:
            print(_table(**measured["table"]), flush=True)
        print(f"{'':10}({elapsed_s:.0f} s)", file=sys.stderr)

    def close(self) -> None:
        """Close what scenarios share."""
        for prepared in self._shared.values():
            prepared.close()


def _print_plan(names: Sequence[str]) -> int:
    """Print the expected and last time of each scenario, and the total."""
    seconds = {name: expected_s(name, SCENARIOS[name]) for name in names}
    took: dict[str, float] = {}
    for path in sorted(OUT.glob("*.json")):
        document = json.loads(path.read_text())
        if not document["quick"]:
            took |= {name: found.get("elapsed_s", 0) for name, found in document["scenarios"].items()}
    for name, some in seconds.items():
        last = f"  (took {took[name]:.0f} s)" if took.get(name) else ""
        print(f"{some:6.0f} s  {name}{last}")
    print(f"{sum(seconds.values()):6.0f} s  in all, {len(names)} scenarios")
    return 0


def _meant(word: str, name: str) -> bool:
    """Return True if a word selects a scenario: by its name, or by a prefix such as `peers`."""
    return word in ("", name) or (word not in SCENARIOS and name.startswith(f"{word}-"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measure the product.")
    parser.add_argument("scenario", nargs="*", help=f"of: {', '.join(SCENARIOS)}; or how some begin; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default bench/out/TIME.json")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {ROUNDS_MIN}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything work?")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="folder on the disk to measure")
    parser.add_argument("--no-profile", action="store_true", help="do not look where the time of a miss goes")
    parser.add_argument("--record", action="store_true", help="add the figures to bench/trends")
    parser.add_argument(
        "--within", type=float, metavar="S", help=f"what no longer fits is left out; {WITHIN_S:.0f} for a run of all"
    )
    parser.add_argument("--plan", action="store_true", help="say how long it would take, and end")
    return parser.parse_args()


def _line(row: Row) -> str:
    if row.could_not_run:
        return f"absent {'':>10}  goal {row.goal:<12} {row.what}  could not run: {row.could_not_run}"
    met = "met   " if row.met else "MISSED"
    value = f"{row.value:.3g} {row.unit}".strip()
    parts = [f"{met} {value:>10}  goal {row.goal:<12} {row.what}"]
    if row.spread:
        parts.append(f"  [{row.spread}]")
    if row.detail:
        parts.append(f"  ({row.detail})")
    return "".join(parts)


def _table(title: str, lines: list[list[str]]) -> str:
    """Format a scenario's own table as Markdown, with its columns aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join([f"\n{title}\n", *(f"| {' | '.join(line)} |" for line in padded), ""])


if __name__ == "__main__":
    sys.exit(main())
