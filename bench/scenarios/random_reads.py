"""Random reads of uncached chunks of 4 KiB, 32 in flight, by the native protocol; against fio on one core.

Ours asks for 16 chunks by id in each request, with two requests in flight, and each answer includes checksums.  The
engine's pages are dropped before each round, no chunk is read twice in one, and the DRAM tier, which would keep
chunks for the next round, is off.  The same engine with `io_uring = off` shows the cost of threads.  fio reads 4 KiB
of a file on the same file system, with O_DIRECT and io_uring, 32 in flight, bound to one core.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from bench.harness.content import payload
from bench.harness.measure import Bench, Scenario, at_least, at_most
from bench.harness.process import EngineProcess
from bench.harness.sampled import OURS, CouldNotRun, Entrant, Run, Sampled, Side, Target
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.histogram import Histogram
from lakefs.ids import data_chunk_id
from lakefs.wire.messages import ReadChunks, ReadChunksReply

SIZE: Final = 4096
BATCH: Final = 16
UNDER_WAY: Final = 2
"""Requests in flight: 32 chunks."""
THREADS: Final = "ours, io_uring = off"
FIO: Final = "fio, io_uring, O_DIRECT, one core"
FIO_S: Final = 2
PUT_AT_ONCE: Final = 1024


@contextmanager
def random_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: two engines, each with its own store, and a file for fio."""
    yield [
        Entrant(OURS, partial(_engine_side, bench, "auto")),
        Entrant(THREADS, partial(_engine_side, bench, "off")),
        Entrant(FIO, partial(_fio_side, bench)),
    ]


@contextmanager
def _engine_side(bench: Bench, io_uring: str) -> Iterator[Side]:
    folder = bench.folder / f"io_uring-{io_uring}"
    folder.mkdir()
    order = random.Random(4)
    count = bench.scale.pick(8192, 256)
    with EngineProcess(folder, "--io-uring", io_uring, "--dram-tier-bytes", "0") as engine:
        chunks = _stored(engine, bench.scale.pick(16_384, 512))

        def run() -> Run:
            return trio.run(_read, engine.address, order.sample(chunks, count))

        yield Side(run, partial(_drop_pages, engine.data / "segments"), servers=lambda: [engine.pid])


def _stored(engine: EngineProcess, count: int) -> list[bytes]:
    """Store that many chunks in segments that are closed; return their ids once the engine is idle."""
    contents = [payload(SIZE) for _ in range(count)]
    with engine.connect() as lake:
        for first in range(0, count, PUT_AT_ONCE):
            group = contents[first : first + PUT_AT_ONCE]
            lake.put_many([(f"bench/k{first + index:06}", content) for index, content in enumerate(group)])
    engine.stop()
    engine.start()
    with engine.connect() as lake:
        while not lake.status()["index_verified"]:
            time.sleep(0.05)
    return [bytes(data_chunk_id(content)) for content in contents]


def _drop_pages(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def _read(address: str, chunks: Sequence[bytes]) -> Run:
    latencies = Histogram()
    batches = iter([chunks[first : first + BATCH] for first in range(0, len(chunks), BATCH)])
    async with connect_reconnecting(address, token="") as engine:
        begin = time.perf_counter()

        async def ask() -> None:
            for batch in batches:
                before = time.perf_counter_ns()
                reply = await engine.call(ReadChunks(list(batch), [0] * len(batch), [0] * len(batch)))
                latencies.record(time.perf_counter_ns() - before, len(batch))
                assert isinstance(reply.message, ReadChunksReply)
                assert all(piece.length == SIZE for piece in reply.message.pieces), reply.message
                reply.body.release()

        async with trio.open_nursery() as nursery:
            for _ in range(UNDER_WAY):
                nursery.start_soon(ask)
        elapsed_s = time.perf_counter() - begin
    return Run(len(chunks), len(chunks) * SIZE, latencies, elapsed_s)


@contextmanager
def _fio_side(bench: Bench) -> Iterator[Side]:
    if shutil.which("fio") is None:
        raise CouldNotRun("there is no program fio")
    file = bench.folder / "fio"
    size = bench.scale.pick(1 << 30, 16 << 20)
    seconds = FIO_S if not bench.scale.quick else 1
    _fio(file, size, "--rw=write", "--bs=1M", "--end_fsync=1")

    def run() -> Run:
        read = _fio(
            file, size, "--rw=randread", f"--bs={SIZE}", "--direct=1", "--ioengine=io_uring",
            f"--iodepth={BATCH * UNDER_WAY}", "--time_based", f"--runtime={seconds}",
            f"--cpus_allowed={max(os.sched_getaffinity(0))}",
        )["read"]  # fmt: skip
        latencies = Histogram()
        for nanoseconds, times in read["clat_ns"]["bins"].items():
            latencies.record(int(nanoseconds), times)
        return Run(read["total_ios"], read["io_bytes"], latencies, read["runtime"] / 1e3)

    yield Side(run)


def _fio(file: Path, size: int, *options: str) -> dict[str, Any]:
    """Run fio; return its result for its one job.  CouldNotRun with fio's own words."""
    command = ["fio", "--name=read", f"--filename={file}", f"--size={size}", *options]
    done = subprocess.run([*command, "--output-format=json+"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CouldNotRun(f"fio: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "random-4k",
        "4 KiB at random, cold, 32 under way",
        "operations_per_s",
        random_sides,
        generator="the engine is asked for 16 chunks at a time, which takes the generator a half of the engine's CPU",
        expected_s=35,
        targets=(
            Target("operations_per_s", at_least(0.5, "x"), FIO),
            Target("server_cpu_us", at_most(0.5, "x"), THREADS),
        ),
    ),
)
