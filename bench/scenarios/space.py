"""Disk space of a store after a clean stop, without its reserve, for each byte stored."""

from __future__ import annotations

from typing import Final

from bench.harness.content import payload, write_file
from bench.harness.measure import Bench, Figure, Scenario, Single, at_most
from bench.harness.process import EngineProcess, allocated_bytes


def measure(bench: Bench) -> dict[str, float]:
    """Return the figures of three stores, each with objects of one size."""
    return {
        "10,000 of 4 KiB": _many(bench, bench.scale.pick(10_000, 100), 4096),
        "1,000 of 64 KiB + 1": _many(bench, bench.scale.pick(1000, 20), 65_537),
        "one of 1 GiB": _one(bench, bench.scale.pick(1 << 30, 16 << 20)),
    }


def _many(bench: Bench, count: int, size: int) -> float:
    folder = bench.folder / f"{size}"
    with EngineProcess(folder) as engine, engine.connect() as lake:
        for start in range(0, count, 1000):
            batch = range(start, min(start + 1000, count))
            lake.put_many([(f"bench/k{index:08}", payload(size)) for index in batch])
    return allocated_bytes(engine.data, leave_out="reserve") / (count * size)


def _one(bench: Bench, size: int) -> float:
    source = bench.folder / "source"
    write_file(source, size)
    with EngineProcess(bench.folder / "one") as engine, engine.connect() as lake:
        lake.put("bench/x", source)
    source.unlink()
    return allocated_bytes(engine.data, leave_out="reserve") / size


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "space",
        "room on disk / bytes stored",
        (
            Figure("10,000 of 4 KiB", at_most(1.20, "x"), "x"),
            Figure("1,000 of 64 KiB + 1", at_most(1.08, "x"), "x"),
            Figure("one of 1 GiB", at_most(1.01, "x"), "x"),
        ),
        measure,
    ),
)
