"""Single requests of the native protocol over the Unix socket: locating 64 chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from bench.harness.content import payload
from bench.harness.measure import Bench, Scenario, at_most
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Sampled, Side, Target, one_by_one
from lakefs.client.facade import driver_of
from lakefs.steps.steps import send
from lakefs.wire.messages import CloseLeases, Locate

CHUNKS: Final = 64
CHUNK_BYTES: Final = 64 << 10
EMPTY: Final = "empty round trip"


@contextmanager
def locate_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: a locate of 64 chunks, as this client's reads send it, and an empty request, on one engine."""
    count = bench.scale.pick(3000, 50)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        names = [f"bench/c{number}" for number in range(CHUNKS)]
        lake.put_many([(name, payload(CHUNK_BYTES)) for name in names])
        chunks = [bytes(lake.stat(name).blob) for name in names]
        driver = driver_of(lake)
        media = driver.steps.access(None).media
        yield [
            Entrant(OURS, partial(_asking, engine, count, lambda: driver.run(send(Locate(chunks, media))))),
            Entrant(EMPTY, partial(_asking, engine, count, lambda: driver.run(send(CloseLeases([]))))),
        ]


@contextmanager
def _asking(engine: EngineProcess, count: int, ask: Callable[[], object]) -> Iterator[Side]:
    yield Side(lambda: one_by_one(itertools.repeat(ask, count)), servers=lambda: [engine.pid])


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "locate",
        f"locate of {CHUNKS} chunks over the Unix socket",
        "p50_us",
        locate_sides,
        generator=ALONE,
        expected_s=15,
        targets=(Target("p50_us", at_most(1.5, "x"), EMPTY),),
    ),
)
