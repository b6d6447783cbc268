"""S3 servers side by side: the same requests, in turn, round after round; ours against each peer.

Requests are signed and contents made before; connections are kept from round to round; the first round is a warm-up and
not counted.  A peer that is not here, does not answer as it should, or whose content does not hold takes no part
(`could not run`); ours must.  The figure of a `CpuRow` is the CPU time that all processes of a server took while the
requests of a round were answered, divided by their number; the result is the median of the rounds' ratios.  On a busy
machine CPU time is worth more than the clock, though it grows there too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from bench.measure import Bench, Goal, Row, spread_of, three_digits
from bench.s3_load import Load, Outcome, WrongAnswer
from bench.s3_requests import Request, Signer
from bench.s3_sides import Server, nginx, openlaked, ours
from bench.s3_stores import StoreUnavailable

OURS: Final = "ours"
CONNECTIONS: Final = 8
GIVEN_UP_S: Final = 120.0
"""A round that takes longer is not waited for."""
_FAILED: Final = (StoreUnavailable, WrongAnswer, OSError)

T = TypeVar("T")
Enter = Callable[[], AbstractContextManager[Callable[[], T]]]
"""Sets a side up, and gives what runs one round of it."""


def race(
    sides: Mapping[str, Enter[T]], rounds: int, renew: Callable[[], None] = lambda: None
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """What each side measured, by name and round; and why the others could not.

    The first side is ours.  Setting a side up includes its warm-up.  `renew` runs before each round.
    """
    results: dict[str, list[T]] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        runs: dict[str, Callable[[], T]] = {}
        renew()
        for name, enter in sides.items():
            with _tolerated(name, absent):
                runs[name] = stack.enter_context(enter())
                results[name] = []
        for _ in range(rounds):
            renew()
            for name, run in runs.items():
                if name not in absent:
                    with _tolerated(name, absent):
                        results[name].append(run())
    return {name: found for name, found in results.items() if name not in absent}, absent


@contextmanager
def _tolerated(name: str, absent: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except _FAILED as reason:
        if name == OURS:
            raise
        absent[name] = str(reason)


def servers(bench: Bench) -> dict[str, Callable[[], AbstractContextManager[Server]]]:
    """All that there are, by name, each in a folder of its own."""

    def folder(name: str) -> Path:
        path = bench.folder / name
        path.mkdir()
        return path

    return {
        OURS: lambda: ours(folder(OURS)),
        "openlaked": lambda: openlaked(folder("openlaked"), fetch=not bench.scale.quick),
        "nginx": lambda: nginx(folder("nginx")),
    }


@dataclass(frozen=True)
class Work:
    """What a row asks of each server.

    `fill` stores what will be read, once for each server.  `renew` makes new contents for the next round.  `requests`
    are those of one round for one server.  `check` compares what a server has with what it should: WrongAnswer.
    """

    fill: Callable[[Server], None]
    renew: Callable[[], None]
    requests: Callable[[Server, Signer], Sequence[Request]]
    check: Callable[[Server], None]


@dataclass(frozen=True)
class Figures:
    """Of one round: microseconds of server CPU an operation, operations and bytes a second, milliseconds to the last
    byte, and the share of one core that the generator took."""

    cpu_us: float
    per_s: float
    bytes_per_s: float
    p50_ms: float
    p99_ms: float
    generator: float


def once(server: Server, load: Load, work: Work) -> Figures:
    """One round on one server."""
    requests = work.requests(server, Signer(server.endpoint))
    before = server.cpu_s()
    outcome = load.run(requests, give_up_s=GIVEN_UP_S)
    used_s = server.cpu_s() - before
    if outcome.unfinished_s:
        raise WrongAnswer(f"{outcome.count} of {len(requests)} requests were answered in {GIVEN_UP_S:.0f} s")
    return figures_of(outcome, used_s)


def figures_of(outcome: Outcome, cpu_s: float) -> Figures:
    """What a run comes to."""
    return Figures(
        cpu_s / outcome.count * 1e6,
        outcome.count / outcome.elapsed_s,
        outcome.rate,
        outcome.percentile_s(0.5) * 1e3,
        outcome.percentile_s(0.99) * 1e3,
        outcome.own_cpu_s / outcome.elapsed_s,
    )


def median_of(rounds: Sequence[Figures]) -> Figures:
    """Of each figure."""
    names = asdict(rounds[0])
    return Figures(**{name: statistics.median(asdict(found)[name] for found in rounds) for name in names})


def told(name: str, rounds: Sequence[Figures]) -> str:
    """The medians, in words."""
    middle = median_of(rounds)
    return (
        f"{name}: {three_digits(middle.cpu_us)} us CPU, {three_digits(middle.per_s)}/s, p50 {middle.p50_ms:.3g} ms,"
        f" p99 {middle.p99_ms:.3g} ms, generator {middle.generator:.0%}"
    )


@dataclass(frozen=True)
class CpuRow:
    """One operation.  `goals`: by peer, ours / theirs; a peer without one is shown for comparison."""

    name: str
    title: str
    goals: Mapping[str, Goal | None]
    set_up: Callable[[Bench], AbstractContextManager[Work]]

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """A row for each peer, and all that was measured."""
        made = servers(bench)
        with self.set_up(bench) as work:
            sides = {name: partial(prepared, made[name], work) for name in (OURS, *self.goals)}
            results, absent = race(sides, bench.scale.rounds, work.renew)
        rows = [
            compared_row(self.name, self.title, goal, results, name)
            if name in results
            else absent_row(self.name, f"{self.title} / {name}", goal, absent[name])
            for name, goal in self.goals.items()
        ]
        rounds = {name: [asdict(figures) for figures in found] for name, found in results.items()}
        return rows, {"unit": "us of server CPU an operation", **rounds, "could_not_run": absent}


@contextmanager
def prepared(
    make: Callable[[], AbstractContextManager[Server]], work: Work
) -> Iterator[Callable[[], Figures]]:
    """A side that is filled, warm, and has been compared."""
    with make() as server:
        work.fill(server)
        with Load(server.endpoint, CONNECTIONS) as load:
            once(server, load, work)
            work.check(server)
            yield lambda: once(server, load, work)


def compared_row(
    scenario: str,
    title: str,
    goal: Goal | None,
    results: Mapping[str, Sequence[Figures]],
    name: str,
    base: str = OURS,
) -> Row:
    """CPU an operation of `base` / that of `name`."""
    mine, theirs = results[base], results[name]
    ratios = [a.cpu_us / b.cpu_us for a, b in zip(mine, theirs, strict=True)]
    ratio = statistics.median(ratios)
    return Row(
        scenario,
        f"{title} / {name}",
        ratio,
        "x",
        _text(goal),
        goal is None or goal.met(ratio),
        spread_of(ratios),
        f"{told(base, mine)} against {told(name, theirs)}",
    )


def absent_row(scenario: str, what: str, goal: Goal | None, reason: str) -> Row:
    """A row that could not be run."""
    return Row(scenario, what, 0, "", _text(goal), met=True, spread="", could_not_run=reason)


def _text(goal: Goal | None) -> str:
    return "-" if goal is None else goal.text


def same(server: Server, key: str, expected: bytes, got: bytes) -> None:
    """WrongAnswer unless an object is what was stored."""
    if got != expected:
        raise WrongAnswer(f"{server.name}: {key} is not what was stored: {len(got)} of {len(expected)} bytes")
