"""The ways of a mount to answer reads: Python alone (`-o native=off`), native threads, passthrough of hot files.

Three mounts of one store do the same work in turn, round after round, in an order that changes.  A row compares
a way with Python alone; beside it are both figures, and the CPU time of the mounts' own processes for them.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lakefs
from bench.harness.content import payload, write_file
from bench.harness.cpu import cpu_s
from bench.harness.measure import Bench, Goal, Row, at_least, at_most, spread_of, three_digits, timed
from bench.harness.mounts import MountProcess, forget_pages, lake_mounted
from bench.harness.process import EngineProcess
from bench.peers.fio import Job, fio
from bench.scenarios.mount import (
    DIRECT_BYTES,
    READ_BYTES,
    THREADS,
    clone,
    copy_files,
    fill,
    keep_freed_memory,
    make_files,
    make_repository,
    read_whole,
    write_model,
)

WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "native off": ("-o", "native=off"),
    "native": ("--hot-memory", "0"),
    "passthrough": (),
}
"""Ways by name, with the options of their mounts; the last is the default."""
LIKE_BEFORE: Final = at_most(1.05, "x")
"""Goal of the work that native code does not answer: it costs as much as without it."""

Work = Callable[[Path], float]
"""Does the work once in a mount's bucket; returns the seconds, or the rate, in the scenario's unit."""


@dataclass(frozen=True)
class Ways:
    """A scenario: `set_up` stores what is needed, before the mounts, and returns what runs a round on one of them.

    `counts_cpu`: the figure is the CPU time of the mount's process, for work whose seconds are mostly the engine's and
    the disk's.
    """

    name: str
    title: str
    unit: str
    goal: Goal
    set_up: Callable[[Bench, lakefs.Lake], AbstractContextManager[Work]]
    counts_cpu: bool = False

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Run it; return a row for each way but the first, and all measured values."""
        figures: dict[str, list[float]] = {way: [] for way in WAYS}
        cpu: dict[str, list[float]] = {way: [] for way in WAYS}
        with ExitStack() as stack:
            engine = stack.enter_context(EngineProcess(bench.folder))
            lake = stack.enter_context(engine.connect())
            work = stack.enter_context(self.set_up(bench, lake))
            mounts: dict[str, MountProcess] = {}
            for number, (way, options) in enumerate(WAYS.items()):
                folder = bench.folder / f"way{number}"
                folder.mkdir()
                mounts[way] = stack.enter_context(lake_mounted(engine, folder, *options))
            order = list(mounts)
            for number in range(-2, bench.scale.rounds):  # the first two fill caches, and hot files
                for way in order:
                    before = cpu_s([mounts[way].process.pid])
                    figure = work(mounts[way].folder / "bench")
                    if number >= 0:
                        figures[way].append(figure)
                        cpu[way].append(cpu_s([mounts[way].process.pid]) - before)
                order = order[1:] + order[:1]
        rows = [self._row(way, figures, cpu) for way in list(WAYS)[1:]]
        return rows, {"unit": self.unit, "figures": figures, "cpu_s": cpu}

    def _row(self, way: str, figures: Mapping[str, list[float]], cpu: Mapping[str, list[float]]) -> Row:
        first = next(iter(WAYS))
        compared = cpu if self.counts_cpu else figures
        ratios = [mine / other for mine, other in zip(compared[way], compared[first], strict=True)]
        ratio = statistics.median(ratios)
        both = " against ".join(three_digits(statistics.median(figures[each])) for each in (way, first))
        spent = " against ".join(three_digits(statistics.mean(cpu[each])) for each in (way, first))
        return Row(
            self.name,
            f"{self.title}: {way} / {first}",
            ratio,
            "x",
            self.goal.text,
            self.goal.met(ratio),
            spread_of(ratios),
            f"{both} {self.unit}; the mount's CPU s {spent}",
        )


# --- what is read ------------------------------------------------------------------------------------------


REREADS: Final = 8
"""One takes 30 to 40 ms, of which other work on the machine easily takes a part."""


def reading(*, hot: bool) -> Callable[[Bench, lakefs.Lake], AbstractContextManager[Work]]:
    """Return sequential reads of one object; `hot`: the kernel keeps the mount's pages, and the rate is of REREADS."""

    @contextmanager
    def work(bench: Bench, lake: lakefs.Lake) -> Iterator[Work]:
        size = bench.scale.pick(256 << 20, 8 << 20)
        _put_file(bench, lake, size)
        buffer = bytearray(READ_BYTES)

        def reread(folder: Path) -> None:
            for _ in range(REREADS):
                read_whole(folder / "x", buffer)

        def run(folder: Path) -> float:
            if hot:
                return REREADS * size / timed(lambda: reread(folder))
            forget_pages(folder / "x")
            return size / timed(lambda: read_whole(folder / "x", buffer))

        yield run

    return work


@contextmanager
def reading_directly(bench: Bench, lake: lakefs.Lake) -> Iterator[Work]:
    """Context manager: random reads of 4 KiB with O_DIRECT by the threads of fio."""
    size, count = bench.scale.pick(128 << 20, 8 << 20), bench.scale.pick(40_000, 400)
    _put_file(bench, lake, size)
    yield lambda folder: random_rate(folder / "x", count)


def random_rate(path: Path, count: int) -> float:
    """Return reads per second of `count` random reads of 4 KiB with O_DIRECT, by the threads of fio.  CouldNotRun."""
    done = fio(path, Job("randread", DIRECT_BYTES, count * DIRECT_BYTES, threads=THREADS))()
    return done.operations / done.elapsed_s


@contextmanager
def loading(bench: Bench, lake: lakefs.Lake) -> Iterator[Work]:
    """Context manager: `safe_open` of a model, every tensor copied."""
    from safetensors import safe_open

    local = bench.folder / "model"
    write_model(local, bench.scale.pick(200_000_000, 4_000_000))
    lake.put("bench/x", local)
    local.unlink()

    def load(path: Path) -> None:
        with safe_open(path, framework="np") as model:
            for name in model.keys():  # noqa: SIM118 - it is no mapping
                model.get_tensor(name).copy()

    def run(folder: Path) -> float:
        keep_freed_memory()
        return timed(lambda: load(folder / "x"))

    yield run


@contextmanager
def opening(bench: Bench, lake: lakefs.Lake) -> Iterator[Work]:
    """Context manager: open, read and close of short files that were read before; the figure is one file's."""
    count = bench.scale.pick(1000, 50)
    lake.put_many([(f"bench/f{number}", payload(4096)) for number in range(count)])
    buffer = bytearray(8192)

    def read_all(folder: Path) -> None:
        for number in range(count):
            descriptor = os.open(folder / f"f{number}", os.O_RDONLY)
            os.readv(descriptor, [buffer])
            os.close(descriptor)

    yield lambda folder: timed(lambda: read_all(folder)) / count


def _put_file(bench: Bench, lake: lakefs.Lake, size: int) -> None:
    source = bench.folder / "source"
    write_file(source, size)
    lake.put("bench/x", source)
    source.unlink()


# --- what native code does not answer ----------------------------------------------------------------------


def making(
    make: Callable[[Path, int], None], copy: Callable[[Path, Path], object], full: int
) -> Callable[[Bench, lakefs.Lake], AbstractContextManager[Work]]:
    """Return work that makes many files from a local source."""

    @contextmanager
    def work(bench: Bench, lake: lakefs.Lake) -> Iterator[Work]:
        source = bench.folder / "small"
        make(source, bench.scale.pick(full, 60))
        lake.put("bench/.first", b"")
        numbers = itertools.count()

        def run(folder: Path) -> float:
            target = folder / f"t{next(numbers)}"
            os.sync()
            return timed(lambda: copy(source, target))

        yield run

    return work


WALKS: Final = 10
"""One walk takes the mount a few hundredths of a second of CPU, where its timers and threads weigh, too."""


def walking(*command: str) -> Callable[[Bench, lakefs.Lake], AbstractContextManager[Work]]:
    """Return a command that walks many files, run `WALKS` times; the figure is for all."""

    @contextmanager
    def work(bench: Bench, lake: lakefs.Lake) -> Iterator[Work]:
        fill(lake, [f"w/d{number // 500:03}/f{number:05}" for number in range(bench.scale.pick(20_000, 300))])
        program, *options = command

        def walk(folder: Path) -> None:
            for _ in range(bench.scale.pick(WALKS, 1)):
                subprocess.run([program, folder / "w", *options], check=True, stdout=subprocess.DEVNULL)

        yield lambda folder: timed(lambda: walk(folder))

    return work


SCENARIOS: Final[tuple[Ways, ...]] = (
    Ways(
        "mount-ways-read",
        "mount: sequential read of 256 MiB, its pages dropped",
        "B/s",
        at_least(1, "x"),
        reading(hot=False),
    ),
    Ways("mount-ways-reread", "mount: hot re-read of 256 MiB", "B/s", at_least(0.95, "x"), reading(hot=True)),
    Ways(
        "mount-ways-random",
        "mount: random 4 KiB reads, O_DIRECT, 8 threads",
        "op/s",
        at_least(1, "x"),
        reading_directly,
    ),
    Ways("mount-ways-tensors", "mount: safe_open of 200 MB, every tensor copied, hot", "s", LIKE_BEFORE, loading),
    Ways("mount-ways-open", "mount: open, read and close of a short file, hot", "s", LIKE_BEFORE, opening),
    Ways(
        "mount-ways-cp",
        "mount: CPU of its process, cp -a of 1,000 files of 4 KiB",
        "s",
        LIKE_BEFORE,
        making(make_files, copy_files, 1000),
        counts_cpu=True,
    ),
    Ways(
        "mount-ways-git",
        "mount: CPU of its process, git clone with 1,000 files",
        "s",
        LIKE_BEFORE,
        making(make_repository, clone, 1000),
        counts_cpu=True,
    ),
    Ways(
        "mount-ways-find",
        "mount: CPU of its process, find over 20,000 files, known, ten times",
        "s",
        LIKE_BEFORE,
        walking("find", "-size", "+1G"),
        counts_cpu=True,
    ),
)
