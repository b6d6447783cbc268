"""Mounts for a test's time: a process in the foreground, its mount point, and an end whatever happens.

`lake` starts an engine and one mount of its store or two.  `passthrough` mounts a folder, once or twice, so that the
tests themselves can be tried on a file system that is right, or, with a planted bug, on one that is not.  Nothing waits
without a limit, and nothing stays mounted: a mount that does not end on SIGTERM is unmounted lazily and killed.

MOUNT_WAY=off, native or passthrough has all mounts of the tests answer reads in that way (`make mount-ways`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.mounts import MountProcess, mounting
from tests.e2e.served import LAKE, Served, environment, logged_warm, serving

READY_S: Final = 60.0
POLL_S: Final = 0.01
BUCKET: Final = "bucket"
WAYS: Final[dict[str, tuple[str, ...]]] = {
    "": (),
    "off": ("-o", "native=off"),
    "native": ("-o", "hot_memory=0"),
    "passthrough": ("-o", "hot_forced"),
}
"""Ways in which a mount answers reads: the default, in Python alone, without hot files, with every file hot at once."""
WAY: Final = os.environ.get("MOUNT_WAY", "")


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command, with the mount's lock below the test's folder."""
    return environment() | {"STATE_DIRECTORY": str(folder / "state")}


@contextmanager
def passthrough(folder: Path, *, mounts: int = 1, bug: str = "") -> Iterator[list[MountProcess]]:
    """Mount one folder by the file system that passes through, with a bug planted in it when one is named."""
    source = folder / "source"
    source.mkdir()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                mounting(_passing(point, source, bug), point, folder / f"{point.name}.log", _environment(folder))
            )
            for point in (folder / f"m{number}" for number in range(mounts))
        ]


def _passing(point: Path, source: Path, bug: str) -> list[str]:
    module = ["-m", "tests.mount.planted", bug] if bug else ["-m", "bench.peers.fuse_file_systems", "passthrough"]
    return [sys.executable, *module, str(point), "--source", str(source)]


@dataclass
class LakeMounts:
    """An engine, its mounts, and the folder of a bucket on each."""

    served: Served
    mounts: list[MountProcess]

    @property
    def folders(self) -> list[Path]:
        """The bucket's folder on each mount."""
        return [mount.folder / BUCKET for mount in self.mounts]


@contextmanager
def lake(
    folder: Path,
    *options: str,
    mounts: int = 1,
    program: Sequence[str] = LAKE,
    any_way: bool = True,
    engine: Sequence[str] = (),
) -> Iterator[LakeMounts]:
    """Start an engine on a new store with a bucket, and mounts of it; `program`: a `lake` with a bug planted in it.

    `engine`: options of the engine.
    `any_way` False: the test is about one way of answering reads, and has the options for it among its own.
    """
    options = (*WAYS[WAY], *options) if any_way else options
    with serving(folder, *engine) as served, ExitStack() as stack:
        processes = [
            stack.enter_context(
                mounting(
                    lake_mount_command(served.server, point, folder / f"staging{number}", *options, program=program),
                    point,
                    folder / f"{point.name}.log",
                    _environment(folder),
                    start=logged_warm,
                )
            )
            for number, point in ((number, folder / f"m{number}") for number in range(mounts))
        ]
        served.good("bucket", "create", BUCKET)
        _wait_for([process.folder / BUCKET for process in processes])
        yield LakeMounts(served, processes)


def lake_mount_command(
    server: str, point: Path, staging: Path, *options: str, program: Sequence[str] = LAKE
) -> list[str]:
    """Return the command of `lake mount` in the foreground."""
    return [
        *program, "--server", server, "mount", "--foreground", "--staging", str(staging), *options, str(point),
    ]  # fmt: skip


def _wait_for(folders: Sequence[Path]) -> None:
    until = time.monotonic() + READY_S
    while not all(os.path.isdir(folder) for folder in folders):
        assert time.monotonic() < until, f"the bucket is not seen at {folders}"
        time.sleep(POLL_S)
