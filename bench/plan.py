"""How long each scenario takes, so that all of them stay under an hour; and how its load was checked.

Seconds of a whole run on two virtual cores, with room; a `Sampled` scenario says its own.  `make bench` prints beside
each what it took.  `GENERATORS`: by the beginning of the name, why what asks is not the limit of what answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench.measure import Scenario
from bench.sampled import ALONE, Sampled

WHOLE_RUN_S: Final = 3600
UNTIMED_S: Final = 60.0
"""A scenario that is not in the table is taken to need so long."""

EXPECTED_S: Final[Mapping[str, float]] = {
    "startup": 15, "grant-blake3": 10, "grant-crc32c": 10,
    "space": 20, "gc-latency": 40, "gc-reclaim": 50,
    "scrub": 35, "scrub-memory": 20, "scrub-small": 30, "dedup-model": 20,
    "mount-read": 50, "mount-reread": 75, "mount-tensors": 25, "mount-tensors-cold": 25, "mount-write": 100,
    "mount-random": 25, "mount-cp": 80, "mount-git": 80, "mount-tar": 30, "mount-find": 20, "mount-du": 20,
    "mount-memory": 20,
    "peers-read": 25, "peers-read-first": 15, "peers-reread": 25, "peers-random": 20, "peers-tensors": 15,
    "peers-tensors-first": 15, "peers-write": 35, "peers-cp": 25, "peers-copy": 25, "peers-git": 35,
    "peers-tar": 25, "peers-find": 20, "peers-du": 20, "peers-memory": 20,
    "s3-rate-get-4k": 60, "s3-rate-get-1m": 60, "s3-rate-get-64m": 120, "s3-rate-put-4k": 60, "s3-rate-put-1m": 70,
    "s3-rate-put-64m": 215, "s3-crowd": 45, "s3-memory": 60,
    "s3-processes-get-4k": 30, "s3-processes-get-1m": 20, "s3-processes-put-4k": 35,
    "memory-large": 45, "memory-million": 100, "rename-million": 15, "list-million": 15, "open-million": 10,
    "mixed": 170,
}  # fmt: skip

_CPU: Final = (
    "the server's own CPU time counts, whatever the generator's speed; its share of a core is recorded"
)
_SHARED: Final = (
    "one generator for all sides; its share of a core is recorded; `null-http` says how far it goes"
)
GENERATORS: Final[Mapping[str, str]] = {
    "": ALONE,
    "mount-": "the same program on both sides, on the mount and on the peer",
    "peers-": "the same program on every mount",
    "s3-": _CPU,
    "s3-rate-": _SHARED,
    "s3-crowd": _SHARED,
}


def expected_s(name: str, scenario: Scenario) -> float:
    """Of a whole run."""
    return scenario.expected_s if isinstance(scenario, Sampled) else EXPECTED_S.get(name, UNTIMED_S)


def generator_of(name: str) -> str:
    """How it was checked that the load was not the limit, of a scenario that is not a `Sampled`."""
    fitting = [beginning for beginning in GENERATORS if name.startswith(beginning)]
    return GENERATORS[max(fitting, key=len)]
