"""S3 servers side by side: the same requests, in turn, round after round; ours against each peer.

Requests are signed and contents made before each round; connections stay open from round to round; the first round is
a warm-up and not counted.  A peer that is not installed, answers wrongly, or has wrong content takes no part (`could
not run`); ours must.  The compared figure is the CPU time of all processes of a server while it answers a round's
requests, divided by their number.  On a busy machine CPU time is more reliable than the clock, though it grows there
too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from bench.harness.measure import Bench, Goal, Row, spread_of, three_digits
from bench.harness.s3_load import Load, Outcome, WrongAnswer
from bench.harness.s3_requests import Request, Signer
from bench.harness.sampled import Entrant, Run, Sampled, Side, Target
from bench.peers.s3_sides import Server, nginx, openlaked, ours
from bench.peers.s3_stores import StoreUnavailable
from lakefs.histogram import Histogram

OURS: Final = "ours"
CONNECTIONS: Final = 8
GENERATOR: Final = (
    "the server's own CPU time counts, whatever the generator's speed; its share of a core stands beside it"
)
GIVEN_UP_S: Final = 120.0
"""A round that takes longer is abandoned."""
_FAILED: Final = (StoreUnavailable, WrongAnswer, OSError)

T = TypeVar("T")
Enter = Callable[[], AbstractContextManager[Callable[[], T]]]
"""Sets a side up, and returns what runs one round of it."""


def race(
    sides: Mapping[str, Enter[T]], rounds: int, renew: Callable[[], None] = lambda: None
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Return the results of each side, by name and round; and the reasons of the sides that could not run.

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
    """Return all servers by name, each in its own folder."""

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
    """The work of a row, for each server.

    `fill` stores what will be read, once for each server.  `renew` makes new contents for the next round.  `requests`
    returns those of one round for one server.  `check` compares a server's content with what it should be:
    WrongAnswer.
    """

    fill: Callable[[Server], None]
    renew: Callable[[], None]
    requests: Callable[[Server, Signer], Sequence[Request]]
    check: Callable[[Server], None]


@dataclass(frozen=True)
class Figures:
    """Figures of one round: microseconds of server CPU per operation, operations and bytes per second, milliseconds
    to the last byte, and the share of one core that the generator took."""

    cpu_us: float
    per_s: float
    bytes_per_s: float
    p50_ms: float
    p99_ms: float
    generator: float


def once(server: Server, load: Load, work: Work) -> Figures:
    """Run one round on one server."""
    requests = work.requests(server, Signer(server.endpoint))
    before = server.cpu_s()
    outcome = load.run(requests, give_up_s=GIVEN_UP_S)
    used_s = server.cpu_s() - before
    if outcome.unfinished_s:
        raise WrongAnswer(f"{outcome.count} of {len(requests)} requests were answered in {GIVEN_UP_S:.0f} s")
    return figures_of(outcome, used_s)


def figures_of(outcome: Outcome, cpu_s: float) -> Figures:
    """Return the figures of a run."""
    return Figures(
        cpu_s / outcome.count * 1e6,
        outcome.count / outcome.elapsed_s,
        outcome.rate,
        outcome.percentile_s(0.5) * 1e3,
        outcome.percentile_s(0.99) * 1e3,
        outcome.own_cpu_s / outcome.elapsed_s,
    )


def median_of(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    names = asdict(rounds[0])
    return Figures(**{name: statistics.median(asdict(found)[name] for found in rounds) for name in names})


def told(name: str, rounds: Sequence[Figures]) -> str:
    """Format the medians in words."""
    middle = median_of(rounds)
    return (
        f"{name}: {three_digits(middle.cpu_us)} us CPU, {three_digits(middle.per_s)}/s, p50 {middle.p50_ms:.3g} ms,"
        f" p99 {middle.p99_ms:.3g} ms, generator {middle.generator:.0%}"
    )


def contest_of(
    name: str,
    title: str,
    goals: Mapping[str, Goal | None],
    set_up: Callable[[Bench], AbstractContextManager[Work]],
    *,
    expected_s: float,
    stores: bool,
    connections: int = CONNECTIONS,
) -> Sampled:
    """Return a scenario of one operation on ours and these peers; a peer without a goal is shown for comparison.

    The figure is the CPU time that all processes of a server take per request, on that many connections.
    """

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
        made = servers(bench)
        with set_up(bench) as work:
            yield [Entrant(who, partial(_side, made[who], work, connections)) for who in (OURS, *goals)]

    targets = [Target("server_cpu_us", goal, who) for who, goal in goals.items() if goal is not None]
    return Sampled(
        name, title, "server_cpu_us", sides, GENERATOR, expected_s=expected_s, targets=targets, stores=stores
    )


@contextmanager
def _side(make: Callable[[], AbstractContextManager[Server]], work: Work, connections: int) -> Iterator[Side]:
    """Context manager: a filled server; the result of its first round is compared with what it should be."""
    requests: list[Request] = []
    unchecked = [work.check]
    with make() as server, Load(server.endpoint, connections) as load:
        work.fill(server)

        def prepare() -> None:
            work.renew()
            requests[:] = work.requests(server, Signer(server.endpoint))

        def run() -> Run:
            outcome = load.run(requests, give_up_s=GIVEN_UP_S)
            if outcome.unfinished_s:
                raise WrongAnswer(f"{outcome.count} of {len(requests)} requests were answered in {GIVEN_UP_S:.0f} s")
            if unchecked:
                unchecked.pop()(server)
            return Run(
                outcome.count,
                outcome.moved_bytes,
                Histogram.of_seconds(outcome.latencies_s),
                outcome.elapsed_s,
                stored_bytes=sum(len(request.body) for request in requests),
                more={"generator, share of a core": outcome.own_cpu_s / outcome.elapsed_s},
            )

        yield Side(run, prepare, server.pids)


def compared_row(
    scenario: str, title: str, goal: Goal | None, results: Mapping[str, Sequence[Figures]], name: str, base: str = OURS
) -> Row:
    """Return the row of CPU per operation, `base` / `name`."""
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
    """Return a row that could not be run."""
    return Row(scenario, what, 0, "", _text(goal), met=True, spread="", could_not_run=reason)


def _text(goal: Goal | None) -> str:
    return "-" if goal is None else goal.text


def same(server: Server, key: str, expected: bytes, got: bytes) -> None:
    """Raise WrongAnswer unless an object is what was stored."""
    if got != expected:
        raise WrongAnswer(f"{server.name}: {key} is not what was stored: {len(got)} of {len(expected)} bytes")
