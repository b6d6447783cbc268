"""A million operations of mixed load: an engine must neither grow nor slow down."""

from __future__ import annotations

from typing import Final

from bench.harness.measure import Bench, Figure, Scenario, Single, at_most
from bench.harness.mixed_load import growth, slowing, watch_mixed
from bench.harness.process import EngineProcess

COUNT: Final = 1_000_000


def mixed(bench: Bench) -> dict[str, float]:
    """Return RssAnon and p99 at the end against those after the first tenth."""
    with EngineProcess(bench.folder) as engine:
        samples = watch_mixed(engine, bench.scale.pick(COUNT, 2_000), seed=1)
    return {
        "RssAnon": growth(samples),
        "p99 of gets": slowing(samples),
        "MiB at the end": samples[-1].private_bytes / 2**20,
        "operations/s": sum(sample.operations_per_s for sample in samples) / len(samples),
    }


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "mixed",
        "1,000,000 operations of mixed load, the end / after the first tenth",
        (Figure("RssAnon", at_most(1.05, "x"), "x"), Figure("p99 of gets", at_most(1.25, "x"), "x")),
        mixed,
    ),
)
