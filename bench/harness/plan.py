"""Expected time of each scenario, so that all of them stay under 75 minutes; and how its load was checked.

Seconds of a whole run on two virtual cores, with a margin; a `Sampled` scenario has its own.  `make bench` prints the
measured time beside each.  `GENERATORS`: by prefix of the name, why the load generator does not limit the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench.harness.measure import Scenario
from bench.harness.sampled import ALONE, Sampled

WHOLE_RUN_S: Final = 4500
UNTIMED_S: Final = 60.0
"""Assumed time of a scenario that is not in the table."""

BY_NAME_ONLY: Final = ("mount-ways-", "gain-")
"""Beginnings of scenarios that a run of all leaves out: they compare our own ways, and would not fit into the hour."""

EXPECTED_S: Final[Mapping[str, float]] = {
    "startup": 6, "grant-blake3": 4, "grant-crc32c": 3,
    "space": 9, "gc-latency": 95, "gc-reclaim": 90,
    "scrub": 15, "scrub-memory": 7, "scrub-small": 10, "dedup-model": 8,
    "mount-read": 45, "mount-reread": 40, "mount-tensors": 7, "mount-tensors-cold": 10, "mount-write": 120,
    "mount-random": 40, "mount-cp": 130, "mount-git": 140, "mount-tar": 45, "mount-find": 20, "mount-du": 30,
    "mount-memory": 11, "mount-ways-read": 15, "mount-ways-reread": 15, "mount-ways-random": 25,
    "mount-ways-tensors": 12, "mount-ways-open": 15, "mount-ways-cp": 60, "mount-ways-git": 75, "mount-ways-find": 25,
    "peers-read": 22, "peers-read-first": 12, "peers-reread": 22, "peers-random": 18, "peers-tensors": 9,
    "peers-tensors-first": 12, "peers-write": 38, "peers-cp": 30, "peers-copy": 30, "peers-git": 38,
    "peers-tar": 22, "peers-find": 22, "peers-du": 24, "peers-memory": 15,
    "s3-rate-get-4k": 45, "s3-rate-get-1m": 55, "s3-rate-get-64m": 105, "s3-rate-put-4k": 35, "s3-rate-put-1m": 50,
    "s3-rate-put-64m": 130, "s3-crowd": 12, "s3-parked": 10, "s3-memory": 25,
    "s3-processes-get-4k": 12, "s3-processes-get-1m": 7, "s3-processes-put-4k": 8,
    "memory-large": 40, "memory-million": 110, "rename-million": 2, "list-million": 15, "open-million": 10,
    "erasure-encode": 5, "erasure-decode-1": 5, "erasure-decode-2": 5, "erasure-short": 5,
    "mixed": 210, "keyed-hits": 40, "keyed-match": 110, "keyed-present": 5, "keyed-memory": 2,
    "keyed-cycle": 20, "keyed-beside": 60, "lake-space": 25, "lake-idle": 170,
}  # fmt: skip

_CPU: Final = "the server's own CPU time counts, whatever the generator's speed; its share of a core is recorded"
_SHARED: Final = "one generator for all sides; its share of a core is recorded; `null-http` says how far it goes"
GENERATORS: Final[Mapping[str, str]] = {
    "": ALONE,
    "mount-": "the same program on both sides, on the mount and on the peer",
    "mount-ways-": "the same program on every mount",
    "peers-": "the same program on every mount",
    "s3-": _CPU,
    "s3-rate-": _SHARED,
    "s3-crowd": _SHARED,
}


def expected_s(name: str, scenario: Scenario) -> float:
    """Return the seconds of a whole run of a scenario."""
    return scenario.expected_s if isinstance(scenario, Sampled) else EXPECTED_S.get(name, UNTIMED_S)


def generator_of(name: str) -> str:
    """Return how the load was checked not to be the limit, for a scenario that is not a `Sampled`."""
    fitting = [beginning for beginning in GENERATORS if name.startswith(beginning)]
    return GENERATORS[max(fitting, key=len)]
