"""Durable puts from shared memory, against one writer past the page cache on the same disk.

Every put has content that is new to the store.  The other sides neither hash nor name what they write.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.measure import Bench, Scenario, at_least, at_most
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from lakefs.histogram import Histogram
from lakefs.put.shared_memory import SharedMemory, Slot

MIB: Final = 1 << 20
BLOCKS: Final = 16
SEAL_BYTES: Final = 4 * MIB
FIO_ONCE: Final = "fio, O_DIRECT, fdatasync each 16 MiB"
FIO_EACH: Final = "fio, O_DIRECT, fdatasync each MiB"
PWRITE: Final = "pwrite, O_DIRECT, and fdatasync"
STAMP_BYTES: Final = 16


def _filled(memory: SharedMemory, length: int) -> Slot:
    slot = memory.allocate(length)
    slot.buffer[:] = os.urandom(length)
    return slot


@contextmanager
def _ours(
    bench: Bench, slots: int, length: int, calls: int, put: Callable[[lakefs.Lake, Sequence[Slot]], object]
) -> Iterator[Side]:
    """Context manager: `put` of slots that get a new stamp before each call, outside the timed part."""
    with EngineProcess(bench.folder) as engine, engine.connect() as lake, lake.shared_memory(slots * length) as memory:
        filled = [_filled(memory, length) for _ in range(slots)]

        def run() -> Run:
            taken: list[float] = []
            for _ in range(calls):
                for slot in filled:
                    slot.buffer[:STAMP_BYTES] = os.urandom(STAMP_BYTES)
                begin = time.perf_counter()
                put(lake, filled)
                taken.append(time.perf_counter() - begin)
            return _timed_run(taken, slots * length)

        yield Side(run, lambda: _make_room(lake), lambda: [engine.pid])


def _make_room(lake: lakefs.Lake) -> None:
    if lake.exists("bench/0"):
        lake.remove("bench/0")
        lake.gc()


def _timed_run(taken: Sequence[float], bytes_each: int) -> Run:
    moved = len(taken) * bytes_each
    return Run(len(taken), moved, Histogram.of_seconds(taken), sum(taken), stored_bytes=moved)


@contextmanager
def put_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: 16 slots of 1 MiB in a call, durable on return; fio, which syncs as often, or after each
    MiB."""
    calls = bench.scale.pick(24, 2)
    yield [
        Entrant(OURS, partial(_ours, bench, BLOCKS, MIB, calls, _put_many)),
        Entrant(FIO_ONCE, partial(_fio, bench, calls, BLOCKS)),
        Entrant(FIO_EACH, partial(_fio, bench, calls, 1)),
    ]


def _put_many(lake: lakefs.Lake, slots: Sequence[Slot]) -> object:
    return lake.put_many([(f"bench/{number}", slot) for number, slot in enumerate(slots)])


@contextmanager
def _fio(bench: Bench, calls: int, blocks_a_sync: int) -> Iterator[Side]:
    path = bench.folder / f"fio-{blocks_a_sync}"
    command = ["fio", "--name=write", f"--filename={path}", "--rw=write", "--bs=1M", f"--size={calls * BLOCKS}M"]
    options = ["--direct=1", "--ioengine=psync", f"--fdatasync={blocks_a_sync}", "--fallocate=posix", "--unlink=1"]

    def run() -> Run:
        done = subprocess.run(
            [*command, *options, "--end_fsync=0", "--output-format=json"], stdout=subprocess.PIPE, check=True
        )
        [job] = json.loads(done.stdout)["jobs"]
        moved = int(job["write"]["io_bytes"])
        elapsed_s = moved / float(job["write"]["bw_bytes"])
        return Run(calls, moved, elapsed_s=elapsed_s, stored_bytes=moved)

    yield Side(run)


@contextmanager
def seal_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: one slot of 4 MiB, hashed, durable and named when `put` returns; a write and a sync of as
    much."""
    calls = bench.scale.pick(100, 3)
    yield [
        Entrant(OURS, partial(_ours, bench, 1, SEAL_BYTES, calls, _put_one)),
        Entrant(PWRITE, partial(_pwrite, bench, calls)),
    ]


def _put_one(lake: lakefs.Lake, slots: Sequence[Slot]) -> object:
    return lake.put("bench/0", slots[0])


@contextmanager
def _pwrite(bench: Bench, calls: int) -> Iterator[Side]:
    path = Path(bench.folder / "written")
    content = mmap.mmap(-1, SEAL_BYTES)
    content[:] = os.urandom(SEAL_BYTES)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)

        def prepare() -> None:
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, calls * SEAL_BYTES)
            os.fsync(descriptor)

        def run() -> Run:
            taken: list[float] = []
            for number in range(calls):
                begin = time.perf_counter()
                os.pwrite(descriptor, content, number * SEAL_BYTES)
                os.fdatasync(descriptor)
                taken.append(time.perf_counter() - begin)
            return _timed_run(taken, SEAL_BYTES)

        yield Side(run, prepare)
    finally:
        os.close(descriptor)


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "put-1m-shared",
        "durable put of 16 x 1 MiB through shared memory in a call",
        "bytes_per_s",
        put_sides,
        generator=ALONE,
        expected_s=25,
        targets=(Target("bytes_per_s", at_least(0.8, "x"), FIO_ONCE),),
        stores=True,
    ),
    Sampled(
        "seal-4m-shared",
        "durable put of 4 MiB through shared memory, hash and name included",
        "p50_us",
        seal_sides,
        generator=ALONE,
        expected_s=15,
        targets=(Target("p50_us", at_most(1.4, "x"), PWRITE),),
        stores=True,
    ),
)
