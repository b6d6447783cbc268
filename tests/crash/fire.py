"""Garbage collection and compaction under fire: `test_gc_under_fire` runs a little of it, `make torture` more.

A real engine with small segments.  Writers put, remove and put again the same contents in tight loops, under names of
their own and under shared ones, and leave uploads behind.  Holders keep what they were granted (`grant_holders`), and
are stopped by SIGSTOP for whole cycles.  During all of this one cycle of gc follows the other, and every other one
compacts all that is worth anything.  Afterwards nothing is damaged and nothing is leaked.

    python -m tests.crash.fire --cycles 500 --seed 7
    python -m tests.crash.fire --cycles 60 --minutes 60     with all of them stopped between the cycles, for an hour
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import CorruptionError, KeyNotFound, OperationalError
from tests.crash.fire_contents import BUCKET, POOL, content_of, content_of_name
from tests.crash.grant_holders import hold
from tests.crash.quiet_store import inspect
from tests.crash.small_engine import SmallEngine
from tests.e2e.served import WAIT_S
from tests.sim.__main__ import say

WRITERS: Final = ("ann", "bob", "cem")
HOLDERS: Final = ("hal", "ivy")
STEPS_BETWEEN: Final = 8
"""Steps that the collector takes as a writer between two cycles, so that the others get as far."""
STOPPED_CYCLES: Final = 4
"""Cycles of gc that a stopped holder sleeps through."""
_SLOTS: Final = 8
_UPLOADS_MAX: Final = 4
_FORK: Final = multiprocessing.get_context("fork")
Role = Callable[[str, str, int], dict[str, int]]


@dataclass
class Writer:
    """A client that puts, removes and puts again; nobody else touches its own names."""

    lake: Lake
    name: str
    chance: random.Random
    mine: set[str] = field(default_factory=set)
    uploads: list[Any] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)

    def act(self) -> None:
        """Do one step."""
        step = self.chance.choices(
            (self._put, self._put_many, self._remove, self._again, self._shared, self._upload), (5, 1, 6, 3, 2, 1)
        )[0]
        try:
            step()
        except OperationalError as error:
            self.figures[f"retryable {type(error).__name__}"] += 1
        except CorruptionError as error:
            raise AssertionError(f"{self.name}: {error}") from error
        else:
            self.figures["steps"] += 1

    def _new_name(self) -> str:
        label = self.chance.choice(POOL) if self.chance.random() < 0.4 else f"u{self.chance.random()}"
        return f"{BUCKET}/{self.name}{self.chance.randrange(_SLOTS)}-{label}"

    def _put(self) -> None:
        name = self._new_name()
        self.lake.put(name, content_of_name(name))
        self.mine.add(name)
        self._check(name)

    def _put_many(self) -> None:
        names = {self._new_name() for _ in range(10)}
        small = {name: content_of_name(name) for name in names if len(content_of_name(name)) < 65_536}
        self.lake.put_many(list(small.items()))
        self.mine.update(small)

    def _remove(self) -> None:
        for name in self.chance.sample(sorted(self.mine), min(4, len(self.mine))):
            self._check(name)
            assert self.lake.remove(name), f"{name} was not there"
            self.mine.discard(name)
            assert not self.lake.exists(name), f"{name} is still there"

    def _again(self) -> None:
        """Remove and put the same content a few times without a pause."""
        name = f"{BUCKET}/{self.name}-{self.chance.choice(POOL)}"
        for _ in range(4):
            self.lake.put(name, content_of_name(name))
            self._check(name)
            self.lake.remove(name)

    def _shared(self) -> None:
        """Use a name that others put and remove, too: it has its content, or is not there."""
        label = self.chance.choice(POOL)
        name = f"{BUCKET}/shared-{label}"
        if self.chance.random() < 0.5:
            self.lake.put(name, content_of(label))
        else:
            self.lake.remove(name)
        with suppress(KeyNotFound):
            assert self.lake.get(name) == content_of(label), f"{name} has other bytes"

    def _upload(self) -> None:
        """Begin an upload that nobody completes."""
        upload = self.lake.create_upload(f"{BUCKET}/{self.name}-upload")
        self.uploads.append(upload)
        self.lake.put_part(upload, 1, content_of(self.chance.choice(POOL)))
        if len(self.uploads) > _UPLOADS_MAX:
            self.lake.abort_upload(self.uploads.pop(0))

    def _check(self, name: str) -> None:
        assert self.lake.get(name) == content_of_name(name), f"{name} has other bytes"

    def end(self) -> None:
        """Check that all of its names are there with their bytes, and abort its uploads."""
        for name in sorted(self.mine):
            self._check(name)
        for upload in self.uploads:
            self.lake.abort_upload(upload)


def write(server: str, seed: str, ended: int) -> dict[str, int]:
    """Write until `ended` is closed."""
    with connect(server) as lake:
        writer = Writer(lake, seed.partition(" ")[0], random.Random(seed))
        while not _is_closed(ended):
            writer.act()
        writer.end()
    return dict(writer.figures)


class Fire:
    """One store under fire.  `close` ends what runs."""

    def __init__(self, folder: Path, seed: str, program: list[str] | None = None) -> None:
        self._folder = folder
        self._seed = seed
        self._chance = random.Random(seed)
        # Without a DRAM tier: the holders get places in segments only.
        self.engine = SmallEngine(folder, "--log-level", "warning", "--dram-tier-bytes", "0")
        if program is not None:
            self.engine.stop()
            self.engine.program = program
            self.engine.start()
        with connect(self.engine.server) as lake:
            lake.create_bucket(BUCKET)
        self.figures: Counter[str] = Counter()
        self._running: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join()
        if self.engine.process is not None and self.engine.process.poll() is None:
            self.engine.kill()

    def run(self, cycles: int, minutes: float = 0.0) -> None:
        """Run so many cycles of gc under fire, and look at what is left.  Raises AssertionError.

        For `minutes` at least: clients are stopped between the cycles, with all that they hold.
        """
        ended, end = os.pipe()
        os.set_blocking(ended, False)
        for name in WRITERS:
            self._start(name, write, ended, end)
        for name in HOLDERS:
            self._start(name, hold, ended, end)
        os.close(ended)
        try:
            self._collect(cycles, minutes * 60 / cycles)
        finally:
            os.close(end)
        self._join()
        self._look()

    def _start(self, name: str, role: Role, ended: int, end: int) -> None:
        arguments = (role, self.engine.server, f"{name} {self._seed}", ended, end, self._result(name))
        process = _FORK.Process(target=_play, args=arguments)
        process.start()
        self._running[name] = process

    def _result(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _collect(self, cycles: int, rest_s: float) -> None:
        """Run gc, one cycle after the other; stop a holder now and then for some of them."""
        stopped = ""
        with connect(self.engine.server) as lake:
            own = Writer(lake, "col", self._chance)
            for number in range(cycles):
                for _ in range(STEPS_BETWEEN):
                    own.act()
                if number % (STOPPED_CYCLES + 2) == 2:
                    stopped = self._chance.choice(HOLDERS)
                    os.kill(self._running[stopped].pid, signal.SIGSTOP)
                    self.figures["stops"] += 1
                report = lake.gc(compact=number % 2 == 0)
                self.figures["cycles"] += 1
                self.figures["freed chunks"] += report["freed_chunks"]
                self.figures["moved chunks"] += report["compaction"]["moved_chunks"]
                self.figures["segments removed"] += (
                    report["removed_segments"] + report["compaction"]["removed_segments"]
                )
                if report["compaction"]["unreadable_chunks"]:
                    assert lake.fsck()["damage"] == 0, f"damage: {report}"
                if stopped and number % (STOPPED_CYCLES + 2) == 0:
                    os.kill(self._running[stopped].pid, signal.SIGCONT)
                    stopped = ""
                dead = [name for name, process in self._running.items() if not process.is_alive()]
                assert not dead, "; ".join(f"{name} ended: {self._told(name)}" for name in dead)
                if rest_s:
                    self._rest(rest_s, stopped)
            own.end()
        if stopped:
            os.kill(self._running[stopped].pid, signal.SIGCONT)

    def _rest(self, seconds: float, stopped: str) -> None:
        """Stop all clients for so long, wherever they are; then let all but `stopped` go on."""
        pids = [process.pid for name, process in self._running.items() if name != stopped]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def _join(self) -> None:
        for name, process in self._running.items():
            process.join(WAIT_S)
            assert process.exitcode == 0, f"{name} ended with {process.exitcode}: {self._told(name)}"
            self.figures.update(json.loads(self._told(name)))

    def _told(self, name: str) -> str:
        path = self._result(name)
        return path.read_text() if path.exists() else "it said nothing"

    def _look(self) -> None:
        """Check that nothing is damaged, and that what nobody refers to is gone."""
        with connect(self.engine.server) as lake:
            assert lake.fsck(full=True)["damage"] == 0
            for _ in range(2):
                lake.gc(compact=True)
        self.engine.kill()
        for _ in range(2):
            found = inspect(self.engine.data)
            assert found.fsck["damage"] == 0, found.fsck
            assert found.leaked_bytes <= 0, found

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.figures.items())


def _play(role: Role, server: str, seed: str, ended: int, end: int, result: Path) -> None:
    """Play a role in a process of its own; write its figures, or its traceback, to a file."""
    os.close(end)
    try:
        told = json.dumps(role(server, seed, ended))
    except BaseException:
        result.write_text(traceback.format_exc())
        raise
    result.write_text(told)


def _is_closed(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False


def main() -> int:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.fire")
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=0.0, help="at least; the clients rest between cycles")
    parser.add_argument("--seed", default=str(int(time.time())))
    asked = parser.parse_args()
    began = time.monotonic()
    with TemporaryDirectory(prefix="lake-") as folder, Fire(Path(folder), asked.seed) as fire:
        try:
            fire.run(asked.cycles, asked.minutes)
        except AssertionError as error:
            say(f"{error}\nagain, as far as the clock allows: python -m tests.crash.fire --seed {asked.seed}")
            say(f"FAILED after {fire}")
            return 1
        say(f"gc under fire in {time.monotonic() - began:.0f} s: {fire}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
