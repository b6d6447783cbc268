"""A mount point of a test's own, and the commands and processes around it; nothing stays mounted, whatever happens."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import pytest

from fuse.kernel.mount_point import all_mounts, mount_at, unmount
from tests.e2e.served import ROOT, WAIT_S, Finished, environment

NOBODY = 65534
TINY_LAKE = [sys.executable, "-m", "tests.e2e.tiny_lake"]
TINY_FS = [sys.executable, "-m", "tests.e2e.tiny_fs"]
SERVES = "unix:/tiny/serves"


class MountProcess:
    """A process in the foreground that serves a mount, and prints a line when it does."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        assert self.line(), self.log

    def line(self) -> str:
        """Return the next line that it prints; empty at its end."""
        return self.stdout.readline().rstrip("\n")

    def signal(self, number: int) -> Self:
        """Send a signal."""
        self.process.send_signal(number)
        return self

    def end(self) -> int:
        """Wait until it has ended; return its exit code."""
        return self.process.wait(WAIT_S)

    @property
    def log(self) -> str:
        """Return the text that it wrote to stderr."""
        return self._log.read_text()


class MountRig:
    """One mount point below a folder of the test's own."""

    def __init__(self, folder: Path, command: list[str], server: str) -> None:
        self.folder = folder
        self.command = command
        self.server = server
        self.place = folder / "mnt"
        self.place.mkdir()
        self.state = folder / "lake-mount"
        self.env = environment(server) | {"STATE_DIRECTORY": str(self.state), "LAKE_CONFIG": self._config()}
        self._started: list[MountProcess] = []

    def _config(self) -> str:
        config = self.folder / "lake.toml"
        config.write_text("")
        return str(config)

    def lake(self, *args: str | Path, server: str = "", before: tuple[str, ...] = ()) -> Finished:
        """Run a command of lake to its end; `before` is the command line that runs it."""
        return self.run(*before, *self.command, *args, server=server)

    def run(self, *command: str | Path, server: str = "") -> Finished:
        """Run any command to its end."""
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=self.env | {"LAKE_SERVER": server or self.server},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WAIT_S,
        )
        return Finished(done.returncode, done.stdout, done.stderr.decode(errors="backslashreplace"))

    def mount(self, *args: str | Path, server: str = "") -> Finished:
        """Run `lake mount` at the place; it must serve."""
        done = self.lake("mount", *args, self.place, server=server)
        assert done.code == 0, done
        assert self.is_mounted
        return done

    def refused(self, *args: str | Path, before: tuple[str, ...] = ()) -> tuple[int, str]:
        """Run a mount that must fail; return its exit code and its one line."""
        was_mounted = self.is_mounted
        done = self.lake("mount", *args, before=before)
        assert done.code != 0, done
        assert done.out == b""
        [line] = done.err.splitlines()
        assert self.is_mounted == was_mounted
        return done.code, line

    def tiny(self, *options: str) -> MountProcess:
        """Start `tiny_fs` at the place, without the command line around it."""
        return self._start([*TINY_FS, str(self.place), *options])

    def foreground(self, *args: str, env: dict[str, str] | None = None) -> MountProcess:
        """Start `lake mount --foreground` at the place."""
        return self._start([*self.command, "mount", "--foreground", *args, str(self.place)], env)

    def _start(self, command: list[str], env: dict[str, str] | None = None) -> MountProcess:
        started = MountProcess(command, self.env | (env or {}), self.folder / f"stderr-{len(self._started)}")
        self._started.append(started)
        return started

    def begin(self, *args: str | Path) -> subprocess.Popen[bytes]:
        """Start a command that the test waits for itself."""
        return subprocess.Popen([*self.command, *map(str, args)], cwd=ROOT, env=self.env)

    def wait_for_child(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the command has started the process that will be behind the mount; return its number."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found: list[int] = []

        def is_there() -> bool:
            # Not any child: an import may run programs, too.
            found.extend(pid for pid in map(int, children.read_text().split()) if _leads_session(pid))
            return bool(found)

        self.wait_for(is_there)
        return found[0]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, by looking at it again and again."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "it never came to be"
            time.sleep(0.01)

    @property
    def lock(self) -> Path:
        """The lock of the mount point; exists once there was a mount."""
        [lock] = self.state.glob("*/lock")
        return lock

    @property
    def is_mounted(self) -> bool:
        """True when anything is mounted at the place."""
        return mount_at(self.place) is not None

    @property
    def log(self) -> str:
        """The log of mounts in the background."""
        [log] = self.state.glob("*/log")
        return log.read_text()

    @property
    def pid(self) -> int:
        """The process behind the mount, as its lock says."""
        return int(self.lock.read_text())

    def wait_gone(self, pid: int) -> None:
        """Wait until no process has that id, or another one has it."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ended, _, _ = select.select([descriptor], [], [], WAIT_S)
            assert ended, f"process {pid} goes on"
        finally:
            os.close(descriptor)

    def clean(self) -> None:
        """End everything, without asking the mount."""
        for started in self._started:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait(WAIT_S)
            started.stdout.close()
        for entry in reversed(all_mounts()):
            if entry.mount_point.is_relative_to(self.folder):
                unmount(entry.mount_point, lazy=True)
        for lock in self.state.glob("*/lock"):
            text = lock.read_text().strip()
            if text and _is_ours(int(text)):
                os.kill(int(text), signal.SIGKILL)


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _is_ours(pid: int) -> bool:
    try:
        return b"\0mount\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def mount_rig(command: list[str] = TINY_LAKE, server: str = SERVES) -> Iterator[MountRig]:
    """A rig for the block; at the end all that it started has ended, and nothing is mounted."""
    with TemporaryDirectory(prefix="lake-mount-") as folder:
        os.chmod(folder, 0o755)
        rig = MountRig(Path(os.path.realpath(folder)), command, server)
        try:
            yield rig
        finally:
            rig.clean()


def private_mounts(script: str) -> tuple[str, ...]:
    """Return the command that runs another in a mount namespace of its own, prepared by `script` (of sh); root only."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can arrange mounts that nobody else sees")
    return ("unshare", "--mount", "sh", "-ec", f'{script}\nexec "$@"', "sh")


def as_nobody() -> tuple[str, ...]:
    """Return the command that runs another as a user without rights."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("another user can be tried only as root, with setpriv (package util-linux)")
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
