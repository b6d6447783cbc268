"""Garbage collection and compaction: the space that one cycle frees, and the effect on writers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.measure import Bench, Figure, Paired, Scenario, Sides, Single, at_least, at_most, timed
from bench.harness.process import EngineProcess, allocated_bytes
from lakefs.client.facade import driver_of
from lakefs.names import parse_object_name

KIB: Final = 1024
MIB: Final = 1 << 20
SIZES: Final = {"4 KiB": 4 * KIB, "60 KiB": 60 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}
BATCH: Final = 1000
OBJECTS_MAX: Final = 20_000


@contextmanager
def latency_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: puts of 4 KiB one after the other; the figure is the 99th percentile of each round.

    Our side runs while cycles of gc with compaction follow each other; new garbage is made before each round.
    """
    count = bench.scale.pick(1000, 30)
    base = bench.scale.pick(50_000, 500)
    garbage = bench.scale.pick(5_000, 200)
    numbers = itertools.count()
    chance = random.Random(1)
    moved: list[int] = []
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        _put(lake, [(f"bench/base{number}", chance.randrange(2000, 5000)) for number in range(base)])

        def prepare() -> None:
            names = [f"bench/garbage{next(numbers)}" for _ in range(garbage)]
            _put(lake, [(name, chance.randrange(2000, 5000)) for name in names])
            _remove(lake, [name for name in names if chance.random() < 0.7])

        def puts() -> float:
            taken = [timed(lambda: lake.put(f"bench/k{next(numbers)}", payload(4 * KIB))) for _ in range(count)]
            return sorted(taken)[int(count * 0.99)]

        def beside_gc() -> float:
            ended = threading.Event()
            collector = threading.Thread(target=lambda: moved.append(_collect_until(engine, ended)))
            collector.start()
            try:
                return puts()
            finally:
                ended.set()
                collector.join()

        def alone() -> float:
            lake.gc(compact=True)  # collects the prepared garbage before the timed puts
            return puts()

        yield Sides(beside_gc, alone, prepare, lambda: {"chunks moved in a round": sum(moved) / len(moved)})


def _collect_until(engine: EngineProcess, ended: threading.Event) -> int:
    """Run cycles until `ended` is set; return the number of chunks that they moved."""
    moved = 0
    with engine.connect() as lake:
        while not ended.is_set():
            moved += lake.gc(compact=True)["compaction"]["moved_chunks"]
    return moved


def reclaim(bench: Bench) -> dict[str, float]:
    """Return the disk space freed by one `lake gc --compact`, as a share of the removed objects' bytes."""
    total = bench.scale.pick(256 * MIB, 8 * MIB)
    figures: dict[str, float] = {}
    for label, size in SIZES.items():
        for share in (0.5, 0.9):
            count = max(4, min(total // size, OBJECTS_MAX))
            sizes = [size if size >= MIB else _about(number, size) for number in range(count)]
            figures[f"{label}, {share:.0%} removed"] = _reclaimed(bench, f"{size}-{share}", sizes, share)
    mixed = [size for size in SIZES.values() for _ in range(max(2, total // 4 // size))]
    random.Random(3).shuffle(mixed)
    figures["mixed, every other removed"] = _reclaimed(bench, "mixed", mixed, None)
    return figures


def _about(number: int, size: int) -> int:
    """Return a different size for each number, so that small objects do not end at page boundaries."""
    return random.Random(number).randrange(size // 2, size)


def _reclaimed(bench: Bench, label: str, sizes: Sequence[int], share: float | None) -> float:
    """Put objects of these sizes, remove a share at random or every other one; return reclaimed / removed bytes."""
    chance = random.Random(label)
    engine = EngineProcess(bench.folder / label)
    names = [f"bench/k{number}" for number in range(len(sizes))]
    with engine, engine.connect() as lake:
        _put(lake, list(zip(names, sizes, strict=True)))
    before = allocated_bytes(engine.data / "segments")  # stopped: no zero-fill ahead
    gone = [n for n in range(len(sizes)) if (n % 2 if share is None else chance.random() < share)]
    with engine, engine.connect() as lake:
        _remove(lake, [names[number] for number in gone])
        lake.gc(compact=True)
    after = allocated_bytes(engine.data / "segments")
    return (before - after) / max(1, sum(sizes[number] for number in gone))


def _put(lake: lakefs.Lake, objects: Sequence[tuple[str, int]]) -> None:
    """Put names with contents of so many bytes, in order; small ones many at a time."""
    batch: list[tuple[str, bytes]] = []
    for name, size in objects:
        if size > MIB:
            lake.put(name, b"".join(payload(min(MIB, size - at)) for at in range(0, size, MIB)))
            continue
        batch.append((name, payload(size)))
        if sum(len(content) for _, content in batch[-8:]) > MIB or len(batch) == BATCH:
            lake.put_many(batch)
            batch = []
    lake.put_many(batch)


def _remove(lake: lakefs.Lake, names: Sequence[str]) -> None:
    driver = driver_of(lake)
    for start in range(0, len(names), BATCH):
        driver.run(driver.steps.remove_many([parse_object_name(name) for name in names[start : start + BATCH]]))


RECLAIMED: Final = tuple(
    Figure(f"{label}, {share} removed", at_least(0.95, ""), "x") for label in SIZES for share in ("50%", "90%")
)

SCENARIOS: Final[tuple[Scenario, ...]] = (
    Paired(
        "gc-latency",
        "p99 of 4 KiB durable puts, one after the other, beside gc and compaction / without",
        "s",
        at_most(2, "x"),
        latency_sides,
    ),
    Single(
        "gc-reclaim",
        "room given back by one cycle / bytes removed",
        (*RECLAIMED, Figure("mixed, every other removed", at_least(0.95), "x")),
        reclaim,
    ),
)
