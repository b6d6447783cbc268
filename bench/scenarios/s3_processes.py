"""CPU per operation of two gateway processes behind one port against one: `lake gateway` before one engine.

Both gateways use the same engine and are measured in turn.  The figure is the CPU time of all the gateway's processes
and of the engine.  32 connections, so that the kernel gives some to each process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench.harness.measure import Bench, Goal, Row, Scenario, at_most
from bench.harness.s3_contest import Figures, Work, compared_row, once
from bench.harness.s3_load import Load
from bench.peers.s3_sides import Server, engine_alone, gateway
from bench.scenarios.s3_cpu import KIB, MIB, getting, putting

CONNECTIONS: Final = 32
GOAL: Final = at_most(1.1, "x")
REPEATED_GOAL: Final = at_most(1.05, "x")
"""Goal where the doors answer by themselves."""
ONE: Final = "one gateway process"
TWO: Final = "two gateway processes"


@dataclass(frozen=True)
class Processes:
    """One operation through both gateways."""

    name: str
    title: str
    set_up: Callable[[Bench], AbstractContextManager[Work]]
    goal: Goal = GOAL

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Run it; return one row: two processes / one."""
        with self.set_up(bench) as work, engine_alone(bench.folder / "ours") as engine, ExitStack() as stack:
            runs: dict[str, tuple[Server, Load]] = {}
            work.renew()
            for name, count in ((TWO, 2), (ONE, 1)):
                server = stack.enter_context(gateway(engine, processes=count))
                work.fill(server)
                load = stack.enter_context(Load(server.endpoint, CONNECTIONS))
                runs[name] = (server, load)
                once(server, load, work)
                work.check(server)
            results: dict[str, list[Figures]] = {name: [] for name in runs}
            for _ in range(bench.scale.rounds):
                for name, (server, load) in runs.items():
                    work.renew()
                    results[name].append(once(server, load, work))
        row = compared_row(self.name, self.title, self.goal, results, ONE, base=TWO)
        return [row], {name: [asdict(found) for found in rounds] for name, rounds in results.items()}


def _getting(size: int, keys: int, requests: int) -> Callable[[Bench], AbstractContextManager[Work]]:
    return lambda bench: getting(size, keys, bench.scale.pick(requests, 2 * CONNECTIONS))


def _putting(size: int, requests: int) -> Callable[[Bench], AbstractContextManager[Work]]:
    return lambda bench: putting(size, bench.scale.pick(requests, 2 * CONNECTIONS), signed=True)


_WHAT: Final = "S3 CPU of gateway and engine"
SCENARIOS: Final[tuple[Scenario, ...]] = (
    Processes("s3-processes-get-4k", f"{_WHAT}, GET of 4 KiB", _getting(4 * KIB, 100, 6000), REPEATED_GOAL),
    Processes("s3-processes-get-1m", f"{_WHAT}, GET of 1 MiB", _getting(MIB, 16, 400)),
    Processes("s3-processes-put-4k", f"{_WHAT}, PUT of 4 KiB", _putting(4 * KIB, 1500)),
)
