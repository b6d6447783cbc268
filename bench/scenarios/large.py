"""One large file in and out, as `lake put` and `lake get` do it, and what the engine holds in memory meanwhile.

Times are taken inside the client, without the interpreter's start.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import blake3

import lakefs
from bench.content import renew_file, write_file
from bench.measure import Bench, Figure, Paired, Scenario, Sides, Single, at_least, at_most, timed
from bench.process import EngineProcess, MemoryWatch
from lakefs.file_getting import GetOptions, get_to_file
from lakefs.names import Name
from lakefs.trees import Observer

FULL: Final = 4 << 30
QUICK: Final = 24 << 20
MEMORY_LIMIT: Final = float(256 << 20)


@contextmanager
def put_sides(bench: Bench) -> Iterator[Sides]:
    """`put` of a file that the store has never seen, against dd with fsync; both from the page cache."""
    size = bench.scale.pick(FULL, QUICK)
    source, copy = bench.folder / "source", bench.folder / "copy"
    write_file(source, size)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:

        def prepare() -> None:
            copy.unlink(missing_ok=True)
            if lake.exists("bench/x"):
                lake.remove("bench/x")
                lake.gc()
            renew_file(source)

        def ours() -> float:
            before = engine.cpu_s()
            elapsed_s = timed(lambda: lake.put("bench/x", source))
            cpu.append(engine.cpu_s() - before)
            return size / elapsed_s

        def theirs() -> float:
            command = ["dd", f"if={source}", f"of={copy}", "bs=4M", "conv=fsync", "status=none"]
            return size / timed(lambda: subprocess.run(command, check=True))

        cpu: list[float] = []
        per_gib = (1 << 30) / size
        yield Sides(ours, theirs, prepare, lambda: {"engine CPU s/GiB": per_gib * sum(cpu) / len(cpu)})


@contextmanager
def get_sides(bench: Bench) -> Iterator[Sides]:
    """A verified `get` into a new file, against cp and a hash of the same bytes; all of it in the page cache."""
    size = bench.scale.pick(FULL, QUICK)
    source, target = bench.folder / "source", bench.folder / "target"
    write_file(source, size)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        lake.put("bench/x", source)

        def ours() -> float:
            return timed(lambda: _get(lake, target))

        def theirs() -> float:
            copied_s = timed(lambda: subprocess.run(["cp", source, target], check=True))
            return copied_s + timed(lambda: hash_file(source))

        yield Sides(ours, theirs, lambda: target.unlink(missing_ok=True))


def hash_file(path: Path) -> bytes:
    """BLAKE3 of a file, one thread, read in pieces of 4 MiB, as b3sum would with one thread."""
    hasher = blake3.blake3()
    buffer = bytearray(4 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(view[:count])
    return hasher.digest()


def _get(lake: lakefs.Lake, target: Path) -> None:
    lake.run(get_to_file(lake.steps, Name("bench", "x"), str(target), GetOptions(), Observer()))


def measure_memory(bench: Bench) -> dict[str, float]:
    """The engine's own memory while files go in (read by the engine, then through the socket) and out."""
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
    Paired(
        "put-large",
        "put of 4 GiB, durable / dd conv=fsync",
        "B/s",
        at_least(0.8, "x"),
        put_sides,
    ),
    Paired(
        "get-large",
        "get of 4 GiB, hot, verified BLAKE3 / cp, then a BLAKE3 of it",
        "s",
        at_most(1.25, "x"),
        get_sides,
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
