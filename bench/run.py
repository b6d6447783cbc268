"""`python -m bench.run [SCENARIO...]`: measure, print a table, write JSON to bench/out/.

Figures are honest only on a quiet machine; the spread beside each tells how quiet it was.  `--quick` moves next to
nothing: it shows that every scenario works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.measure import ROUNDS_MIN, Bench, Row, Scale, run_scenario
from bench.process import ROOT
from bench.scenarios import SCENARIOS
from lakefs.version import VERSION

OUT = ROOT / "bench" / "out"


def main() -> int:
    """The command; its exit code: 0 when every scenario ran, whatever it measured."""
    options = _parse()
    wanted = options.scenario or [""]
    names = [name for word in wanted for name in SCENARIOS if _meant(word, name)]
    unknown = [word for word in wanted if not any(_meant(word, name) for name in SCENARIOS)]
    if unknown:
        print(f"no such scenario: {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    # What was started and mounted is taken away then, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rounds = options.rounds or (2 if options.quick else ROUNDS_MIN)
    OUT.mkdir(parents=True, exist_ok=True)
    shared: dict[str, Any] = {}
    results: dict[str, Any] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.dir or OUT, prefix="work-") as work:
        try:
            for name in names:
                folder = Path(work) / name
                folder.mkdir()
                begin = time.monotonic()
                found, measured = run_scenario(
                    SCENARIOS[name], Bench(folder, Scale(options.quick, rounds), shared)
                )
                shutil.rmtree(folder, ignore_errors=True)
                rows.extend(found)
                results[name] = {"rows": [asdict(row) for row in found], **measured}
                for row in found:
                    print(_line(row), flush=True)
                if "table" in measured:
                    print(_table(**measured["table"]), flush=True)
                print(f"{'':10}({time.monotonic() - begin:.0f} s)", file=sys.stderr)
        finally:
            for prepared in shared.values():
                prepared.close()
    document = {"machine": _machine(), "quick": options.quick, "rounds": rounds, "scenarios": results}
    target = options.json or OUT / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    target.write_text(json.dumps(document, indent=1) + "\n")
    missed = sum(not row.met for row in rows)
    print(f"{len(rows)} figures, {missed} outside their goal; written to {target}")
    return 0


def _meant(word: str, name: str) -> bool:
    """A scenario is asked for by its name, or with others by what their names begin with: `peers`."""
    return word in ("", name) or (word not in SCENARIOS and name.startswith(f"{word}-"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measure the product.")
    parser.add_argument(
        "scenario", nargs="*", help=f"of: {', '.join(SCENARIOS)}; or how some begin; default all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="default bench/out/TIME.json")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {ROUNDS_MIN}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything work?")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="folder on the disk to measure")
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
    """A scenario's own table; as documents have it, with its columns in line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join([f"\n{title}\n", *(f"| {' | '.join(line)} |" for line in padded), ""])


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory,
    }


if __name__ == "__main__":
    sys.exit(main())
