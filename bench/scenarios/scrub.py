"""Scrub at full speed against `b3sum` over the same segment files: from the disk, and from memory.

b3sum is Debian's; it maps the files and hashes with all processors, BLAKE3 only.  Scrub compares CRC32C too, and
reads past the page cache, so on a disk it is always cold; for b3sum the files' pages are dropped before each run.
From memory both read on tmpfs, which cannot be read past the cache: there the rate is that of the hashes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import payload, window
from bench.harness.measure import Bench, Paired, Scenario, Sides, at_least, timed
from bench.harness.process import EngineProcess
from lakefs.limits import MIB

FULL: Final = 1 << 30
QUICK: Final = 24 << 20
STEP_S: Final = 30.0
MEMORY_FOLDER: Final = "/dev/shm"
OBJECT_BYTES: Final = 16 * MIB
SMALL_BYTES: Final = 4 << 10
SMALL_FULL: Final = 40_000
SMALL_QUICK: Final = 200
SMALL_PART: Final = 64
"""One in this many bytes of the store is in small chunks."""


@contextmanager
def cold_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: on the measured disk; large objects, and some small ones."""
    size = bench.scale.pick(FULL, QUICK)
    with EngineProcess(bench.folder, "--scrub-interval", "0") as engine, engine.connect() as lake:
        _put_large(lake, size)
        _put_small(lake, size // SMALL_PART // SMALL_BYTES)
        yield _sides(engine, lake)


@contextmanager
def memory_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: the same on tmpfs."""
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER, prefix="lake-bench-") as folder:
        with cold_sides(Bench(Path(folder), bench.scale)) as sides:
            yield sides


@contextmanager
def small_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: on the measured disk; only small objects."""
    with EngineProcess(bench.folder, "--scrub-interval", "0") as engine, engine.connect() as lake:
        _put_small(lake, bench.scale.pick(SMALL_FULL, SMALL_QUICK))
        yield _sides(engine, lake)


def _sides(engine: EngineProcess, lake: lakefs.Lake) -> Sides:
    files = sorted((engine.data / "segments").iterdir())
    stored = _pass(lake)
    cpu: list[float] = []

    def drop() -> None:
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def ours() -> float:
        before = engine.cpu_s()
        elapsed_s = timed(lambda: _pass(lake))
        cpu.append(engine.cpu_s() - before)
        return stored / elapsed_s / MIB

    def theirs() -> float:
        held = sum(path.stat().st_blocks * 512 for path in files)
        return held / MIB / timed(lambda: _run(["b3sum", *map(str, files)]))

    return Sides(ours, theirs, drop, lambda: {"engine CPU s/GiB": (1 << 30) / stored * sum(cpu) / len(cpu)})


def _put_large(lake: lakefs.Lake, size: int) -> None:
    for number in range(size // OBJECT_BYTES):
        lake.put(f"bench/large/{number}", window(OBJECT_BYTES))


def _put_small(lake: lakefs.Lake, count: int) -> None:
    lake.put_many([(f"bench/small/{number}", payload(SMALL_BYTES)) for number in range(count)])


def _pass(lake: lakefs.Lake) -> int:
    """Run a whole pass; return the number of bytes it checked."""
    report = lake.scrub(for_s=STEP_S, rate_bytes_per_s=0, restart=True)
    while not report["done"]:
        report = lake.scrub(for_s=STEP_S, rate_bytes_per_s=0)
    assert not report["quarantined_chunks"], report
    return int(report["last_pass"]["checked_bytes"])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


_GOAL: Final = at_least(0.8, "x")
SCENARIOS: Final[tuple[Scenario, ...]] = tuple(
    Paired(name, title, "MiB/s", _GOAL, set_up, needs="b3sum")
    for name, title, set_up in (
        ("scrub", "scrub / b3sum of the same files, from the disk", cold_sides),
        ("scrub-memory", "the same, from memory (tmpfs)", memory_sides),
        ("scrub-small", "the same, objects of 4 KiB only, from the disk", small_sides),
    )
)
