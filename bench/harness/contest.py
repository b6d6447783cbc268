"""A scenario of more than two sides: ours, and contenders that may be unable to do the work.

All sides run in turn, round after round, after a warm-up that is not counted.  Contenders of one tool are tried in
order until one passes the warm-up: only that one takes part.  A contender's inability is part of the result: it has
its own row, `could not run: REASON`, with the plain reason and nothing more.  A failure of our own side is a failure
of the scenario.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.harness.measure import Bench, Goal, Row, at_least, at_most, spread_of, three_digits


class CouldNotRun(Exception):
    """A contender cannot do the work; the text is the reason, in plain words."""


Run = Callable[[], float]
"""Does the work once; returns the figure, in the contest's unit."""


@dataclass(frozen=True)
class Contender:
    """A side: `enter` sets it up and returns what runs a round.  Of contenders with the same `tool`, one takes
    part."""

    name: str
    tool: str
    enter: Callable[[], AbstractContextManager[Run]]


@dataclass(frozen=True)
class Contest:
    """A contest; `set_up` returns our side and the others.  `once`: the figure does not change from run to run."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    set_up: Callable[[Bench], AbstractContextManager[tuple[Contender, Sequence[Contender]]]]
    once: bool = False

    @property
    def goal(self) -> Goal:
        """The goal: to be ahead."""
        return at_least(1, "x") if self.higher_is_better else at_most(1, "x")

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Run it; return a row for each contender, and all measured values."""
        rounds = 1 if self.once else bench.scale.rounds
        with self.set_up(bench) as (ours, others), ExitStack() as stack:
            race = _Race(stack, warm_up=not self.once)
            race.enter_ours(ours)
            for contender in others:
                race.enter(contender)
            for _ in range(rounds):
                race.round()
        rows = [self._row(race, name) for name in race.theirs]
        rows += [self._absent(name, reason) for name, reason in race.could_not_run.items()]
        measured = {
            "unit": self.unit, "ours": race.ours, "theirs": race.theirs, "could_not_run": race.could_not_run
        }  # fmt: skip
        return rows, measured

    def _row(self, race: _Race, name: str) -> Row:
        theirs = race.theirs[name]
        ratios = [mine / other for mine, other in zip(race.ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        both = f"{three_digits(statistics.median(race.ours))} against {three_digits(statistics.median(theirs))}"
        return Row(
            self.name,
            f"{self.title} / {name}",
            ratio,
            "x",
            self.goal.text,
            self.goal.met(ratio),
            spread_of(ratios) if len(ratios) > 1 else "",
            f"{both} {self.unit}",
        )

    def _absent(self, name: str, reason: str) -> Row:
        return Row(
            self.name, f"{self.title} / {name}", 0, "", self.goal.text, met=True, spread="", could_not_run=reason
        )


@dataclass
class _Race:
    """The sides that take part, and the figures so far."""

    stack: ExitStack
    warm_up: bool
    ours: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    could_not_run: dict[str, str] = field(default_factory=dict)
    _run_ours: Run = field(default=lambda: 0.0)
    _runs: dict[str, Run] = field(default_factory=dict)
    _tools: set[str] = field(default_factory=set)

    def enter_ours(self, contender: Contender) -> None:
        """Set up and warm up our side; an error ends the scenario."""
        self._run_ours = self.stack.enter_context(contender.enter())
        if self.warm_up:
            self._run_ours()

    def enter(self, contender: Contender) -> None:
        """Set up and warm up a contender, unless another of its tool takes part; note the reason if it cannot."""
        if contender.tool in self._tools:
            return
        try:
            with ExitStack() as trial:
                run = trial.enter_context(contender.enter())
                if self.warm_up:
                    run()
                self.stack.enter_context(trial.pop_all())
        except CouldNotRun as reason:
            self.could_not_run[contender.name] = str(reason)
            return
        self._tools.add(contender.tool)
        self._runs[contender.name] = run
        self.theirs[contender.name] = []

    def round(self) -> None:
        """Run every side once; a side that fails is removed, with its earlier figures."""
        self.ours.append(self._run_ours())
        for name, run in list(self._runs.items()):
            try:
                self.theirs[name].append(run())
            except CouldNotRun as reason:
                self.could_not_run[name] = str(reason)
                del self._runs[name], self.theirs[name]
