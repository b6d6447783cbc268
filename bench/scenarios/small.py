"""Objects of 4 KiB, durable, against append and fdatasync of 4 KiB to a new file."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.content import payload
from bench.measure import Bench, Paired, Scenario, Sides, at_least, at_most, timed
from bench.process import EngineProcess

SIZE: Final = 4096
IN_FLIGHT: Final = 64


@contextmanager
def rate_sides(bench: Bench) -> Iterator[Sides]:
    """Puts of distinct objects, each under a name of its own, 64 in flight."""
    count = bench.scale.pick(8192, 256)
    appends = bench.scale.pick(1024, 64)
    numbers = itertools.count()
    cpu: list[float] = []
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:

        def ours() -> float:
            objects = [(f"bench/k{next(numbers):08}", payload(SIZE)) for _ in range(count)]
            before = engine.cpu_s()
            elapsed_s = timed(lambda: lake.put_many(objects, in_flight=IN_FLIGHT))
            cpu.append((engine.cpu_s() - before) / count)
            return count / elapsed_s

        def theirs() -> float:
            return 1 / statistics.fmean(append_synced(bench.folder / "log", appends))

        yield Sides(ours, theirs, figures=lambda: {"engine CPU us/put": 1e6 * statistics.median(cpu)})


@contextmanager
def latency_sides(bench: Bench) -> Iterator[Sides]:
    """One put after the other, the median of each round."""
    count = bench.scale.pick(300, 20)
    numbers = itertools.count()
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:

        def ours() -> float:
            content = [payload(SIZE) for _ in range(count)]
            return statistics.median(
                timed(lambda one=one: lake.put(f"bench/k{next(numbers):08}", one))  # type: ignore[misc]
                for one in content
            )

        def theirs() -> float:
            return statistics.median(append_synced(bench.folder / "log", count))

        yield Sides(ours, theirs)


def append_synced(path: Path, count: int) -> list[float]:
    """Seconds of each append of 4 KiB with fdatasync, one at a time, to a file that is new."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return [timed(lambda: _append(descriptor, payload(SIZE))) for _ in range(count)]
    finally:
        os.close(descriptor)


def _append(descriptor: int, content: bytes) -> None:
    os.write(descriptor, content)
    os.fdatasync(descriptor)


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Paired(
        "put-small",
        "4 KiB durable puts, own names, 64 in flight / append + fdatasync one at a time",
        "op/s",
        at_least(5, "x"),
        rate_sides,
    ),
    Paired(
        "put-small-one",
        "one 4 KiB durable put / one append + fdatasync",
        "s",
        at_most(2.5, "x"),
        latency_sides,
    ),
)
