"""A scenario of several sides, with all kinds of figures for each: `Sampled`.

A side does a round's work and reports its amount (`Run`); the framework adds its costs (`bench.harness.accounting`).
All sides run in turn, round after round, each round beginning with another one, after a warm-up of each that is not
counted.  A figure's result is the median of the rounds, a comparison's the median of the rounds' ratios; spreads are
from the smallest to the largest.

The first side is ours: its failure fails the scenario.  Another side that fails is removed, with its earlier figures;
the result lists it as one that could not run, with its reason.

If a goal is missed, our processes are sampled in some more rounds (`bench.harness.profile`), for the report.

Each scenario states in `generator` why the load generator does not limit a side: in words, or as the name of a side
that serves nothing (a null server), whose rate is then shown beside ours.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bench.harness.accounting import Device, Spent, account
from bench.harness.contest import CouldNotRun
from bench.harness.measure import Bench, Goal, Row, spread_of, three_digits
from bench.harness.profile import NoProfile, profiled
from bench.peers.packages import PeerUnavailable
from lakefs.histogram import Histogram

OURS: Final = "ours"
NULL: Final = "null server"
"""The side that does nothing: it is shown, and not compared with."""


@dataclass(frozen=True)
class Unit:
    """A figure's title and unit as documents have them, and its better direction."""

    title: str
    unit: str
    higher_is_better: bool


ALONE: Final = "what is timed is the program itself, on all sides: there is no generator beside it"
"""The `generator` text of a scenario without a generator."""

FIGURES: Final[Mapping[str, Unit]] = {
    "operations_per_s": Unit("operations/s", "op/s", higher_is_better=True),
    "bytes_per_s": Unit("bytes/s", "B/s", higher_is_better=True),
    "p50_us": Unit("p50", "us", higher_is_better=False),
    "p99_us": Unit("p99", "us", higher_is_better=False),
    "p999_us": Unit("p99.9", "us", higher_is_better=False),
    "server_cpu_us": Unit("server CPU/op", "us", higher_is_better=False),
    "client_cpu_us": Unit("client CPU/op", "us", higher_is_better=False),
    "device_bytes_per_byte": Unit("device bytes/byte", "", higher_is_better=False),
    "private_bytes": Unit("RssAnon", "B", higher_is_better=False),
    "shared_bytes": Unit("RssShmem", "B", higher_is_better=False),
}


@dataclass(frozen=True)
class Run:
    """The work of a side in one round.

    `moved_bytes`: content that was read or written.  `elapsed_s`: if the side times itself; 0: the framework's clock,
    around the whole call.  `stored_bytes`: content that was new to the side and is stored now.  `more`: further
    figures.
    """

    operations: int
    moved_bytes: int = 0
    latencies: Histogram | None = None
    elapsed_s: float = 0.0
    stored_bytes: int = 0
    more: Mapping[str, float] = field(default_factory=dict)


def no_processes() -> Sequence[int]:
    """Return no processes: for a side without servers, or without generators beside this process."""
    return ()


@dataclass(frozen=True)
class Side:
    """One side: `run` does a round; `prepare` runs before it, uncounted.

    `servers`: the processes whose CPU and memory are the server's; `clients`: generators other than this process and
    children that it waits for.
    """

    run: Callable[[], Run]
    prepare: Callable[[], None] = lambda: None
    servers: Callable[[], Sequence[int]] = no_processes
    clients: Callable[[], Sequence[int]] = no_processes


@dataclass(frozen=True)
class Entrant:
    """A side by name; `enter` sets it up, or raises CouldNotRun with the plain reason."""

    name: str
    enter: Callable[[], AbstractContextManager[Side]]


@dataclass(frozen=True)
class Target:
    """A goal: for the ratio ours / `against` of a figure, or, without `against`, for our figure itself.

    `side`: another of our sides that the goal is for.
    """

    figure: str
    goal: Goal
    against: str = ""
    side: str = ""


@dataclass(frozen=True)
class Sampled:
    """A scenario; `set_up` returns the sides, ours first.  `figure`: the one that sides are compared in.

    `targets`: goals; a side without one is shown beside ours.  `generator`: how the load was checked not to be the
    limit.  `stores`: a round writes, and the bytes that the disk took are counted.  `expected_s`: of a whole run, for
    the plan.  `disk_bytes`: free space that a whole run needs, if it is much.
    """

    name: str
    title: str
    figure: str
    set_up: Callable[[Bench], AbstractContextManager[Sequence[Entrant]]]
    generator: str
    expected_s: float
    targets: Sequence[Target] = ()
    stores: bool = False
    disk_bytes: int = 0

    def lack_of_disk(self, bench: Bench) -> str:
        """Return the message if there is less free space than it needs; else an empty text."""
        free = shutil.disk_usage(bench.folder).free
        if bench.scale.quick or free >= self.disk_bytes:
            return ""
        return f"{self.disk_bytes / 1e9:.0f} GB of free disk are needed, and {free / 1e9:.0f} GB are free"

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Return a row for each goal and each side without one; and all measured values.

        One row if there is too little disk space, or `set_up` raises CouldNotRun: this machine cannot run it.
        """
        if lack := self.lack_of_disk(bench):
            return [absent_row(self, self.title, lack)], {}
        device = Device(bench.folder) if self.stores else None
        with ExitStack() as stack:
            try:
                entrants = stack.enter_context(self.set_up(bench))
            except CouldNotRun as reason:
                return [absent_row(self, self.title, str(reason))], {}
            taken = Taken(stack, device)
            for number, entrant in enumerate(entrants):
                taken.enter(entrant, must=not number)
            for number in range(bench.scale.rounds):
                taken.round(number)
            rows, measured = rows_of(self, taken), measured_of(self, taken)
            if bench.scale.profile and any(not row.met for row in rows):
                measured |= taken.profile()
        return rows, measured


class Taken:
    """The sides that take part, and the figures so far."""

    def __init__(self, stack: ExitStack, device: Device | None) -> None:
        self.rounds: dict[str, list[dict[str, float]]] = {}
        """Figures of each round, by side; the first is ours."""
        self.latencies: dict[str, Histogram] = {}
        """Latencies of all rounds together, by side."""
        self.could_not_run: dict[str, str] = {}
        self._sides: dict[str, Side] = {}
        self._stack = stack
        self._device = device
        self._ours = ""

    def enter(self, entrant: Entrant, *, must: bool) -> None:
        """Set a side up and warm it up; without `must`, a side that cannot is noted and left out."""
        if must:
            self._ours = entrant.name
        with self._tolerated(entrant.name), ExitStack() as trial:
            side = trial.enter_context(entrant.enter())
            side.prepare()
            side.run()
            self._stack.enter_context(trial.pop_all())
            self._sides[entrant.name] = side
            self.rounds[entrant.name] = []
            self.latencies[entrant.name] = Histogram()

    def round(self, number: int) -> None:
        """Run every side once, beginning with another one each time."""
        names = list(self._sides)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with self._tolerated(name):
                self._once(name, self._sides[name])

    def profile(self) -> dict[str, Any]:
        """Return a profile of our processes in more rounds, which do not count; or the reason why there is none."""
        side = self._sides[self._ours]
        roles = {"server": side.servers(), "client": side.clients() or [os.getpid()]}

        def work() -> None:
            side.prepare()
            side.run()

        try:
            return {"profile": profiled(roles, work, fetch=True)}
        except (NoProfile, PeerUnavailable, OSError, subprocess.SubprocessError) as reason:
            return {"no_profile": str(reason)}

    def _once(self, name: str, side: Side) -> None:
        done: list[Run] = []
        side.prepare()
        spent = account(
            lambda: done.append(side.run()), servers=side.servers, clients=side.clients, device=self._device
        )
        [run] = done
        figures = figures_of(run, spent, served=bool(side.servers()))
        if run.latencies is not None:
            self.latencies[name].add(run.latencies)
        self.rounds[name].append(figures)

    @contextmanager
    def _tolerated(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as reason:
            if name == self._ours:
                raise
            self.could_not_run[name] = str(reason) or type(reason).__name__
            for found in (self._sides, self.rounds, self.latencies):
                found.pop(name, None)


def figures_of(run: Run, spent: Spent, *, served: bool) -> dict[str, float]:
    """Return all figures that apply to one round, by name."""
    count, elapsed_s = max(1, run.operations), run.elapsed_s or spent.elapsed_s
    figures = {"operations_per_s": run.operations / elapsed_s}
    if run.moved_bytes:
        figures["bytes_per_s"] = run.moved_bytes / elapsed_s
    if run.latencies is not None and run.latencies.count:
        for name, share in (("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999)):
            figures[name] = run.latencies.percentile_ns(share) / 1e3
    figures["client_cpu_us"] = spent.client_cpu_s / count * 1e6
    if served:
        figures["server_cpu_us"] = spent.server_cpu_s / count * 1e6
        figures["private_bytes"] = spent.memory.private_bytes
        figures["shared_bytes"] = spent.memory.shared_bytes
    if run.stored_bytes and spent.device_bytes is not None:
        figures["device_bytes_per_byte"] = spent.device_bytes / run.stored_bytes
    return figures | dict(run.more)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure that every round has."""
    names = [name for name in rounds[0] if all(name in found for found in rounds)]
    return {name: statistics.median(found[name] for found in rounds) for name in names}


def told(figures: Mapping[str, float]) -> str:
    """Format figures in words."""
    parts = []
    for name, value in figures.items():
        known = FIGURES.get(name)
        title, unit = (known.title, known.unit) if known else (name, "")
        parts.append(f"{title} {three_digits(value)} {unit}".rstrip())
    return ", ".join(parts)


def rows_of(scenario: Sampled, taken: Taken) -> list[Row]:
    """Return rows: goals, then sides without a goal except null servers, then sides that could not run."""
    ours = next(iter(taken.rounds))
    rows = [_row(scenario, taken, ours, target) for target in scenario.targets if _ran(taken, target)]
    compared = {NULL, scenario.generator, *(target.against for target in scenario.targets if not target.side)}
    rows += [
        _row(scenario, taken, ours, Target(scenario.figure, Goal("-", 0, at_least=True), name))
        for name in taken.rounds
        if name != ours and name not in compared
    ]
    rows += [
        Row(scenario.name, f"{scenario.title} / {name}", 0, "", "-", met=True, spread="", could_not_run=reason)
        for name, reason in taken.could_not_run.items()
    ]
    if not rows:  # ours alone, without a goal
        rows = [_row(scenario, taken, ours, Target(scenario.figure, Goal("-", 0, at_least=True)))]
    return rows


def absent_row(scenario: Sampled, what: str, reason: str) -> Row:
    """Return a row that could not be run, with its reason."""
    goals = [target.goal.text for target in scenario.targets if what.endswith(f" / {target.against}")]
    return Row(scenario.name, what, 0, "", goals[0] if goals else "-", met=True, spread="", could_not_run=reason)


def _ran(taken: Taken, target: Target) -> bool:
    return all(not name or name in taken.rounds for name in (target.against, target.side))


def _row(scenario: Sampled, taken: Taken, ours: str, target: Target) -> Row:
    figure = FIGURES.get(target.figure, Unit(target.figure, "", higher_is_better=True))
    side = target.side or ours
    mine = [found[target.figure] for found in taken.rounds[side]]
    detail = f"{side}: {told(medians(taken.rounds[side]))}"
    title = f"{scenario.title}, {side}" if target.side else scenario.title
    what, unit, values = f"{title}: {figure.title}", figure.unit, mine
    if target.against:
        theirs = [found[target.figure] for found in taken.rounds[target.against]]
        values = [a / b if b else math.inf for a, b in zip(mine, theirs, strict=True)]
        what, unit = f"{title}, {figure.title} / {target.against}", "x"
        detail += f"; {target.against}: {told(medians(taken.rounds[target.against]))}"
    value = statistics.median(values)
    met = target.goal.text == "-" or target.goal.met(value)
    return Row(scenario.name, what, value, unit, target.goal.text, met, spread_of(values), detail)


def measured_of(scenario: Sampled, taken: Taken) -> dict[str, Any]:
    """Return all measured values, JSON-able."""
    sides = {
        name: {"rounds": rounds, "median": medians(rounds), "latencies_ns": list(taken.latencies[name].buckets())}
        for name, rounds in taken.rounds.items()
    }
    return {
        "kind": "sampled",
        "title": scenario.title,
        "figure": scenario.figure,
        "ours": next(iter(taken.rounds)),
        "generator": _generator(scenario, taken),
        "targets": [asdict(target) for target in scenario.targets],
        "sides": sides,
        "could_not_run": taken.could_not_run,
        "table": {"title": scenario.title, "lines": table_of(taken)},
    }


def _generator(scenario: Sampled, taken: Taken) -> str:
    """Return the generator check in words; for a null server, with its rate and ours."""
    if scenario.generator not in taken.rounds:
        return scenario.generator
    empty = medians(taken.rounds[scenario.generator])["operations_per_s"]
    ours = medians(next(iter(taken.rounds.values())))["operations_per_s"]
    return (
        f"against {scenario.generator}, which does nothing, the same generator reaches {three_digits(empty)}/s,"
        f" {empty / ours:.2g} x what ours is asked for"
    )


def table_of(taken: Taken) -> list[list[str]]:
    """Return a table with a line for each side, and the figures that any side has."""
    middles = {name: medians(rounds) for name, rounds in taken.rounds.items()}
    names = [name for name in FIGURES if any(name in found for found in middles.values())]
    names += sorted({name for found in middles.values() for name in found} - set(FIGURES))
    titles = [_titled(name) for name in names]
    lines = [["side", *titles]]
    for side, found in middles.items():
        lines.append([side, *(three_digits(found[name]) if name in found else "" for name in names)])
    return lines


def _titled(name: str) -> str:
    unit = FIGURES.get(name)
    return name if unit is None else f"{unit.title}{', us' if unit.unit == 'us' else ''}"


def one_by_one(calls: Iterable[Callable[[], object]], *, bytes_each: int = 0, stored: bool = False) -> Run:
    """Make calls one after the other, each timed; `stored`: their bytes are new content that is now stored."""
    clock = time.perf_counter_ns
    taken_ns: list[int] = []
    begin = clock()
    for call in calls:
        before = clock()
        call()
        taken_ns.append(clock() - before)
    elapsed_s = (clock() - begin) / 1e9
    latencies = Histogram()
    for value_ns in taken_ns:
        latencies.record(value_ns)
    moved = bytes_each * len(taken_ns)
    return Run(len(taken_ns), moved, latencies, elapsed_s, moved if stored else 0)


__all__ = [
    "FIGURES", "OURS", "CouldNotRun", "Entrant", "Run", "Sampled", "Side", "Target", "one_by_one",
]  # fmt: skip
