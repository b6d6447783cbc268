"""An engine that ends and starts again under a mount.

Programs on the mount notice only a pause, and an `fsync` that fails where a killed engine took something along.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs import connect
from tests.e2e.served import LAKE, ROOT, WAIT_S, Served, environment
from tests.mount.mounts import lake

pytestmark = pytest.mark.thorough

ROUNDS = 40
RESTARTS = 2
MIB = 1 << 20


class Keeper:
    """Starts engines from a process of its own: a fork of this one would close, and so flush, the mount's files."""

    def __init__(self, served: Served) -> None:
        serve = " ".join(["serve", *served.data_options, "--socket", str(served.socket), "--admin off --s3 off"])
        command = f"exec {' '.join(LAKE)} {serve}"
        self._served = served
        self._shell = subprocess.Popen(
            ["bash", "-c", f"while read -r _; do ({command}) & echo $!; wait -n; done"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        self.pid = 0

    def start(self) -> None:
        """Start an engine; return when it serves."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write("start\n")
        self._shell.stdin.flush()
        for line in self._shell.stdout:
            if line.strip().isdecimal():
                self.pid = int(line)
            elif line == "ready\n":
                return
        raise AssertionError("the engine did not start")

    def end(self, number: int) -> None:
        """End the engine with a signal; return when it has ended."""
        os.kill(self.pid, number)
        while Path(f"/proc/{self.pid}").exists():
            threading.Event().wait(0.01)

    def close(self) -> None:
        """End the engine and the process."""
        self.end(signal.SIGTERM)
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.close()
        self._shell.wait(WAIT_S)
        self._shell.stdout.close()


@contextmanager
def kept(served: Served) -> Iterator[Keeper]:
    """Put the engine of the mount into a keeper's hands."""
    keeper = Keeper(served)
    assert served.stop() == 0
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.close()
        served.start()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket in it."""
    with TemporaryDirectory(prefix="lake-") as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_programs_and_open_files_outlive_the_engine(short: Path, number: signal.Signals) -> None:
    content = os.urandom(9 * MIB)
    with lake(short, "-o", "engine_wait=60") as mounts, kept(mounts.served) as keeper:
        here = mounts.folders[0]
        (here / "large").write_bytes(content)
        (here / "edited").write_bytes(b"s" * 1000)
        large = os.open(here / "large", os.O_RDONLY)
        edited = os.open(here / "edited", os.O_RDWR)
        new = os.open(here / "new", os.O_RDWR | os.O_CREAT)
        os.write(new, b"before")
        os.pwrite(edited, b"X", 10)
        failures: list[BaseException] = []
        told: list[OSError] = []
        done = threading.Event()

        def work() -> None:
            try:
                while not done.is_set():
                    try:
                        _one_round(here, synced=number == signal.SIGKILL)
                    except OSError as error:
                        if number != signal.SIGKILL or error.errno != errno.EIO:
                            raise
                        told.append(error)  # killed after a change, before its fsync
            except (OSError, AssertionError) as error:
                failures.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        for _ in range(RESTARTS):
            for _ in range(ROUNDS):
                assert (here / "edited").stat().st_size == 1000
            keeper.end(number)
            keeper.start()
        done.set()
        worker.join()
        os.write(new, b" after")
        os.fsync(new)
        os.close(new)
        os.close(edited)
        assert os.pread(large, len(content), 0) == content
        os.close(large)
        assert failures == []
        assert len(told) <= RESTARTS
        with connect(mounts.served.server) as client:
            assert client.get("bucket/new") == b"before after"
            assert client.get("bucket/edited")[8:13] == b"ssXss"


def test_a_file_that_outlived_a_killed_engine_and_was_removed_later_is_not_brought_back(short: Path) -> None:
    with lake(short, "-o", "engine_wait=60") as mounts, kept(mounts.served) as keeper:
        here = mounts.folders[0]
        edited = os.open(here / "edited", os.O_RDWR | os.O_CREAT)
        os.write(edited, b"stored")
        os.fsync(edited)
        os.pwrite(edited, b"more", 0)
        (here / "beside").mkdir()  # visible, and maybe not durable
        keeper.end(signal.SIGKILL)
        keeper.start()
        os.close(os.open(here / "edited", os.O_RDONLY))  # the mount sees that the file is still there
        with connect(mounts.served.server) as client:
            client.remove("bucket/edited")
            with pytest.raises(OSError) as refused:
                os.close(edited)
            assert refused.value.errno == errno.ESTALE
            assert not client.exists("bucket/edited")


def test_a_long_file_being_written_outlives_a_killed_engine(short: Path) -> None:
    content = os.urandom(30 * MIB)
    with lake(short, "-o", "engine_wait=60") as mounts, kept(mounts.served) as keeper:
        with (mounts.folders[0] / "long").open("wb", buffering=0) as file:
            for offset in range(0, len(content), MIB):
                file.write(content[offset : offset + MIB])
                if offset == 20 * MIB:
                    keeper.end(signal.SIGKILL)
                    keeper.start()
            file.seek(5)
            file.write(b"written again")
        with connect(mounts.served.server) as client:
            assert client.get("bucket/long") == content[:5] + b"written again" + content[18:]
            assert client.status()["clients"]["sessions"] == 0


def _one_round(here: Path, *, synced: bool) -> None:
    """Do what programs do to a file; `synced`: sync each step that a killed engine could lose."""

    def step(path: Path) -> None:
        if synced:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    content = os.urandom(200)
    with (here / "own").open("wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    (here / "own").rename(here / "moved")
    step(here)
    assert (here / "moved").read_bytes() == content
    (here / "moved").unlink()
    step(here)
    assert not (here / "moved").exists()
