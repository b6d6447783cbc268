"""Cycles of SIGKILL under programs on a mount: of the engine, of the mount, or of both.

After each, everything is compared with the programs' journals (`tests.crash.mount_writer`), through the mount and
through the engine.  A killed engine is started again while the mount and the programs on it go on; a killed mount is
mounted again.

    python -m tests.crash.mount_cycles --count 200 --seed 7
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import select
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from engine.host.failpoints import UPKEEP_POINTS, WRITE_POINTS
from fuse.kernel.mount_point import mount_at, unmount
from lakefs.client.connect import connect
from tests.crash.mount_writer import FOLDER, FileWriter, State, digest_of, read_known, resolve, state_below, sync_path
from tests.crash.quiet_store import inspect
from tests.crash.small_engine import PLANTED_LAKE, WarmEngine
from tests.e2e.served import Process, environment

WRITERS: Final = ("ann", "bob")
LOSSES: Final = ("engine", "engine", "mount", "both")
_BUCKET: Final = "crash"
_FORK: Final = multiprocessing.get_context("fork")
_POLL_S: Final = 0.02
_SEEN_S: Final = 60.0


@dataclass
class MountTally:
    """The results of the cycles."""

    began: float = field(default_factory=time.monotonic)
    losses: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    returned: int = 0
    failed: int = 0

    @property
    def cycles(self) -> int:
        """Number of cycles."""
        return sum(self.losses.values())

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        losses = ", ".join(f"{count} of {loss}" for loss, count in sorted(self.losses.items()))
        return (
            f"{self.cycles} cycles of SIGKILL under a mount in {seconds:.0f} s: {losses}; "
            f"{sum(self.steps.values())} engines died at {len(self.steps)} named steps, "
            f"{self.returned} changes returned and were held, {self.failed} failed"
        )


class MountCycles:
    """One store and one mount of it.  `close` ends what runs."""

    def __init__(self, folder: Path, seed: str, *, bug: str = "") -> None:
        """`bug`: one of `tests.crash.planted_lake`, for every mount."""
        self._folder = folder
        self._seed = seed
        self._generator = random.Random(seed)
        self.tally = MountTally()
        self._bug = bug
        self.place = folder / "mnt"
        self.place.mkdir()
        self.engine = WarmEngine(folder, "--log-level", "error")
        self._mount: Process | None = None
        self._synced = False
        with connect(self.engine.server) as client:
            client.create_bucket(_BUCKET)
        self._start_mount()
        for writer in WRITERS:
            (self.place / _BUCKET / writer).mkdir()
        sync_path(self.place / _BUCKET)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mount is not None:
            self._kill_mount()
        if mount_at(self.place) is not None:
            unmount(self.place, lazy=True)
        self.engine.close()

    def run(self, count: int, said: Callable[[str], None] = lambda _: None) -> None:
        """Run so many cycles; an AssertionError says how to repeat the one that failed."""
        for number in range(count):
            try:
                self._cycle(f"{self._seed} {number}")
            except AssertionError as error:
                again = f"python -m tests.crash.mount_cycles --seed {self._seed} --count {number + 1}"
                raise AssertionError(f"cycle {number}: {error}\nagain, as far as the clock allows: {again}") from error
            if (number + 1) % 20 == 0:
                said(str(self.tally))
        self._kill_mount()
        self.engine.kill()
        left = inspect(self.engine.data)
        assert left.fsck["damage"] == 0, left.fsck
        assert left.leaked_bytes <= 0, left

    def _cycle(self, seed: str) -> None:
        loss = self._generator.choice(LOSSES)
        stop = _FORK.Event()
        reading, writing = os.pipe()
        writers = [
            _FORK.Process(target=self._write, args=(writer, f"{writer} {seed}", writing, stop)) for writer in WRITERS
        ]
        for process in writers:
            process.start()
        os.close(writing)
        died = self._wait(reading, self._generator.randrange(2, 40))
        if died and loss == "mount":
            loss = "both"
        if loss in ("mount", "both"):
            self._kill_mount()
        if loss in ("engine", "both"):
            self._restart_engine()
        if loss == "engine":
            self._wait(reading, self._generator.randrange(1, 20))
            stop.set()
        for process in writers:
            process.join()
            assert process.exitcode == 0, "a writer failed: see its traceback"
        os.close(reading)
        if self.engine.process is not None and self.engine.process.poll() is not None:
            self._restart_engine()  # it died at its step, after the last change
            loss = "both" if loss == "mount" else loss
        if self._mount is None:
            self._start_mount()
        self._check(loss)
        self.tally.losses[loss] += 1
        if not self.engine.failpoint:
            self._arm()

    # --- what is lost ------------------------------------------------------------------------------

    def _wait(self, told: int, wanted: int) -> bool:
        """Wait until so many changes returned, or no writer is left; return whether the engine died at its step."""
        assert self.engine.process is not None
        while wanted > 0:
            if self.engine.process.poll() is not None:
                return True
            ready, _, _ = select.select([told], [], [], _POLL_S)
            if ready:
                got = os.read(told, wanted)
                wanted = wanted - len(got) if got else 0
        return False

    def _restart_engine(self) -> None:
        if self.engine.failpoint and self.engine.process is not None and self.engine.process.poll() is not None:
            self.tally.steps[self.engine.failpoint.partition(":")[0]] += 1
            self.engine.wait()
        else:
            self.engine.kill()
        self.engine.start()

    def _arm(self) -> None:
        """Half of the time, replace the engine by one that will die at a step of its own."""
        if self._generator.random() < 0.5:
            return
        self.engine.stop()
        point = self._generator.choice((*WRITE_POINTS, *UPKEEP_POINTS[:2]))
        if not self.engine.try_start(f"{point}:{self._generator.randrange(1, 30)}"):
            self.engine.start()

    def _start_mount(self) -> None:
        self._synced = self._generator.random() < 0.3 or self._bug == "early-rename"
        arguments = [
            "--server", self.engine.server, "mount", "--foreground", *(["--sync"] if self._synced else []),
            "--staging", str(self._folder / "staging"), "-o", "engine_wait=60", str(self.place),
        ]  # fmt: skip
        env = environment() | {"STATE_DIRECTORY": str(self._folder / "state")}
        if self._bug:
            command = [*PLANTED_LAKE, self._bug, *arguments]
            self._mount = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        else:
            self._mount = self.engine.warm.start(arguments, env)
        assert self._mount.stdout is not None
        assert self._mount.stdout.readline(), f"the mount ended with {self._mount.wait()}"

    def _kill_mount(self) -> None:
        if self._mount is None:
            return
        self._mount.kill()
        self._mount.wait()
        assert self._mount.stdout is not None
        self._mount.stdout.close()
        self._mount = None

    # --- programs and checks -----------------------------------------------------------------------

    def _write(self, writer: str, seed: str, told: int, stop: Any) -> None:
        folder, journal = self.place / _BUCKET / writer, self._folder / f"{writer}.journal"
        FileWriter(folder, journal, seed, told, synced=self._synced).run(stop)

    def _check(self, loss: str) -> None:
        self._settle()
        for writer in WRITERS:
            journal = self._folder / f"{writer}.journal"
            known = read_known(journal)
            found = self._seen(writer)
            where = f"{writer}, loss of {loss}{', --sync' if self._synced else ''} ({self.engine.failpoint})"
            complaint = known.complaint(found, loss)
            assert not complaint, f"{where}: {complaint}\n{journal.read_text()}"
            if known.error and loss == "engine":
                assert known.may, f"{where}: {known.error}, though all is durable\n{journal.read_text()}"
            self.tally.returned += known.returned
            self.tally.failed += bool(known.error)
            resolve(journal, found)

    def _settle(self) -> None:
        """Make all that is visible durable.  Sync twice: the first may report that an engine took something along."""
        for folder, _, files in os.walk(self.place / _BUCKET):
            for name in ("", *files):
                with suppress(OSError):
                    sync_path(Path(folder, name))
                sync_path(Path(folder, name))

    def _seen(self, writer: str) -> State:
        """Return what the mount shows, once the engine has the same: within a second, as docs/mount.md promises."""
        until = time.monotonic() + _SEEN_S
        while (shown := state_below(self.place / _BUCKET / writer)) != (stored := self._stored(writer)):
            assert time.monotonic() < until, f"{writer}: the mount shows {shown}, the engine has {stored}"
            time.sleep(_POLL_S)
        return shown

    def _stored(self, writer: str) -> State:
        prefix = f"{_BUCKET}/{writer}/"
        found: State = {}
        with connect(self.engine.server) as client:
            for entry in client.ls(prefix):
                name = f"{_BUCKET}/{entry.key}".removeprefix(prefix)
                if name.endswith("/"):
                    found[name.rstrip("/")] = FOLDER
                elif name:
                    found[name] = digest_of(client.get(prefix + name))
        for name in [name for name in found if "/" in name]:
            found.setdefault(name.partition("/")[0], FOLDER)
        return found


def main() -> int:
    """Run cycles and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.mount_cycles")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", default=str(int(time.time())))
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="lake-") as name, MountCycles(Path(name), arguments.seed) as cycles:
        cycles.run(arguments.count, _say)
    _say(str(cycles.tally))
    return 0


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    raise SystemExit(main())
