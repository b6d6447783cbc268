"""Blocks into a pool, 16 in a call, against reading and copying them by hand.

The client finds blocks in the page cache through the shared index and copies them itself; the engine fills the
client's lent memory with the rest.  Each call takes other blocks, in turn through all of them, and fills other slots,
so nothing is in the processor's cache.  The unverified side is comparable with the peers; the checked sides stand
beside it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.harness.content import payload
from bench.harness.measure import Bench, Scenario, at_least, at_most
from bench.harness.mounts import forget_pages_below
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, CouldNotRun, Entrant, Run, Sampled, Side, Target
from bench.peers.fio import Job, fio
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.histogram import Histogram
from lakefs.ids import data_chunk_id

KIB: Final = 1 << 10
MIB: Final = 1 << 20
BLOCKS: Final = 16
"""Blocks in one call."""
MEMORY_FOLDER: Final = Path("/dev/shm")
FIO: Final = "fio, io_uring, O_DIRECT, 16 in flight"
BY_ENGINE: Final = "ours, all moved by the engine"
Load = Callable[[Sequence[int]], object]


@contextmanager
def memory_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: 64 KiB blocks of a store in memory; the same blocks as files there, and copied within a
    process."""
    if not MEMORY_FOLDER.is_dir():
        raise CouldNotRun(f"there is no {MEMORY_FOLDER}")
    count, calls = bench.scale.pick(1024, 64), bench.scale.pick(1500, 8)
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as name, EngineProcess(Path(name)) as engine:
        chunks = _stored(engine, count, 64 * KIB)
        ours = partial(_ours, engine, chunks, 64 * KIB, calls)
        yield [
            Entrant(OURS, partial(ours, Check.NONE)),
            Entrant("ours, CRC32C", partial(ours, Check.CRC32C)),
            Entrant("ours, BLAKE3", partial(ours, Check.BLAKE3)),
            Entrant(BY_ENGINE, partial(ours, Check.NONE, by_engine=True)),
            Entrant("files, open and readinto", partial(_of_files, Path(name), count, 64 * KIB, calls)),
            Entrant("copies within a process", partial(_copies, count, 64 * KIB, calls)),
        ]


@contextmanager
def disk_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: 1 MiB blocks that are in no cache; and a file of the same length."""
    count = bench.scale.pick(512, 32)
    source = bench.folder / "source"
    with source.open("wb") as file:
        for _ in range(count):
            file.write(payload(MIB))
    with EngineProcess(bench.folder) as engine:
        chunks = _stored(engine, count, MIB)
        ours = partial(_ours, engine, chunks, MIB, count // BLOCKS)
        forget = partial(forget_pages_below, engine.data)
        yield [
            Entrant(OURS, partial(ours, Check.NONE, forget)),
            Entrant("ours, CRC32C", partial(ours, Check.CRC32C, forget)),
            Entrant("ours, BLAKE3", partial(ours, Check.BLAKE3, forget)),
            Entrant(FIO, partial(fio_side, source, Job("read", MIB, count * MIB, depth=BLOCKS))),
        ]


def _stored(engine: EngineProcess, count: int, size: int) -> list[bytes]:
    chunks: list[bytes] = []
    with engine.connect() as lake:
        for first in range(0, count, BLOCKS):
            contents = [payload(size) for _ in range(BLOCKS)]
            lake.put_many([(f"bench/{first + index}", content) for index, content in enumerate(contents)])
            chunks += [bytes(data_chunk_id(content)) for content in contents]
    os.sync()
    return chunks


@contextmanager
def _ours(
    engine: EngineProcess,
    chunks: Sequence[bytes],
    size: int,
    calls: int,
    check: Check,
    prepare: Callable[[], None] = lambda: None,
    *,
    by_engine: bool = False,
) -> Iterator[Side]:
    with engine.connect(check=check) as lake, lake.pool(size_bytes=len(chunks) * size) as pool:
        driver = driver_of(lake)

        def load(taken: Sequence[int]) -> None:
            wanted, offsets = [chunks[index] for index in taken], [index * size for index in taken]
            if by_engine:
                lengths = driver.run(driver.steps.load_many(wanted, pool, offsets))
            else:
                lengths = lake.load_many(wanted, pool, offsets)
            assert lengths == [size] * BLOCKS

        yield Side(timed_calls(load, len(chunks), size, calls), prepare, lambda: [engine.pid])


@contextmanager
def _of_files(folder: Path, count: int, size: int, calls: int) -> Iterator[Side]:
    """Context manager: a loader of blocks from files in Python, one after the other."""
    paths = [str(folder / f"block-{index}") for index in range(count)]
    for path in paths:
        Path(path).write_bytes(payload(size))
    pool = memoryview(bytearray(count * size))

    def load(taken: Sequence[int]) -> None:
        for index in taken:
            with open(paths[index], "rb", buffering=0) as file:
                assert file.readinto(pool[index * size : (index + 1) * size]) == size

    yield Side(timed_calls(load, count, size, calls))


@contextmanager
def _copies(count: int, size: int, calls: int) -> Iterator[Side]:
    source, pool = memoryview(os.urandom(count * size)), memoryview(bytearray(count * size))

    def load(taken: Sequence[int]) -> None:
        for index in taken:
            pool[index * size : (index + 1) * size] = source[index * size : (index + 1) * size]

    yield Side(timed_calls(load, count, size, calls))


@contextmanager
def fio_side(source: Path, job: Job) -> Iterator[Side]:
    """Context manager: a job of fio."""
    yield Side(fio(source, job))


def timed_calls(load: Load, count: int, size: int, calls: int) -> Callable[[], Run]:
    """Return a round of calls; the next round continues where it ended."""
    turn = itertools.count()

    def run() -> Run:
        taken: list[float] = []
        for _ in range(calls):
            first = next(turn) * BLOCKS % count
            begin = time.perf_counter()
            load(range(first, first + BLOCKS))
            taken.append(time.perf_counter() - begin)
        return Run(calls, calls * BLOCKS * size, Histogram.of_seconds(taken), sum(taken))

    return run


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "pool-64k",
        "16 x 64 KiB into a pool, from memory, unverified",
        "p50_us",
        memory_sides,
        generator=ALONE,
        expected_s=30,
        targets=(Target("p50_us", at_most(250, "us")),),
    ),
    Sampled(
        "pool-1m",
        "16 x 1 MiB into a pool, from disk, unverified",
        "bytes_per_s",
        disk_sides,
        generator=ALONE,
        expected_s=15,
        targets=(Target("bytes_per_s", at_least(0.85, "x"), FIO),),
    ),
)
