"""Server CPU per operation of S3 servers, side by side: the same requests, in turn, round after round.

The figure is the CPU time that all processes of a server took while the requests of a round were answered, divided by
their number.  Requests are signed and contents made before; connections are kept from round to round; the first
round is a warm-up and not counted.  After the warm-up what is served, and what was stored, is read back and compared: a
server whose answers do not hold takes no part (`could not run`), ours must.  The result is the median of the rounds'
ratios; CPU time is worth more than wall-clock time on a busy machine, though it grows there too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.contest import CouldNotRun
from bench.measure import Bench, Goal, Row, spread_of, three_digits
from bench.s3_load import Load, Outcome, WrongAnswer
from bench.s3_requests import Request, Signer
from bench.s3_sides import Server, nginx, openlaked, ours
from bench.s3_stores import StoreUnavailable

CONNECTIONS: Final = 8
GIVEN_UP_S: Final = 120.0
"""A round that takes longer is not waited for."""


@dataclass(frozen=True)
class Work:
    """What a row asks of each server.

    `fill` stores what will be read, once for each server.  `requests` makes those of one round for one server.
    `check` compares what a server has stored or serves with what it should: WrongAnswer.
    """

    fill: Callable[[Server], None]
    renew: Callable[[], None]
    requests: Callable[[Server, Signer], Sequence[Request]]
    check: Callable[[Server], None]


@dataclass(frozen=True)
class CpuRow:
    """One operation.  `goals`: by peer, ours / theirs; a peer without one is shown for comparison."""

    name: str
    title: str
    goals: Mapping[str, Goal | None]
    set_up: Callable[[Bench], AbstractContextManager[Work]]

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """A row for each peer, and all that was measured."""
        with self.set_up(bench) as work, ExitStack() as stack:
            sides, absent = _enter(stack, bench, work, tuple(self.goals))
            for _ in range(bench.scale.rounds):
                work.renew()
                for side in sides:
                    side.round(work)
            rows = [self._row(sides[0], side) for side in sides[1:]]
        rows += [self._absent(name, reason) for name, reason in absent.items()]
        measured = {
            "unit": "us of server CPU per operation",
            **{side.server.name: [vars(figures) for figures in side.rounds] for side in sides},
            "could_not_run": absent,
        }
        return rows, measured

    def _row(self, mine: Side, other: Side) -> Row:
        ratios = [a.cpu_us / b.cpu_us for a, b in zip(mine.rounds, other.rounds, strict=True)]
        ratio = statistics.median(ratios)
        goal = self.goals[other.server.name]
        return Row(
            self.name,
            f"{self.title} / {other.server.name}",
            ratio,
            "x",
            goal.text if goal else "-",
            goal is None or goal.met(ratio),
            spread_of(ratios),
            f"{mine.told()} against {other.told()}",
        )

    def _absent(self, name: str, reason: str) -> Row:
        goal = self.goals[name]
        text = goal.text if goal else "-"
        return Row(
            self.name, f"{self.title} / {name}", 0, "", text, met=True, spread="", could_not_run=reason
        )


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


@dataclass
class Side:
    """A server, its connections, and what was measured so far."""

    server: Server
    load: Load
    rounds: list[Figures] = field(default_factory=list)

    def once(self, work: Work) -> Figures:
        """Do the work of a round."""
        requests = work.requests(self.server, Signer(self.server.endpoint))
        before = self.server.cpu_s()
        outcome = self.load.run(requests, give_up_s=GIVEN_UP_S)
        used = self.server.cpu_s() - before
        if outcome.unfinished_s:
            raise WrongAnswer(
                f"{outcome.count} of {len(requests)} requests were answered in {GIVEN_UP_S:.0f} s"
            )
        return figures_of(outcome, used)

    def round(self, work: Work) -> None:
        """Do it, counted."""
        self.rounds.append(self.once(work))

    def told(self) -> str:
        """The medians, in words."""

        def median(name: str) -> float:
            return statistics.median(float(getattr(figures, name)) for figures in self.rounds)

        return (
            f"{self.server.name}: {three_digits(median('cpu_us'))} us CPU, {three_digits(median('per_s'))}/s,"
            f" p50 {median('p50_ms'):.3g} ms, p99 {median('p99_ms'):.3g} ms, generator {median('generator'):.0%}"
        )


def figures_of(outcome: Outcome, cpu_s: float) -> Figures:
    """What a run comes to."""
    return Figures(
        cpu_s / outcome.count * 1e6,
        outcome.count / outcome.elapsed_s,
        outcome.moved_bytes / outcome.elapsed_s,
        outcome.percentile_s(0.5) * 1e3,
        outcome.percentile_s(0.99) * 1e3,
        outcome.own_cpu_s / outcome.elapsed_s,
    )


def servers(bench: Bench) -> dict[str, Callable[[], AbstractContextManager[Server]]]:
    """All that there are, by name, each in a folder of its own."""

    def folder(name: str) -> Path:
        path = bench.folder / name
        path.mkdir()
        return path

    return {
        "ours": lambda: ours(folder("ours")),
        "openlaked": lambda: openlaked(folder("openlaked"), fetch=not bench.scale.quick),
        "nginx": lambda: nginx(folder("nginx")),
    }


@contextmanager
def _prepared(make: Callable[[], AbstractContextManager[Server]], work: Work) -> Iterator[Side]:
    """A side that is filled, warm, and has been compared."""
    with make() as server:
        work.fill(server)
        with Load(server.endpoint, CONNECTIONS) as load:
            side = Side(server, load)
            side.once(work)
            work.check(server)
            yield side


def _enter(
    stack: ExitStack, bench: Bench, work: Work, peers: tuple[str, ...]
) -> tuple[list[Side], dict[str, str]]:
    """Ours and the peers that can; why the others cannot."""
    made = servers(bench)
    work.renew()
    sides = [stack.enter_context(_prepared(made["ours"], work))]
    absent: dict[str, str] = {}
    for name in peers:
        try:
            sides.append(stack.enter_context(_prepared(made[name], work)))
        except (CouldNotRun, StoreUnavailable, WrongAnswer, OSError) as reason:
            absent[name] = str(reason)
    return sides, absent


def same(server: Server, key: str, expected: bytes, got: bytes) -> None:
    """WrongAnswer unless an object is what was stored."""
    if got != expected:
        raise WrongAnswer(f"{server.name}: {key} is not what was stored: {len(got)} of {len(expected)} bytes")
