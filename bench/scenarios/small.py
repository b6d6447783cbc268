"""Objects of 4 KiB, durable, against append and fdatasync of 4 KiB to a new file."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from bench.harness.content import payload
from bench.harness.measure import Bench, Scenario, at_least, at_most
from bench.harness.process import EngineProcess
from bench.harness.sampled import OURS, Entrant, Run, Sampled, Side, Target, one_by_one

SIZE: Final = 4096
IN_FLIGHT: Final = 64
APPEND: Final = "append + fdatasync, one at a time"


@contextmanager
def rate_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: puts of distinct objects, each under its own name, 64 in flight."""
    yield [
        Entrant(OURS, partial(_many, bench, bench.scale.pick(8192, 256))),
        Entrant(APPEND, partial(_appends, bench, bench.scale.pick(1024, 64))),
    ]


@contextmanager
def latency_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: one put after the other."""
    count = bench.scale.pick(300, 20)
    yield [Entrant(OURS, partial(_singly, bench, count)), Entrant(APPEND, partial(_appends, bench, count))]


@contextmanager
def _many(bench: Bench, count: int) -> Iterator[Side]:
    numbers = itertools.count()
    objects: list[tuple[str, bytes]] = []
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:

        def prepare() -> None:
            objects[:] = [(f"bench/k{next(numbers):08}", payload(SIZE)) for _ in range(count)]

        def run() -> Run:
            begin = time.perf_counter()
            lake.put_many(objects, in_flight=IN_FLIGHT)
            elapsed_s = time.perf_counter() - begin
            return Run(count, count * SIZE, elapsed_s=elapsed_s, stored_bytes=count * SIZE)

        yield Side(run, prepare, lambda: [engine.pid])


@contextmanager
def _singly(bench: Bench, count: int) -> Iterator[Side]:
    numbers = itertools.count()
    objects: list[tuple[str, bytes]] = []
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:

        def prepare() -> None:
            objects[:] = [(f"bench/k{next(numbers):08}", payload(SIZE)) for _ in range(count)]

        def run() -> Run:
            puts = (partial(lake.put, name, content) for name, content in objects)
            return one_by_one(puts, bytes_each=SIZE, stored=True)

        yield Side(run, prepare, lambda: [engine.pid])


@contextmanager
def _appends(bench: Bench, count: int) -> Iterator[Side]:
    """Context manager: appends to a file that is new each round."""
    path = bench.folder / "log"
    content: list[bytes] = []

    def prepare() -> None:
        path.unlink(missing_ok=True)
        content[:] = [payload(SIZE) for _ in range(count)]

    def run() -> Run:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            appends = (partial(_append, descriptor, one) for one in content)
            return one_by_one(appends, bytes_each=SIZE, stored=True)
        finally:
            os.close(descriptor)

    yield Side(run, prepare)


def _append(descriptor: int, content: bytes) -> None:
    os.write(descriptor, content)
    os.fdatasync(descriptor)


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "put-small",
        "4 KiB durable puts, own names, 64 in flight",
        "operations_per_s",
        rate_sides,
        generator="one client with 64 in flight; its CPU for a put stands beside the engine's, and is a fraction of it",
        expected_s=15,
        targets=(Target("operations_per_s", at_least(5, "x"), APPEND),),
        stores=True,
    ),
    Sampled(
        "put-small-one",
        "4 KiB durable puts, one by one",
        "p50_us",
        latency_sides,
        generator="one client, one put after the other: the round trip itself is what is timed",
        expected_s=9,
        targets=(Target("p50_us", at_most(2.5, "x"), APPEND),),
        stores=True,
    ),
)
