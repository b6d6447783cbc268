"""Mounts for a test's time: a process in the foreground, its mount point, and an end whatever happens.

`lake` starts an engine and one mount of its store or two; `passthrough` mounts a folder, once or twice, so that the
tests themselves can be tried on a file system that is right, or, with a planted bug, on one that is not.  Nothing
waits without a limit, and nothing stays mounted: what does not end on SIGTERM is unmounted lazily and killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.e2e.served import LAKE, ROOT, Served, environment, serving

READY_S: Final = 60.0
END_S: Final = 30.0
POLL_S: Final = 0.01
BUCKET: Final = "bucket"


def mounted_at(folder: Path) -> bool:
    """Whether something is mounted there; asks the kernel's table, never the mount."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == str(folder) for line in lines)


class MountProcess:
    """A process that serves a mount in the foreground."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        self.folder = folder
        self.log = log
        self._command = list(command)
        folder.mkdir(exist_ok=True)
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + READY_S
        while not mounted_at(self.folder):
            code = process.poll()
            if code is not None or time.monotonic() > until:
                process.kill()
                process.wait()
                raise AssertionError(f"no mount at {self.folder}, exit code {code}: {self.log.read_text()}")
            time.sleep(POLL_S)
        return process

    def end(self) -> int:
        """SIGTERM; the exit code, when it ends by itself in time."""
        self.process.terminate()
        return self.process.wait(END_S)

    def restart(self) -> None:
        """End and mount again: nothing that a kernel or a process remembers is left."""
        assert self.end() == 0, self.log.read_text()
        self.process = self._started()

    def clear_away(self) -> None:
        """Nothing of it is left afterwards, whatever state it is in."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                subprocess.run(["umount", "-l", str(self.folder)], timeout=END_S)
                self.process.kill()
                self.process.wait(END_S)
        while mounted_at(self.folder):
            subprocess.run(["fusermount3", "-u", "-z", str(self.folder)], timeout=END_S, check=True)


@contextmanager
def mounting(command: Sequence[str], folder: Path, log: Path) -> Iterator[MountProcess]:
    """A mount for the block."""
    process = MountProcess(command, folder, log)
    try:
        yield process
    finally:
        process.clear_away()


@contextmanager
def passthrough(folder: Path, *, mounts: int = 1, bug: str = "") -> Iterator[list[MountProcess]]:
    """Mounts of one folder by the file system that passes through, with a bug planted in it when one is named."""
    source = folder / "source"
    source.mkdir()
    with ExitStack() as stack:
        yield [
            stack.enter_context(mounting(_passing(point, source, bug), point, folder / f"{point.name}.log"))
            for point in (folder / f"m{number}" for number in range(mounts))
        ]


def _passing(point: Path, source: Path, bug: str) -> list[str]:
    module = ["-m", "tests.mount.planted", bug] if bug else ["-m", "bench.fuse_peers", "passthrough"]
    return [sys.executable, *module, str(point), "--source", str(source)]


@dataclass
class LakeMounts:
    """An engine, its mounts, and a folder in each that a bucket stands behind."""

    served: Served
    mounts: list[MountProcess]

    @property
    def folders(self) -> list[Path]:
        """The bucket on each mount."""
        return [mount.folder / BUCKET for mount in self.mounts]


@contextmanager
def lake(folder: Path, *options: str, mounts: int = 1) -> Iterator[LakeMounts]:
    """A new store, its engine, and mounts of it, with a bucket."""
    with serving(folder) as served, ExitStack() as stack:
        processes = [
            stack.enter_context(
                mounting(
                    lake_mount_command(served.server, point, folder / f"staging{number}", *options),
                    point,
                    folder / f"{point.name}.log",
                )
            )
            for number, point in ((number, folder / f"m{number}") for number in range(mounts))
        ]
        served.good("bucket", "create", BUCKET)
        _wait_for([process.folder / BUCKET for process in processes])
        yield LakeMounts(served, processes)


def lake_mount_command(server: str, point: Path, staging: Path, *options: str) -> list[str]:
    """`lake mount` in the foreground."""
    return [
        *LAKE, "--server", server, "mount", "--foreground", "--staging", str(staging), *options, str(point),
    ]  # fmt: skip


def _wait_for(folders: Sequence[Path]) -> None:
    until = time.monotonic() + READY_S
    while not all(os.path.isdir(folder) for folder in folders):
        assert time.monotonic() < until, f"the bucket is not seen at {folders}"
        time.sleep(POLL_S)
