"""Processes that serve a mount in the foreground: the lake mount, and the file systems it is compared with.

Nothing waits without a limit, and nothing stays mounted: a process that does not end on SIGTERM is unmounted lazily
and killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Protocol

from bench.harness.process import ROOT, EngineProcess, clean_environment, lake_command
from fuse.kernel.attach import MountOptions

READY_S: Final = 60.0
END_S: Final = 30.0
POLL_S: Final = 0.01


class Running(Protocol):
    """The part of `subprocess.Popen` that a mount's process needs."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Running]
"""Starts a command with an environment; both its outputs are appended to a file."""


def started(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Running:
    """Start a command as every program is started."""
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def mounted_at(folder: Path) -> bool:
    """Return True if something is mounted at the folder; reads the kernel's table, never the mount."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == str(folder) for line in lines)


class MountProcess:
    """A process that serves a mount; `folder` is its mount point, `log` gets all its output.

    `says_ready`: it logs a line when it is ready; other programs are ready when their mount exists.
    `start`: starts the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        says_ready: bool = True,
        start: Start = started,
    ) -> None:
        self.folder = folder
        self.log = log
        self._command = list(command)
        self._environment = dict(environment or clean_environment())
        self._waits_for_word = says_ready
        self._start = start
        folder.mkdir(exist_ok=True)
        self.process = self._started()

    def _started(self) -> Running:
        with self.log.open("ab") as log:
            begin = log.tell()
            process = self._start(self._command, self._environment, log)
        until = time.monotonic() + READY_S
        while not (mounted_at(self.folder) and self._says_ready(begin)):
            code = process.poll()
            if code is not None or time.monotonic() > until:
                process.kill()
                process.wait()
                self._take_away()
                raise RuntimeError(f"no mount at {self.folder}, exit code {code}: {self.log.read_text()}")
            time.sleep(POLL_S)
        return process

    def _says_ready(self, begin: int) -> bool:
        """Return True if the process logged that it is ready, which it does after raising the kernel's read-ahead."""
        if not self._waits_for_word:
            return True
        said = self.log.read_bytes()[begin:].splitlines()
        return any(line.startswith((b"ready", b"mounted")) for line in said)

    def end(self) -> int:
        """Send SIGTERM; return the exit code if the process ends in time."""
        self.process.terminate()
        return self.process.wait(END_S)

    def restart(self) -> None:
        """End and mount again, so that neither the kernel nor a process remembers anything."""
        if code := self.end():
            raise RuntimeError(f"the mount at {self.folder} ended with {code}: {self.log.read_text()}")
        self.start_again()

    def start_again(self) -> None:
        """Mount again; the process has ended."""
        self.process = self._started()

    def memory_bytes(self) -> int:
        """Return RssAnon of the process."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def clear_away(self) -> None:
        """End the process and unmount, whatever state they are in."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                subprocess.run(["umount", "-l", str(self.folder)], timeout=END_S, check=False)
                self.process.kill()
                self.process.wait(END_S)
        self._take_away()

    def _take_away(self) -> None:
        while mounted_at(self.folder):
            subprocess.run(["fusermount3", "-u", "-z", str(self.folder)], timeout=END_S, check=True)


@contextmanager
def mounting(
    command: Sequence[str],
    folder: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    says_ready: bool = True,
    start: Start = started,
) -> Iterator[MountProcess]:
    """Context manager: a mount for the block; see `MountProcess`."""
    process = MountProcess(command, folder, log, environment, says_ready=says_ready, start=start)
    try:
        yield process
    finally:
        process.clear_away()


@contextmanager
def lake_mounted(
    engine: EngineProcess, folder: Path, *options: str, lake: Sequence[str] = ()
) -> Iterator[MountProcess]:
    """Context manager: the store of a running engine, mounted at `folder`/lake with these options.

    `lake`: the command to use in place of the installed `lake`.
    """
    point = folder / "lake"
    command = [
        *(lake or lake_command()), "--server", engine.address, "mount", "--foreground",
        "--staging", str(folder / "staging"), *options, str(point),
    ]  # fmt: skip
    environment = clean_environment() | {"STATE_DIRECTORY": str(folder / "state")}
    with mounting(command, point, folder / "lake.log", environment) as mount:
        yield mount


@contextmanager
def constant_mounted(folder: Path, size: int) -> Iterator[Path]:
    """Context manager: the file of the file system that answers from a buffer."""
    point = folder / "constant"
    with mounting(_peer("constant", point, "--size", str(size)), point, folder / "constant.log") as mount:
        yield mount.folder / "data"


@contextmanager
def passthrough_mounted(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Context manager: the mount point of the passthrough file system, and the folder that it passes to."""
    point, source = folder / "passthrough", folder / "source"
    source.mkdir()
    command = _peer("passthrough", point, "--source", str(source))
    with mounting(command, point, folder / "passthrough.log") as mount:
        yield mount.folder, source


def _peer(kind: str, point: Path, *options: str) -> list[str]:
    """Return a peer's command with the mount's time-outs; read-ahead and number of tasks are the mount's anyway."""
    timeout = ("--timeout", str(MountOptions.attribute_timeout_s))
    return [sys.executable, "-m", "bench.peers.fuse_file_systems", kind, str(point), *options, *timeout]


def forget_pages(path: Path) -> None:
    """Make the kernel drop a file's clean pages; for a file on a mount: the mount's pages, not the store's."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def forget_pages_below(folder: Path) -> None:
    """Call `forget_pages` for all files below a folder: the store becomes cold."""
    for path in folder.rglob("*"):
        if path.is_file():
            forget_pages(path)
