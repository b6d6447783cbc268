"""One engine, and mounts of it as on machines of their own: by Unix socket or TCP, each with a process of its own.

Between each mount and the engine stands a proxy (`tests.mount.shared.meddler`) when notices are to be late, or
connections or answers to be lost.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.harness.mounts import MountProcess, mounting
from tests.e2e.served import ROOT, Served, environment, logged_warm, serving
from tests.mount.model import POLL_S
from tests.mount.mounts import BUCKET, READY_S, WAY, WAYS, LakeMounts, lake_mount_command
from tests.mount.shared.meddler import Meddler, meddling
from tests.mount.shared.model import SharedGround
from tests.mount.shared.worker import Worker, workers

OVER: Final = ("unix", "tcp")


@dataclass
class SharedMounts(LakeMounts):
    """An engine and mounts of it, a worker on each, and the proxies before them, if any."""

    workers: list[Worker]
    meddlers: list[Meddler]
    plain: Path
    """A local folder beside them."""

    def ground(self, bucket: str = BUCKET) -> SharedGround:
        """Return the ground for a sequence, in one bucket."""
        return SharedGround(
            self.plain,
            tuple(mount.folder / bucket for mount in self.mounts),
            self.workers,
            lambda rank: self.meddlers[rank].cut(),
            self.kill,
        )

    def staging(self, rank: int) -> Path:
        """Return the staging folder of a mount."""
        folder = self.mounts[rank].folder
        return folder.parent / f"staging{rank}"

    def kill(self, rank: int) -> None:
        """Kill a mount, and mount again."""
        mount = self.mounts[rank]
        mount.process.kill()
        mount.process.wait()
        mount.start_again()
        wait_for_folder(mount.folder / BUCKET)


class OwnProgram(Served):
    """An engine of another program than `lake`: one with a bug planted in it."""

    def __init__(self, program: Sequence[str], folder: Path, *options: str) -> None:
        self._program = program
        super().__init__(folder, *options)

    def start(self) -> None:
        """Start the engine and wait until it serves."""
        self.process = subprocess.Popen(
            [
                *self._program, "serve", "--data", str(self.data), "--socket", str(self.socket),
                "--admin", "off", "--s3", "off", *self._options,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=environment("unix:/nowhere/lake.sock"),
            cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.printed = []
        for line in self.process.stdout:
            self.printed.append(line.rstrip("\n"))
            if line == "ready\n":
                return
        raise AssertionError(f"the engine ended with {self.process.wait()}: {self.printed}")


@contextmanager
def _engine(folder: Path, over: str, program: Sequence[str]) -> Iterator[Served]:
    options = ("--native", "127.0.0.1:0") if over == "tcp" else ()
    if not program:
        with serving(folder, *options) as served:
            yield served
        return
    served = OwnProgram(program, folder, *options)
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def another_mount(mounts: SharedMounts, over: str, name: str, program: Sequence[str]) -> Iterator[tuple[Path, Meddler]]:
    """Context manager: one more mount of the engine, of another program; its bucket's folder, and its proxy."""
    folder = mounts.plain.parent
    with (
        meddling(address_of(mounts.served, over), folder, f"p-{name}") as meddler,
        mounting(
            lake_mount_command(meddler.address, folder / name, folder / f"staging-{name}", program=program),
            folder / name,
            folder / f"{name}.log",
            _variables(mounts.served, folder, over),
        ) as mount,
    ):
        wait_for_folder(mount.folder / BUCKET)
        yield mount.folder / BUCKET, meddler


def _variables(served: Served, folder: Path, over: str) -> dict[str, str]:
    variables = environment() | {"STATE_DIRECTORY": str(folder / "state")}
    if over != "tcp":
        return variables
    token = min(served.data.glob("**/native.token"))  # a lake has it in the folder of each device
    return variables | {"LAKE_TOKEN": token.read_text().strip()}


@contextmanager
def shared_mounts(
    over: str, *options: str, mounts: int = 2, meddled: bool = False, late_s: float = 0.0, engine: Sequence[str] = ()
) -> Iterator[SharedMounts]:
    """Start an engine on a new store with a bucket, and mounts of it over a Unix socket or TCP.

    `meddled`: with a proxy before each mount.  `engine`: a `lake` with a bug planted in it.
    """
    with TemporaryDirectory(prefix="lake-") as path, ExitStack() as stack:
        folder = Path(path)
        served = stack.enter_context(_engine(folder, over, engine))
        server = address_of(served, over)
        meddlers = [
            stack.enter_context(meddling(server, folder, f"p{number}", late_s=late_s, seed=number))
            for number in range(mounts if meddled else 0)
        ]
        variables = _variables(served, folder, over)
        processes: list[MountProcess] = []
        for number in range(mounts):
            point = folder / f"m{number}"
            command = lake_mount_command(
                meddlers[number].address if meddled else server,
                point,
                folder / f"staging{number}",
                *WAYS[WAY],
                *options,
            )
            processes.append(
                stack.enter_context(
                    mounting(command, point, folder / f"{point.name}.log", variables, start=logged_warm)
                )
            )
        served.good("bucket", "create", BUCKET)
        for process in processes:
            wait_for_folder(process.folder / BUCKET)
        (folder / "plain").mkdir()
        yield SharedMounts(served, processes, stack.enter_context(workers(mounts)), meddlers, folder / "plain")


def address_of(served: Served, over: str) -> str:
    """Return an engine's address of one kind."""
    if over == "unix":
        return served.server
    (address,) = [line.split()[1] for line in served.printed if "tcp://" in line]
    return address


def wait_for_folder(folder: Path) -> None:
    """Wait until a mount shows a folder."""
    until = time.monotonic() + READY_S
    while not os.path.isdir(folder):
        assert time.monotonic() < until, f"{folder} is not seen"
        time.sleep(POLL_S)


@contextmanager
def plain_ground(folder: Path, ranks: int = 2) -> Iterator[SharedGround]:
    """Context manager: two local folders, so that the model itself can be tried; the second is every rank's."""
    plain, other = folder / "plain", folder / "other"
    plain.mkdir()
    other.mkdir()
    with workers(ranks) as started:
        yield SharedGround(plain, (other,) * ranks, started)
    shutil.rmtree(plain)
