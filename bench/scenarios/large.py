"""One large file in and out, like `lake put` and `lake get`, and the engine's memory during it.

Times are taken inside the client, without the interpreter's start.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import blake3

import lakefs
from bench.harness.content import renew_file, write_file
from bench.harness.measure import Bench, Figure, Scenario, Single, at_least, at_most, timed
from bench.harness.process import EngineProcess, MemoryWatch
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from lakefs.client.facade import driver_of
from lakefs.names import Name
from lakefs.trees.get_file import GetOptions, get_to_file
from lakefs.trees.walk import Observer

FULL: Final = 4 << 30
QUICK: Final = 24 << 20
MEMORY_LIMIT: Final = float(256 << 20)


DD: Final = "dd conv=fsync"
COPY: Final = "cp, then BLAKE3 of it"


@contextmanager
def put_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: `put` of a file that is new to the store, against dd with fsync; both from the page cache."""
    size = bench.scale.pick(FULL, QUICK)
    source = bench.folder / "source"
    write_file(source, size)
    yield [Entrant(OURS, partial(_putting, bench, source, size)), Entrant(DD, partial(_dd, bench, source, size))]


@contextmanager
def _putting(bench: Bench, source: Path, size: int) -> Iterator[Side]:
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:

        def prepare() -> None:
            if lake.exists("bench/x"):
                lake.remove("bench/x")
                lake.gc()
            renew_file(source)

        def run() -> Run:
            elapsed_s = timed(lambda: lake.put("bench/x", source))
            return Run(1, size, elapsed_s=elapsed_s, stored_bytes=size)

        yield Side(run, prepare, lambda: [engine.pid])


@contextmanager
def _dd(bench: Bench, source: Path, size: int) -> Iterator[Side]:
    copy = bench.folder / "copy"
    command = ["dd", f"if={source}", f"of={copy}", "bs=4M", "conv=fsync", "status=none"]

    def prepare() -> None:
        copy.unlink(missing_ok=True)
        renew_file(source)

    def run() -> Run:
        elapsed_s = timed(lambda: subprocess.run(command, check=True))
        return Run(1, size, elapsed_s=elapsed_s, stored_bytes=size)

    yield Side(run, prepare)


@contextmanager
def get_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: a verified `get` into a new file, against cp and a hash of the same bytes; all in the page
    cache."""
    size = bench.scale.pick(FULL, QUICK)
    source = bench.folder / "source"
    write_file(source, size)
    yield [Entrant(OURS, partial(_getting, bench, source, size)), Entrant(COPY, partial(_copying, bench, source, size))]


@contextmanager
def _getting(bench: Bench, source: Path, size: int) -> Iterator[Side]:
    target = bench.folder / "target"
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        lake.put("bench/x", source)

        def run() -> Run:
            return Run(1, size, elapsed_s=timed(lambda: _get(lake, target)))

        yield Side(run, lambda: target.unlink(missing_ok=True), lambda: [engine.pid])


@contextmanager
def _copying(bench: Bench, source: Path, size: int) -> Iterator[Side]:
    target = bench.folder / "copy"

    def run() -> Run:
        copied_s = timed(lambda: subprocess.run(["cp", source, target], check=True))
        return Run(1, size, elapsed_s=copied_s + timed(lambda: hash_file(source)))

    yield Side(run, lambda: target.unlink(missing_ok=True))


def hash_file(path: Path) -> bytes:
    """Return the BLAKE3 of a file: one thread, read in pieces of 4 MiB, like b3sum with one thread."""
    hasher = blake3.blake3()
    buffer = bytearray(4 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return hasher.digest()


def _get(lake: lakefs.Lake, target: Path) -> None:
    driver = driver_of(lake)
    driver.run(get_to_file(driver.steps, Name("bench", "x"), str(target), GetOptions(), Observer()))


def measure_memory(bench: Bench) -> dict[str, float]:
    """Return the engine's own memory while files are stored (read by the engine, then through the socket) and
    fetched."""
    size = bench.scale.pick(2 << 30, QUICK)
    source, target = bench.folder / "source", bench.folder / "target"
    write_file(source, size)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake, MemoryWatch(engine) as memory:
        for number in range(4):
            renew_file(source)
            if number % 2:
                with source.open("rb") as stream:
                    lake.put("bench/x", stream)
            else:
                lake.put("bench/x", source)
            _get(lake, target)
            target.unlink()
            lake.remove("bench/x")
            lake.gc()
    os.unlink(source)
    return {**memory.figures(), "bytes each way": float(4 * size)}


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "put-large",
        "put of 4 GiB, durable",
        "bytes_per_s",
        put_sides,
        generator=ALONE,
        expected_s=115,
        targets=(Target("bytes_per_s", at_least(0.8, "x"), DD),),
        stores=True,
    ),
    Sampled(
        "get-large",
        "get of 4 GiB, hot, verified BLAKE3, to a new file",
        "bytes_per_s",
        get_sides,
        generator=ALONE,
        expected_s=85,
        targets=(Target("bytes_per_s", at_least(0.8, "x"), COPY),),
    ),
)
MEMORY_SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "memory-large",
        "engine memory while 8 GiB go in and out",
        (Figure("RssAnon", at_most(MEMORY_LIMIT), "B"), Figure("with RssShmem", at_most(MEMORY_LIMIT), "B")),
        measure_memory,
    ),
)
