"""A shuffled data loader: 200,000 objects of 100 KiB in random order, read by forked workers, a batch at a time.

A round reads the next part of one shuffled epoch, so a side reads nothing twice.  Store and folder are cold in the
page cache when a round begins, and each has 20 GB.  Ours checks every object by BLAKE3; the folder is read as it is,
and once more with the same check, because a reader needs the check to know what it read.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import blake3

import lakefs
from bench.harness.accounting import Device
from bench.harness.content import window
from bench.harness.loaders import Loaders, ReadBatch
from bench.harness.measure import Bench, Scenario, at_least
from bench.harness.mounts import forget_pages, forget_pages_below
from bench.harness.process import EngineProcess
from bench.harness.sampled import OURS, Entrant, Run, Sampled, Side, Target
from lakefs.histogram import Histogram

SIZE: Final = 100 << 10
COUNT: Final = 200_000
BATCH: Final = 64
BATCHES: Final = 250
"""Batches in one round: 16,000 objects, 1.6 GB."""
WORKERS: Final = 4
PER_FOLDER: Final = 1000
FILLED_TOGETHER: Final = 256
DISK_BYTES: Final = COUNT * SIZE * 12 // 5
"""Space for both sides, and a fifth more."""
FOLDER: Final = "local folder"
CHECKED: Final = "local folder, BLAKE3"


@contextmanager
def loader_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: store and folder filled with the same number of objects, all different."""
    count = bench.scale.pick(COUNT, 512)
    names = [f"d{number // PER_FOLDER:03}/s{number:06}" for number in range(count)]
    files = bench.folder / "files"
    for number, name in enumerate(names):
        if not number % PER_FOLDER:
            (files / name).parent.mkdir(parents=True)
        (files / name).write_bytes(window(SIZE))
    Device(bench.folder).settle()

    def forget(batches: Sequence[Sequence[str]]) -> None:
        for batch in batches:
            for name in batch:
                forget_pages(files / name)

    reading = partial(_side, bench, names, forget)
    yield [
        Entrant(OURS, partial(_ours, bench, names)),
        Entrant(FOLDER, lambda: reading(partial(_from_files, files, check=False))),
        Entrant(CHECKED, lambda: reading(partial(_from_files, files, check=True))),
    ]


@contextmanager
def _ours(bench: Bench, names: Sequence[str]) -> Iterator[Side]:
    with EngineProcess(bench.folder) as engine:
        with engine.connect() as lake:
            for begin in range(0, len(names), FILLED_TOGETHER):
                some = names[begin : begin + FILLED_TOGETHER]
                lake.put_many([(f"bench/{name}", window(SIZE)) for name in some])
        opened = partial(_from_lake, engine.address)
        with _side(bench, names, lambda batches: forget_pages_below(engine.data), opened, lambda: [engine.pid]) as side:
            yield side


@contextmanager
def _side(
    bench: Bench,
    names: Sequence[str],
    forget: Callable[[Sequence[Sequence[str]]], None],
    opened: Callable[[], AbstractContextManager[ReadBatch]],
    servers: Callable[[], Sequence[int]] = tuple,
) -> Iterator[Side]:
    """Context manager: a side of forked workers.  `forget` drops the batches to be read next from the page cache."""
    order = list(names)
    random.Random(1).shuffle(order)
    left = _endless(order)
    count = bench.scale.pick(BATCHES, 4)
    batches: list[Sequence[str]] = []

    def prepare() -> None:
        batches[:] = [next(left) for _ in range(count)]
        forget(batches)

    def run() -> Run:
        begin = time.perf_counter()
        moved_bytes, taken_ns = loaders.run(batches)
        elapsed_s = time.perf_counter() - begin
        assert moved_bytes == SIZE * BATCH * count
        latencies = Histogram()
        for value_ns in taken_ns:
            latencies.record(value_ns)
        return Run(BATCH * count, moved_bytes, latencies, elapsed_s)

    with Loaders(opened, WORKERS) as loaders:
        yield Side(run, prepare, servers, loaders.pids)


def _endless(order: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield batches of one epoch after the other."""
    while True:
        yield from (order[begin : begin + BATCH] for begin in range(0, len(order) - BATCH + 1, BATCH))


@contextmanager
def _from_lake(address: str) -> Iterator[ReadBatch]:
    with lakefs.connect(address) as lake:

        def read(names: Sequence[str]) -> int:
            return sum(map(len, lake.get_many([f"bench/{name}" for name in names])))

        yield read


@contextmanager
def _from_files(folder: Path, *, check: bool) -> Iterator[ReadBatch]:
    buffer = bytearray(SIZE)

    def read(names: Sequence[str]) -> int:
        total = 0
        for name in names:
            descriptor = os.open(folder / name, os.O_RDONLY)
            try:
                total += os.readv(descriptor, [buffer])
            finally:
                os.close(descriptor)
            if check:
                blake3.blake3(buffer).digest()
        return total

    yield read


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "loader",
        f"shuffled loader: {COUNT:,} objects of 100 KiB, {WORKERS} forked workers, get_many of {BATCH}, cold",
        "operations_per_s",
        loader_sides,
        generator="the same workers read a local folder in turn: what they reach there is what they can do",
        expected_s=170,
        disk_bytes=DISK_BYTES,
        targets=(Target("operations_per_s", at_least(1, "x"), CHECKED),),
    ),
)
