"""`python -m bench.report [FILE...]`: writes bench results as docs/performance.md, a page for each area, and plots.

Results are read from these files, by default all that `bench.run` wrote to bench/out: the newest of each scenario, on
the kind of machine that the newest file is from; quick runs mean nothing and are left out.  docs/performance.md has
each face's goals and every miss.  In docs/performance/AREA.md wins and losses stand side by side, each with the command
that measures it again, its date, and how its load was checked.  Profiles are written to bench/out/profiles alone.

Prose is kept apart: `bench/report_notes.md` has a heading for a scenario (`## NAME`) or for a whole section (`##
NAME-`, the prefix of its scenarios), and the text below it is printed below that scenario's figures.  A missed goal
without prose is reported on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness import svg
from bench.harness.measure import spread_values, three_digits
from bench.harness.process import ROOT
from bench.harness.profile import below_all, boxes, shares
from bench.harness.sampled import FIGURES, OURS

OUT: Final = ROOT / "bench" / "out"
DOCS: Final = ROOT / "docs"
NOTES: Final = ROOT / "bench" / "report_notes.md"
PROFILES: Final = OUT / "profiles"
PAGE: Final = "performance.md"
AREAS: Final = "performance"
PLOTS: Final = "plots"

SECTIONS: Final[Sequence[tuple[str, str, tuple[str, ...]]]] = (
    ("reading", "Reading from Python", ("get-", "grant-", "locate", "cold", "random-", "map-", "known-", "loader")),
    ("fsspec", "Through fsspec: pandas, pyarrow, torch", ("fsspec-",)),
    ("writing", "Writing", ("put-", "seal", "dedup-", "space")),
    ("kv", "Key-value blocks: the hot path against its peers", ("kv-", "keyed-", "pool-", "lookup")),
    ("tails", "Tails: open loops", ("open-get", "open-s3", "null-")),
    ("cores", "Many cores", ("engines-",)),
    ("lake", "A lake on several devices", ("lake-",)),
    ("s3", "S3", ("s3-",)),
    ("mount", "The mount", ("mount-",)),
    ("peers", "The mount against other mounts", ("peers-",)),
    ("gains", "With a mechanism and without", ("gain-",)),
    ("upkeep", "Upkeep, memory, growth", ("gc-", "scrub", "memory-", "mixed", "rename-", "list-", "open-", "startup")),
)
"""Area (its page's name), title, and how the names of its scenarios begin."""
GAINS: Final = "gains"
"""Area of scenarios that compare a mechanism with its absence: the first page has all of them, met or missed."""
_OTHERS: Final = ("more", "More")
TIPS: Final = 8
"""Functions that a profile lists."""


@dataclass(frozen=True)
class Found:
    """The newest result of a scenario, and its run."""

    name: str
    result: Mapping[str, Any]
    run: Mapping[str, Any]


def collected(files: Sequence[Path]) -> list[Found]:
    """Return the newest result of each scenario, without quick runs and other kinds of machine than the newest
    file's."""
    documents = sorted((json.loads(path.read_text()) for path in files), key=lambda found: found["machine"]["date"])
    documents = [found for found in documents if not found["quick"] and "kind" in found["machine"]]
    if not documents:
        return []
    kind = documents[-1]["machine"]["kind"]
    newest: dict[str, Found] = {}
    for document in documents:
        if document["machine"]["kind"] == kind:
            for name, result in document["scenarios"].items():
                newest[name] = Found(name, result, document)
    return list(newest.values())


def notes_of(path: Path) -> dict[str, str]:
    """Return the written notes, by heading."""
    if not path.exists():
        return {}
    parts = re.split(r"^## +(\S+)[ \t]*$", path.read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


class Report:
    """The pages, their plots and the profiles, from results and notes."""

    def __init__(self, found: Sequence[Found], notes: Mapping[str, str]) -> None:
        self.plots: dict[str, str] = {}
        """SVG by file name."""
        self.profiles: dict[str, str] = {}
        """Flame graphs, and tables of their tips, by file name."""
        self.unexplained: list[str] = []
        """Scenarios with a missed goal and no notes, neither their own nor their section's."""
        self._found = found
        self._notes = notes

    def page(self) -> str:
        """Return the first page as Markdown: each face's goals, and every miss."""
        faces = [(area, title, _rows(members)) for area, title, members in self._sections()]
        parts = [_head(self._found), _summary(faces)]
        parts += [_misses(area, title, rows) for area, title, rows in faces if area != GAINS]
        parts += [_gains(title, members) for area, title, members in self._sections() if area == GAINS]
        return "\n".join(part for part in parts if part)

    def areas(self) -> dict[str, str]:
        """Return the page of each area as Markdown, by file name."""
        pages: dict[str, str] = {}
        for area, title, members in self._sections():
            parts = [_area_head(title, members), *self._section(title, members)]
            pages[f"{area}.md"] = _one_folder_down("\n".join(parts))
        return pages

    def _sections(self) -> Iterator[tuple[str, str, list[Found]]]:
        left = list(self._found)
        for area, title, beginnings in SECTIONS:
            members = [found for found in left if found.name.startswith(beginnings)]
            left = [found for found in left if found not in members]
            if members:
                yield area, title, members
        if left:
            yield *_OTHERS, left

    def _section(self, title: str, members: Sequence[Found]) -> Iterator[str]:
        ratios = [ratio for found in members for ratio in _ratios(found)]
        if ratios:
            name = f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}.svg"
            self.plots[name] = svg.ratios(f"{title}: ours / the other; right of 1 is ahead", ratios)
            yield f"![{title}: ratios]({PLOTS}/{name})\n"
        lines = [["scenario", "what", "figure", "spread", "goal", ""]]
        lines += [_table_row(row) for found in members for row in found.result["rows"]]
        yield _table(lines)
        for beginning in sorted({f"{found.name.split('-')[0]}-" for found in members}):
            if beginning in self._notes:
                yield f"{self._notes[beginning]}\n"
        for found in members:
            yield from self._scenario(found)

    def _scenario(self, found: Found) -> Iterator[str]:
        result = found.result
        yield f"## {found.name}\n"
        when = result["date"][:16].replace("T", " ")
        yield (f"`make bench SCENARIO={found.name}`, {when} UTC, {_rounds(found)}. Load: {result['generator']}.\n")
        if "table" in result:
            yield f"{result['table']['title']}:\n\n{_table(result['table']['lines'])}"
        if result.get("kind") == "sampled":
            yield from self._sampled_plots(found)
            self._profile(found)
        else:
            details = [f"- {_cell(row['what'])}: {_cell(row['detail'])}" for row in result["rows"] if row["detail"]]
            yield "\n".join([*details, ""] if details else [])
        missed = [row for row in result["rows"] if not row["met"]]
        if found.name in self._notes:
            yield f"{self._notes[found.name]}\n"
        elif missed and not any(found.name.startswith(name) for name in self._notes if name.endswith("-")):
            self.unexplained.append(found.name)

    def _sampled_plots(self, found: Found) -> Iterator[str]:
        result = found.result
        figure = result["figure"]
        known = FIGURES.get(figure)
        title, unit = (known.title, known.unit) if known else (figure, "")
        sides = [
            _bar(name, side["rounds"], figure) for name, side in result["sides"].items() if figure in side["median"]
        ]
        if len(sides) > 1:
            name = f"{found.name}.svg"
            self.plots[name] = svg.bars(f"{result['title']}: {title}", unit, sides)
            yield f"![{found.name}: {title}]({PLOTS}/{name})\n"
        curves = [
            (name, _curve(side["latencies_ns"])) for name, side in result["sides"].items() if side["latencies_ns"]
        ]
        if curves:
            name = f"{found.name}-latency.svg"
            self.plots[name] = svg.percentiles(f"{result['title']}: latency", curves)
            yield f"![{found.name}: latency by percentile]({PLOTS}/{name})\n"

    def _profile(self, found: Found) -> None:
        """Note a flame graph for each role, and a table of the functions at the tips of its flames."""
        for role, stacks in found.result.get("profile", {}).items():
            stacks = below_all(stacks)
            name = f"{found.name}-{role}"
            self.profiles[f"{name}.svg"] = svg.flames(f"{found.name}: the {role}'s time", list(boxes(stacks)))
            lines = [[f"{role}, in itself", "with what it calls", ""]]
            lines += [[f"{own:.0%}", f"{all_:.0%}", f"`{frame}`"] for frame, all_, own in shares(stacks, TIPS)]
            self.profiles[f"{name}.md"] = f"# {name}\n\n![flames]({name}.svg)\n\n{_table(lines)}"


def _rows(found: Sequence[Found]) -> list[Mapping[str, Any]]:
    return [row for one in found for row in one.result["rows"]]


def _one_folder_down(text: str) -> str:
    """Return a page of docs/ with its links to other pages and plots as a page of docs/performance/ needs them."""
    return re.sub(rf"\]\((?=[\w/-]+\.md|{PLOTS}/)", "](../", text)


def _head(found: Sequence[Found]) -> str:
    kind = found[0].run["machine"]["kind"]
    return (
        "# Performance\n\n"
        "Written by `python -m bench.report` from what `make bench` measured; edit `bench/report_notes.md` and run it\n"
        "again, not this page. How it is measured, and why goals are missed: [benchmarks](benchmarks.md). Each area\n"
        "has a page with all figures, their spread, date and command.\n\n"
        f"Machine: {kind}.\n"
    )


def _area_head(title: str, found: Sequence[Found]) -> str:
    runs = {one.run["machine"]["date"]: one.run for one in found}
    lines = [["date", "commit", "command", "load before", "kernel", "Python"]]
    for date, run in sorted(runs.items()):
        machine = run["machine"]
        lines.append([
            date[:16].replace("T", " "), machine["commit"], f"`{run['command']}`", str(machine["load"]),
            machine["kernel"], machine["python"],
        ])  # fmt: skip
    kind = found[0].run["machine"]["kind"]
    return (
        f"# {title}\n\n"
        "Written by `python -m bench.report`, as all of [performance](performance.md).\n\n"
        f"Machine: {kind}. Runs:\n\n{_table(lines)}"
    )


def _summary(faces: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> str:
    lines = [["area", "goals", "met", "missed", "could not run"]]
    for area, title, rows in faces:
        counts = _counts(rows)
        lines.append([f"[{title}]({AREAS}/{area}.md)", *map(str, counts)])
    goals, met, missed, absent = _counts([row for _, _, rows in faces for row in rows])
    total = (
        f"{goals} goals, {met} met, {missed} missed; {absent} rows could not be run, with their reasons in the tables."
    )
    return f"{total}\n\n{_table(lines)}"


def _counts(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, int, int]:
    """Return the numbers of goals, of those met and missed, and of rows that could not be run."""
    absent = sum(bool(row["could_not_run"]) for row in rows)
    judged = [row for row in rows if not row["could_not_run"] and row["goal"] != "-"]
    met = sum(bool(row["met"]) for row in judged)
    return len(judged), met, len(judged) - met, absent


def _misses(area: str, title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    missed = [row for row in rows if not row["could_not_run"] and row["goal"] != "-" and not row["met"]]
    lines = [["missed", "what", "figure", "goal"]]
    lines += [
        [f"[{row['scenario']}]({AREAS}/{area}.md#{row['scenario']})", _cell(row["what"]), _value(row), row["goal"]]
        for row in missed
    ]
    return f"## {title}\n\n{_table(lines)}" if missed else ""


def _gains(title: str, found: Sequence[Found]) -> str:
    """Return the figure of each goal with the mechanism and without it."""
    lines = [["what", "with", "without", "ratio", ""]]
    for one in found:
        what, medians = f"[{_cell(one.result['title'])}]({AREAS}/{GAINS}.md#{one.name})", _medians(one)
        for row, target in zip(one.result["rows"], one.result["targets"], strict=False):  # other sides' rows follow
            if row["goal"] == "-" or row["could_not_run"]:
                continue
            both = [three_digits(medians[side][target["figure"]]) for side in (one.result["ours"], target["against"])]
            lines.append([what, *both, _value(row), "" if row["met"] else f"**missed**: {row['goal']}"])
    kind = found[0].run["machine"]["kind"]
    measured = f"CPU of all processes together, us an operation: `make bench SCENARIO={GAINS[:-1]}`, {kind}."
    return f"## {title}\n\n{measured}\n\n{_table(lines)}"


def _medians(found: Found) -> dict[str, Mapping[str, float]]:
    return {name: side["median"] for name, side in found.result["sides"].items()}


def _table_row(row: Mapping[str, Any]) -> list[str]:
    name = f"[{row['scenario']}](#{row['scenario']})"
    if row["could_not_run"]:
        return [name, _cell(row["what"]), "", "", row["goal"], f"could not run: {_cell(row['could_not_run'])}"]
    verdict = "" if row["goal"] == "-" else "met" if row["met"] else "**missed**"
    return [name, _cell(row["what"]), _value(row), row["spread"].replace("..", " to "), row["goal"], verdict]


def _value(row: Mapping[str, Any]) -> str:
    return f"{three_digits(row['value'])} {row['unit']}".rstrip()


def _cell(text: str) -> str:
    """Return the text as a table cell: on one line, with `|` escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in rest), ""]
    )


def _ratios(found: Found) -> Iterator[svg.Ratio]:
    """Yield rows that compare with another side, turned so that above 1 is ahead."""
    for row in found.result["rows"]:
        if row["unit"] != "x" or row["could_not_run"] or not 0 < row["value"] < math.inf:
            continue
        if f" / {OURS}, " in row["what"]:
            continue
        low, high = spread_values(row["spread"], row["value"])
        limit = re.search(r"[\d.]+", row["goal"])
        values = [row["value"], low, high, float(limit[0]) if limit else 0.0]
        if not _higher_is_better(found, row):
            values = [1 / value if value else 0.0 for value in values]
            values[1], values[2] = values[2], values[1]
        what, _, peer = row["what"].rpartition(" / ")
        side = next((name for name in found.result.get("sides", ()) if f", {name}, " in what), "")
        at = re.search(r"\d+ connections", what)
        label = ", ".join([found.name, *filter(None, [side, at[0] if at else ""])])
        yield svg.Ratio(f"{label} / {peer}", *values)


def _higher_is_better(found: Found, row: Mapping[str, Any]) -> bool:
    if row["goal"][:1] in "<>":
        return bool(row["goal"][:1] == ">")
    known = FIGURES.get(found.result.get("figure", ""))
    return known.higher_is_better if known else not found.result.get("unit", "").startswith("us")


def _rounds(found: Found) -> str:
    """Return the number of rounds: a scenario may have fewer than its run requested."""
    result = found.result
    counts = {len(result[name]) for name in ("ours", "rounds", "alone") if isinstance(result.get(name), list)}
    counts |= {len(side["rounds"]) for side in result.get("sides", {}).values()}
    counts |= {len(side["rates"]) for cell in result.get("cells", {}).values() for side in cell.values()}
    least, most = min(counts, default=found.run["rounds"]), max(counts, default=found.run["rounds"])
    return f"{least} to {most} rounds" if least < most else f"{most} round{'s' * (most != 1)}"


def _bar(name: str, rounds: Sequence[Mapping[str, float]], figure: str) -> svg.Bar:
    values = sorted(found[figure] for found in rounds)
    middle = len(values) // 2
    median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
    return svg.Bar(name, median, values[0], values[-1])


def _curve(buckets: Sequence[tuple[int, int]]) -> svg.Curve:
    total, seen = sum(count for _, count in buckets), 0
    curve: list[tuple[float, float]] = []
    for lowest_ns, count in buckets:
        curve.append((seen / total, lowest_ns / 1e3))
        seen += count
    return [*curve, (1 - 0.5 / total, buckets[-1][0] / 1e3)]


def write(found: Sequence[Found], notes: Mapping[str, str], folder: Path, profiles: Path) -> list[str]:
    """Write the pages and plots below a folder, the profiles to another, and remove old ones.

    Return the misses without notes.
    """
    report = Report(found, notes)
    areas = report.areas()
    _fill(folder / AREAS, areas, "*.md")
    _fill(folder / PLOTS, report.plots, "*.svg")
    _fill(profiles, report.profiles, "*")
    (folder / PAGE).write_text(report.page())
    return report.unexplained


def _fill(folder: Path, texts: Mapping[str, str], old: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(old):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", nargs="*", type=Path, help="of bench.run; default all in bench/out")
    parser.add_argument("--to", type=Path, default=DOCS, metavar="DIR", help="default docs/")
    options = parser.parse_args()
    found = collected(options.file or sorted(OUT.glob("*.json")))
    if not found:
        print("there is no result of a whole run: make bench", file=sys.stderr)
        return 2
    unexplained = write(found, notes_of(NOTES), options.to, PROFILES)
    print(f"{len(found)} scenarios in {options.to / PAGE}")
    if unexplained:
        print(f"missed, and nothing said about it in {NOTES.name}: {', '.join(unexplained)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
