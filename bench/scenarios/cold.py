"""A large object read with nothing in memory, against fio, dd and a plain reader on the same disk.

Pages are dropped with posix_fadvise(DONTNEED) before each measurement: those of the store's segments, or of the plain
file.  A hypervisor's cache below the disk serves all sides.  Ours is checked; the others are not.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import write_file
from bench.harness.contest import CouldNotRun
from bench.harness.measure import Bench, Scenario, at_least
from bench.harness.mounts import forget_pages, forget_pages_below
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from bench.peers.fio import Job, fio
from lakefs.content.verify import Check

FULL: Final = 512 << 20
QUICK: Final = 8 << 20
BLOCK: Final = 1 << 20
FIO: Final = "fio, O_DIRECT, 1 MiB"
WITHOUT_TIER: Final = ("--dram-tier-bytes", "0")
"""The tier would keep in memory what is read twice."""
_Read = Callable[[], None]


@contextmanager
def sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: one object, one file of the same bytes, one buffer that was touched before."""
    size = bench.scale.pick(FULL, QUICK)
    source = bench.folder / "source"
    write_file(source, size)
    buffer = memoryview(bytearray(size))
    for offset in range(0, size, 4096):
        buffer[offset] = 1
    with EngineProcess(bench.folder, *WITHOUT_TIER) as engine, engine.connect() as lake:
        lake.put("bench/x", source)
        os.sync()
        ours = partial(_ours, engine, size)
        file = partial(_of_file, source, size)
        yield [
            Entrant(OURS, partial(ours, Check.BLAKE3, partial(_get_into, buffer))),
            Entrant("ours, CRC32C", partial(ours, Check.CRC32C, partial(_get_into, buffer))),
            Entrant("ours, unverified", partial(ours, Check.NONE, partial(_get_into, buffer))),
            Entrant("ours, open() and 1 MiB reads", partial(ours, Check.BLAKE3, partial(_read_on, buffer))),
            Entrant(FIO, partial(_fio, source, Job("read", BLOCK, size))),
            Entrant("fio, 8 in flight", partial(_fio, source, Job("read", BLOCK, size, depth=8))),
            Entrant("file, 1 MiB reads", partial(file, partial(_read_file, source, buffer))),
            Entrant("dd, O_DIRECT, 1 MiB", partial(file, partial(_dd, source, "iflag=direct"))),
            Entrant("dd, 1 MiB", partial(file, partial(_dd, source))),
        ]
        buffer.release()


@contextmanager
def _ours(engine: EngineProcess, size: int, check: Check, read: Callable[[lakefs.Lake], int]) -> Iterator[Side]:
    with engine.connect(check=check) as lake:

        def run() -> Run:
            assert read(lake) == size
            return Run(1, size)

        yield Side(run, lambda: forget_pages_below(engine.data), lambda: [engine.pid])


def _get_into(buffer: memoryview, lake: lakefs.Lake) -> int:
    return lake.get_into("bench/x", buffer)


def _read_on(buffer: memoryview, lake: lakefs.Lake) -> int:
    with lake.open("bench/x") as file:
        return _read_all(file.readinto, buffer)


def _read_all(readinto: Callable[[memoryview], int | None], buffer: memoryview) -> int:
    done = 0
    while count := readinto(buffer[done : done + BLOCK]):
        done += count
    return done


@contextmanager
def _fio(source: Path, job: Job) -> Iterator[Side]:
    yield Side(fio(source, job), lambda: forget_pages(source))


@contextmanager
def _of_file(source: Path, size: int, read: _Read) -> Iterator[Side]:
    def run() -> Run:
        read()
        return Run(1, size)

    yield Side(run, lambda: forget_pages(source))


def _read_file(source: Path, buffer: memoryview) -> None:
    with source.open("rb", buffering=0) as file:
        assert _read_all(file.readinto, buffer) == len(buffer)


def _dd(source: Path, *flags: str) -> None:
    done = subprocess.run(
        ["dd", f"if={source}", "of=/dev/null", "bs=1M", "status=none", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CouldNotRun(done.stderr.strip())


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "cold",
        "512 MiB read in order, cold",
        "bytes_per_s",
        sides,
        generator=ALONE,
        expected_s=35,
        targets=(Target("bytes_per_s", at_least(0.9, "x"), FIO),),
    ),
)
