"""Reads by names that the client has read before: answered from its own memory, and by the engine each time.

One engine, 64 objects of 4 KiB, one blocking client on each side.  `ours` checks by BLAKE3, as clients do by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Final

from bench.harness.content import payload
from bench.harness.measure import Bench, Scenario, at_most
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target, one_by_one
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.content.verify import Check

SIZE: Final = 4096
NAMES: Final = [f"bench/k{number:02}" for number in range(64)]
CRC32C: Final = "ours, CRC32C"
ASKING: Final = "ours, asking the engine each time"
EACH: Final = "us a name"
_Rounds = Callable[[Lake, int], Run]


@contextmanager
def _sides(rounds: _Rounds, full: int, quick: int, bench: Bench) -> Iterator[Sequence[Entrant]]:
    count = bench.scale.pick(full, quick)
    with EngineProcess(bench.folder) as engine:
        with engine.connect() as lake:
            lake.put_many([(name, payload(SIZE)) for name in NAMES])
        side = partial(_side, engine, rounds, count)
        yield [
            Entrant(OURS, partial(side, Check.BLAKE3)),
            Entrant(CRC32C, partial(side, Check.CRC32C)),
            Entrant(ASKING, partial(side, Check.BLAKE3, repeats=False)),
        ]


@contextmanager
def _side(engine: EngineProcess, rounds: _Rounds, count: int, check: Check, *, repeats: bool = True) -> Iterator[Side]:
    with connect(engine.address, check=check, repeats=repeats) as lake:
        for _ in range(3):
            lake.get_many(NAMES)
        before = lake.known.answered
        lake.get_many(NAMES)
        if repeats != (lake.known.answered == before + len(NAMES)):
            raise AssertionError(f"{lake.known.answered - before} of {len(NAMES)} names were answered from memory")
        yield Side(partial(rounds, lake, count), servers=lambda: [engine.pid])


def _one(lake: Lake, count: int) -> Run:
    return one_by_one((partial(lake.get, name) for name in islice(cycle(NAMES), count)), bytes_each=SIZE)


def _many(lake: Lake, count: int) -> Run:
    run = one_by_one((partial(lake.get_many, NAMES) for _ in range(count)), bytes_each=SIZE * len(NAMES))
    assert run.latencies is not None
    each = run.latencies.percentile_ns(0.5) / 1000 / len(NAMES)
    return Run(run.operations, run.moved_bytes, run.latencies, run.elapsed_s, more={EACH: each})


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "known-get-4k",
        "get of 4 KiB by a known name, hot, one blocking client",
        "p50_us",
        partial(_sides, _one, 20_000, 200),
        generator=ALONE,
        expected_s=20,
        targets=(Target("p50_us", at_most(15, " us")),),
    ),
    Sampled(
        "known-get-many-4k",
        f"get_many of {len(NAMES)} known names of 4 KiB, hot, one blocking client",
        "p50_us",
        partial(_sides, _many, 400, 5),
        generator=ALONE,
        expected_s=20,
        targets=(Target(EACH, at_most(4, " us")),),
    ),
)
