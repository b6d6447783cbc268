"""Lives of a store, drawn from a seed, and the result of a run of them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from engine.format.sizes import MetadataSizes, SegmentSizes, StoreSizes
from lakefs.limits import KIB, MIB


@dataclass(frozen=True)
class Life:
    """One life of the store, before it begins."""

    ending: str
    """stop, kill or crash"""
    trouble: str
    """none, full (the disk fills up), or what fails once: sync, write, read, or room (a write finds none)"""
    wire: str
    """embedded, remote or reconnecting"""
    crash_at: int | None
    """Operation of the disk at which the process or the power fails"""
    patience_s: float
    """Seconds after which the workloads are cancelled, whatever they are doing"""
    workloads: int
    operations: int
    slowest_s: float
    grace_s: float
    sets_clock: bool = False
    ends_in: str = ""
    """The kind of upkeep during which it ends"""


TROUBLES = ("none", "full", "sync", "write", "read", "room")
LESS: dict[str, dict[str, object]] = {
    "trouble": {"trouble": "none"},
    "wire": {"wire": "embedded"},
    "clock": {"sets_clock": False},
    "patience": {"patience_s": 1e6},
    "end": {"ends_in": ""},
}
"""Parts that can be left out of a life."""
UPKEEP = ("compact", "compact", "collect", "checkpoint", "rebuild")
QUIET = Life("stop", "none", "embedded", None, 1.0, 0, 0, 0.001, 0.0)


@dataclass
class Result:
    """The result of a run: its trace, and counts for people.  `met`: things that happened, and how often."""

    trace: str = ""
    lives: int = 0
    crashes: int = 0
    operations: int = 0
    """Requests of workloads."""
    faults: int = 0
    """Faults made on purpose, without crashes: failures of the disk, lies, flipped bits, cuts, cancellations."""
    disk_operations: int = 0
    decisions: int = 0
    met: Counter[str] = field(default_factory=Counter)


def draw_life(rng: random.Random) -> Life:
    """Draw a life."""
    ending = rng.choices(("stop", "kill", "crash"), (3, 1, 6))[0]
    crash_at = None
    if ending != "stop":
        crash_at = rng.choice((rng.randint(1, 40), rng.randint(20, 200), rng.randint(100, 1200)))
    slowest_s = rng.choice((0.0005, 0.02, 0.3))
    return Life(
        ending,
        rng.choices(TROUBLES, (22, 4, 2, 2, 3, 1))[0],
        rng.choices(("embedded", "remote", "reconnecting"), (8, 1, 1))[0],
        crash_at,
        patience_s=rng.uniform(0.0, 100 * slowest_s) if rng.random() < 0.2 else 1e6,
        workloads=rng.randint(1, 4),
        operations=rng.randint(5, 40),
        slowest_s=slowest_s,
        grace_s=rng.choice((0.0, 0.0, 5.0)),
        sets_clock=rng.random() < 0.2,
        ends_in=rng.choice(UPKEEP) if ending != "stop" and rng.random() < 0.3 else "",
    )


def draw_relapse(rng: random.Random) -> Life:
    """Draw a life that ends soon: while it opens, or at its first operations."""
    ending = rng.choices(("kill", "crash"), (1, 4))[0]
    life = replace(draw_life(rng), ending=ending, trouble="none", wire="embedded", ends_in="")
    return replace(life, crash_at=rng.randint(1, 50), workloads=1, operations=rng.randint(2, 10))


def draw_sizes(rng: random.Random, *, huge: bool) -> StoreSizes:
    """Draw bounds so small that a life meets them; `huge`: with room for the greatest chunk."""
    return StoreSizes(
        metadata=MetadataSizes(
            group_bytes=rng.choice((16 * KIB, 64 * KIB)),
            journal_file=rng.choice((32 * KIB, 128 * KIB)),
            journal_fill=rng.choice((16 * KIB, 64 * KIB)),
            overlay_entries_apply=rng.choice((10, 60, 1000)),
            overlay_entries_max=rng.choice((100, 10_000)),
            checkpoint_journal=rng.choice((32 * KIB, 256 * KIB)),
        ),
        segments=SegmentSizes(
            large_segment=6 * MIB if huge else rng.choice((400 * KIB, 2 * MIB)),
            small_segment=rng.choice((96 * KIB, 256 * KIB)),
            large_extend=rng.choice((64 * KIB, 256 * KIB)),
            small_fill=rng.choice((4 * KIB, 64 * KIB)),
        ),
        gc_batch=rng.choice((3, 10, 2048)),
        compact_won_bytes=1,
        buffer_bytes=rng.choice((37, 64)) * MIB,
        huge_buffers=0,
        part_bytes_min=1,
        write_ahead_bytes=64 * KIB,
    )
