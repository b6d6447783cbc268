"""All scenarios by name, in the order they run."""

from __future__ import annotations

from typing import Final

from bench.harness.measure import Scenario
from bench.scenarios import (
    client,
    cold,
    dedup,
    engines,
    gc,
    known,
    kv,
    large,
    loader,
    lookup,
    million,
    mixed,
    mount,
    mount_peers,
    mount_ways,
    open_loop,
    pool,
    random_reads,
    requests,
    s3_cpu,
    s3_crowd,
    s3_memory,
    s3_processes,
    s3_rates,
    scrub,
    shared,
    small,
    space,
    startup,
    tensors,
)

SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        *large.SCENARIOS,
        *shared.SCENARIOS,
        *pool.SCENARIOS,
        *startup.SCENARIOS,
        *client.SCENARIOS,
        *cold.SCENARIOS,
        *tensors.SCENARIOS,
        *kv.SCENARIOS,
        *small.SCENARIOS,
        *lookup.SCENARIOS,
        *requests.SCENARIOS,
        *known.SCENARIOS,
        *space.SCENARIOS,
        *random_reads.SCENARIOS,
        *gc.SCENARIOS,
        *scrub.SCENARIOS,
        *dedup.SCENARIOS,
        *mount.SCENARIOS,
        *mount_ways.SCENARIOS,
        *mount_peers.SCENARIOS,
        *s3_cpu.SCENARIOS,
        *s3_rates.SCENARIOS,
        *open_loop.SCENARIOS,
        *loader.SCENARIOS,
        *s3_crowd.SCENARIOS,
        *s3_memory.SCENARIOS,
        *s3_processes.SCENARIOS,
        *engines.SCENARIOS,
        *large.MEMORY_SCENARIOS,
        *million.SCENARIOS,
        *mixed.SCENARIOS,
    )
}
