"""Scenarios: their kinds, how one runs, and its result.

A scenario is a value: a name, a goal, and a context manager that sets its sides up.  The two sides of a scenario run
in turn, round after round, after a warm-up that is not counted, so changes of the disk's speed affect both.  The
result is the median of the rounds' ratios, with their spread.  A scenario without another side has figures of its
own, and a goal for them.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

ROUNDS_MIN: Final = 5


@dataclass(frozen=True)
class Goal:
    """A bound for a figure: `>=` or `<=` a limit."""

    text: str
    limit: float
    at_least: bool

    def met(self, value: float) -> bool:
        """Return True if a value is within the bound."""
        return value >= self.limit if self.at_least else value <= self.limit


def at_least(limit: float, unit: str = "") -> Goal:
    """Return the goal of a figure that should be large."""
    return Goal(f">= {limit:g}{unit}", limit, at_least=True)


def at_most(limit: float, unit: str = "") -> Goal:
    """Return the goal of a figure that should be small."""
    return Goal(f"<= {limit:g}{unit}", limit, at_least=False)


@dataclass(frozen=True)
class Scale:
    """Amount of work: `full` as the goals assume, or a thousandth of it to see that everything works."""

    quick: bool
    rounds: int
    profile: bool = False
    """True if a scenario that misses a goal takes a profile."""

    def pick(self, full: int, quick: int) -> int:
        """Return the size for this run."""
        return quick if self.quick else full


@dataclass
class Bench:
    """Resources of a scenario: its own folder on the disk, the scale, and what other scenarios have prepared."""

    folder: Path
    scale: Scale
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sides:
    """Two ways to do one thing.  Each runs once and returns its figure, in the scenario's unit.

    `higher_is_better`: the unit is a rate; else a time.  `prepare` runs before each, uncounted.
    """

    ours: Callable[[], float]
    theirs: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    figures: Callable[[], dict[str, float]] = dict


@dataclass(frozen=True)
class Paired:
    """A scenario of two sides; its figure is ours / theirs.  `needs`: a program that the other side runs."""

    name: str
    title: str
    unit: str
    goal: Goal
    set_up: Callable[[Bench], AbstractContextManager[Sides]]
    needs: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure of a scenario without another side."""

    name: str
    goal: Goal
    unit: str


@dataclass(frozen=True)
class Single:
    """A scenario of figures; `measure` returns one round's values by figure name; `repeat`: as many rounds as the run
    has."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    measure: Callable[[Bench], dict[str, float]]
    repeat: bool = False


class Own(Protocol):
    """A scenario that runs itself: `bench.harness.contest` and `bench.harness.sampled` have some."""

    @property
    def name(self) -> str:
        """The name, as on the command line."""

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Run it; return its rows, and all measured values, JSON-able."""


Scenario = Paired | Single | Own


@dataclass(frozen=True)
class Row:
    """One line of the table.  A row that could not be run has the reason, and neither a value nor a miss."""

    scenario: str
    what: str
    value: float
    unit: str
    goal: str
    met: bool
    spread: str
    detail: str = ""
    could_not_run: str = ""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def wait_until(happens: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    """Wait until something is so; RuntimeError with that text after so many seconds."""
    end = time.monotonic() + limit_s
    while not happens():
        if time.monotonic() > end:
            raise RuntimeError(otherwise)
        time.sleep(0.2)


def run_scenario(scenario: Scenario, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
    """Run a scenario; return its rows, and all measured values, JSON-able."""
    if isinstance(scenario, Paired):
        return _run_paired(scenario, bench)
    if isinstance(scenario, Single):
        return _run_single(scenario, bench)
    return scenario.run(bench)


def _run_paired(scenario: Paired, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
    if scenario.needs and shutil.which(scenario.needs) is None:
        reason = f"there is no program {scenario.needs}"
        return [Row(scenario.name, scenario.title, 0.0, "x", scenario.goal.text, True, "", "", reason)], {}
    ours: list[float] = []
    theirs: list[float] = []
    with scenario.set_up(bench) as sides:
        for number in range(bench.scale.rounds + 1):
            sides.prepare()
            our_value = sides.ours()
            sides.prepare()
            their_value = sides.theirs()
            if number:  # the first is the warm-up
                ours.append(our_value)
                theirs.append(their_value)
        figures = sides.figures()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    extra = "".join(f"; {name} {value:.3g}" for name, value in figures.items())
    both = f"{three_digits(statistics.median(ours))} against {three_digits(statistics.median(theirs))}"
    row = Row(
        scenario.name,
        scenario.title,
        ratio,
        "x",
        scenario.goal.text,
        scenario.goal.met(ratio),
        spread_of(ratios),
        f"{both} {scenario.unit}{extra}",
    )
    measured = {"unit": scenario.unit, "ours": ours, "theirs": theirs, "ratios": ratios, "figures": figures}
    return [row], measured


def _run_single(scenario: Single, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
    if scenario.repeat:
        scenario.measure(bench)  # the warm-up
    rounds = [scenario.measure(bench) for _ in range(bench.scale.rounds if scenario.repeat else 1)]
    rows: list[Row] = []
    for figure in scenario.figures:
        values = [measured[figure.name] for measured in rounds]
        value = statistics.median(values)
        title = f"{scenario.title}: {figure.name}"
        met = figure.goal.met(value)
        spread = spread_of(values) if len(values) > 1 else ""
        rows.append(Row(scenario.name, title, value, figure.unit, figure.goal.text, met, spread))
    goals = {figure.name for figure in scenario.figures}
    beside = {name: value for name, value in rounds[-1].items() if name not in goals}
    if beside and rows:
        detail = "; ".join(f"{name} {three_digits(value)}" for name, value in beside.items())
        rows[-1] = Row(**{**vars(rows[-1]), "detail": detail})
    return rows, {"rounds": rounds}


def spread_of(values: list[float]) -> str:
    """Format the range from the smallest to the largest."""
    return f"{three_digits(min(values))}..{three_digits(max(values))}"


def spread_values(text: str, value: float) -> tuple[float, float]:
    """Parse a row's spread, `1.2k..1.5k`; the value itself if there is none."""
    units = {"G": 1e9, "M": 1e6, "k": 1e3}
    ends = text.split("..")
    if len(ends) != 2:
        return value, value
    low, high = (float(end.rstrip("GMk")) * units.get(end[-1:], 1) for end in ends)
    return low, high


def three_digits(value: float) -> str:
    """Format a value with three significant digits."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
