"""A real `lake serve` process on a folder of its own, and the command line beside it.

With SERVED_DEVICES=6 the tests start lakes over six folders instead of one engine (`tests.served_devices`).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Protocol

from bench.harness.mounts import Running, started
from tests.served_devices import DEVICES
from tests.warm_lake import ForkedProcess, WarmLake

ROOT = Path(__file__).resolve().parents[2]
LAKE = [sys.executable, "-m", "cli.main"]
WAIT_S = 60.0


@dataclass(frozen=True)
class Finished:
    """The result of a command: its exit code and both outputs."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """stdout as text."""
        return self.out.decode()

    @property
    def lines(self) -> list[str]:
        """stdout, line by line."""
        return self.text.splitlines()


def environment(server: str | None = None) -> dict[str, str]:
    """Return the environment of a command: without the developer's settings, with the checkout importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKE_")}
    kept["PYTHONPATH"] = str(ROOT)
    return kept | ({"LAKE_SERVER": server} if server else {})


@cache
def _warm_lake() -> WarmLake:
    """Return the process that this one's commands are forked from; it ends with this one."""
    warm = WarmLake()
    atexit.register(warm.close)
    return warm


def started_warm(
    command: Sequence[str], environment: Mapping[str, str], *, errors: int = 2
) -> subprocess.Popen[str] | ForkedProcess:
    """Start a command whose stdout is read as text; one of `lake` itself is forked from a process that has it."""
    if is_lake(command):
        return _warm_lake().start(command[len(LAKE) :], dict(environment), errors)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)


def logged_warm(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Running:
    """Start a command of a mount; one of `lake` itself is forked from a process that has it imported."""
    if is_lake(command):
        return _warm_lake().start_with_log(command[len(LAKE) :], dict(environment), log)
    return started(command, environment, log)


def is_lake(command: Sequence[str]) -> bool:
    """Return True if a command is `lake` itself, without a bug planted in it."""
    return list(command[: len(LAKE)]) == LAKE


def lake(*args: str | Path, server: str | None = None, stdin: bytes = b"", cwd: Path | None = None) -> Finished:
    """Run one command to its end, forked from a process that has `lake` imported."""
    code, out, err = _warm_lake().run([*map(str, args)], environment(server), stdin=stdin, folder=cwd, timeout_s=WAIT_S)
    return Finished(code, out, err.decode(errors="backslashreplace"))


class Process(Protocol):
    """The part of `subprocess.Popen` that the tests use."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class Served:
    """One engine process, and commands that talk to it."""

    def __init__(self, folder: Path, *options: str, started: bool = True) -> None:
        self.data = folder / "store"
        self.socket = folder / "s"
        self.server = f"unix:{self.socket}"
        self._options = options
        self.printed: list[str] = []
        self.process: Process | None = None
        if started:
            self.start()

    def start(self) -> None:
        """Start the engine and wait until it serves."""
        process = self.begin_to_serve()
        assert process.stdout is not None
        self.printed = []
        for line in process.stdout:
            self.printed.append(line.rstrip("\n"))
            if line == "ready\n":
                return
        raise AssertionError(f"the engine ended with {process.wait()}: {self.printed}")

    def begin_to_serve(self) -> Process:
        """Start the engine's process, and do not wait for it."""
        command = ["serve", *self.data_options, "--socket", str(self.socket)]
        # An engine must not use a client's address as its own.
        self.process = _warm_lake().start(
            [*command, "--admin", "off", "--s3", "off", *self._options], environment("unix:/nowhere/lake.sock")
        )
        return self.process

    @property
    def folders(self) -> list[Path]:
        """The folders that are served: one, or one for each device of a lake."""
        return [self.data / f"device{number}" for number in range(DEVICES)] or [self.data]

    def token(self) -> str:
        """Return the token of clients over TCP; a lake has it in each folder."""
        return (self.folders[0] / "native.token").read_text().strip()

    @property
    def data_options(self) -> list[str]:
        """The options of `lake serve` that name the folders."""
        folders = [part for folder in self.folders for part in ("--data", str(folder))]
        return [*folders, "--accept-loss"] if DEVICES else folders

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        return self._end(signal.SIGTERM)

    def interrupt(self) -> int:
        """Send SIGINT; return the exit code."""
        return self._end(signal.SIGINT)

    def kill(self) -> int:
        """Send SIGKILL; return the exit code."""
        return self._end(signal.SIGKILL)

    def _end(self, number: int) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(number)
        too_long = threading.Timer(WAIT_S, self.process.kill)  # nobody would read on behind a test that hangs
        too_long.start()
        try:
            self.process.stdout.read()
        finally:
            too_long.cancel()
        self.process.stdout.close()
        return self.process.wait(WAIT_S)

    def segments(self) -> list[Path]:
        """Return the files that hold payload, of all devices."""
        return segments_of(self.data)

    def __call__(self, *args: str | Path, stdin: bytes = b"", cwd: Path | None = None) -> Finished:
        """Run a command against this engine."""
        return lake(*args, server=self.server, stdin=stdin, cwd=cwd)

    def good(self, *args: str | Path, stdin: bytes = b"") -> Finished:
        """Run a command against this engine; it must succeed."""
        done = self(*args, stdin=stdin)
        assert done.code == 0, done
        return done

    def begin(
        self, *args: str | Path, stdin: IO[bytes] | int = subprocess.DEVNULL, output: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start a command that the test ends itself; `output` PIPE keeps both its outputs for the test."""
        return subprocess.Popen(
            [*LAKE, *map(str, args)], env=environment(self.server), stdin=stdin, stdout=output, stderr=output
        )


def segments_of(data: Path) -> list[Path]:
    """Return the files that hold payload in the folder of a store, or of the devices of a lake."""
    return sorted(data.glob("**/segments/*"))


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    """Run an engine for the block; it must stop cleanly at the end unless the test stopped it."""
    served = Served(folder, *options)
    try:
        yield served
    finally:
        assert served.process is not None
        if served.process.poll() is None:
            code = served.stop()
            assert code == 0, code
