"""Native appends, a gain measured: programs write at the end of a file, on a mount with them and on one without.

With them the mount's native threads write the next bytes of a file that is longer than 256 KiB, without the
interpreter.  The second mount is one of `bench.peers.lake_without_appends`, whose every write is Python's.  Both mount
one store, and have native reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.harness.content import window
from bench.harness.gains import ALL_CPU, NO_DEARER, SHOWN, WORTH_IT, counted
from bench.harness.measure import Bench, Goal, Scenario
from bench.harness.mounts import lake_mounted
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target

WITHOUT_APPENDS: Final = "without native appends"
LINE: Final = b"2026-11-29T01:02:03.456789Z worker-07 INFO step=00012345 loss=1.234567 lr=0.000300 tokens=1048576 ok\n"
LOG_BYTES: Final = 1 << 20
"""Length of a log that is appended to: longer than files need to be for native appends."""
_Write = Callable[[Path, int], None]
"""Writes that many times to the end of a file."""


def _lines(path: Path, count: int) -> None:
    """Write lines, each with a call of its own, as loggers do."""
    with _appending(path) as descriptor:
        for _ in range(count):
            os.write(descriptor, LINE)


def _synced_lines(path: Path, count: int) -> None:
    """Write lines with fsync after each."""
    with _appending(path) as descriptor:
        for _ in range(count):
            os.write(descriptor, LINE)
            os.fsync(descriptor)


def _lines_opened_each(path: Path, count: int) -> None:
    """Write lines as `echo line >> log` does: the file is opened and closed for each."""
    for _ in range(count):
        with _appending(path) as descriptor:
            os.write(descriptor, LINE)


def _blocks(size: str) -> _Write:
    """Return dd with blocks of that size."""

    def write(path: Path, count: int) -> None:
        dd = ["dd", "if=/dev/zero", f"of={path}", f"bs={size}", f"count={count}", "oflag=append", "conv=notrunc"]
        subprocess.run(dd, check=True, stderr=subprocess.DEVNULL)

    return write


@contextmanager
def _appending(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _append_sides(write: _Write, full: int, quick: int, bytes_each: int, bench: Bench) -> Iterator[Sequence[Entrant]]:
    count = bench.scale.pick(full, quick)
    with EngineProcess(bench.folder) as engine, engine.connect():
        side = partial(_append_side, bench, engine, write, count, bytes_each)
        without = [sys.executable, "-m", "bench.peers.lake_without_appends"]
        yield [Entrant(OURS, partial(side, "with", [])), Entrant(WITHOUT_APPENDS, partial(side, "without", without))]


@contextmanager
def _append_side(
    bench: Bench, engine: EngineProcess, write: _Write, count: int, bytes_each: int, name: str, lake: Sequence[str]
) -> Iterator[Side]:
    folder = bench.folder / name
    folder.mkdir()
    with lake_mounted(engine, folder, lake=lake) as mount:
        path = mount.folder / "bench" / name

        def begin_log() -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(window(LOG_BYTES))
            os.sync()

        def run() -> Run:
            write(path, count)
            return Run(count, count * bytes_each)

        yield counted(run, begin_log, [mount.process.pid, engine.pid])


def _appends(name: str, title: str, write: _Write, full: int, quick: int, bytes_each: int, goal: Goal) -> Sampled:
    return Sampled(
        f"gain-appends-{name}",
        f"mount: {title}",
        "operations_per_s",
        partial(_append_sides, write, full, quick, bytes_each),
        generator=ALONE,
        expected_s=15,
        targets=(Target(ALL_CPU, goal, WITHOUT_APPENDS), Target("operations_per_s", SHOWN, WITHOUT_APPENDS)),
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _appends("lines", "log of 102-byte lines", _lines, 20_000, 200, len(LINE), WORTH_IT),
    _appends("synced", "log of 102-byte lines, fsync each", _synced_lines, 60, 10, len(LINE), NO_DEARER),
    _appends("opened", "log of 102-byte lines, opened for each", _lines_opened_each, 60, 10, len(LINE), NO_DEARER),
    _appends("4k", "dd oflag=append, 64 MiB by 4 KiB", _blocks("4k"), 16384, 100, 4096, WORTH_IT),
    _appends("1m", "dd oflag=append, 512 MiB by 1 MiB", _blocks("1M"), 512, 4, 1 << 20, NO_DEARER),
)
