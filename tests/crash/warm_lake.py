"""Engines forked from a process that has most of `lake` imported: each start takes half a second less.

A forked engine is a whole `lake serve`, child of the process that asked for it, with a pid, arguments and environment
of its own.  The `engine` package, with its failpoints, is imported after the fork.  The bounds are those of
`small_lake`.

The process that is forked from holds no store and no state; it ends when its socket is closed.

    python -m tests.crash.warm_lake DESCRIPTOR
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from tests.crash import small_lake

_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.002
_REQUEST_BYTES: Final = 1 << 17
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """A child that this process did not start itself: has what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, minus the signal's number when one ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, once it has ended."""
        until = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("lake serve", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmLake:
    """The process to fork from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.warm_lake", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
            )

    def start(self, arguments: Sequence[str], environment: dict[str, str]) -> ForkedProcess:
        """Run `lake ARGUMENTS` in a new child of the caller's."""
        reading, writing = os.pipe()
        assert _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            request = json.dumps([list(arguments), environment]).encode()
            socket.send_fds(self._socket, [request], [writing])
            told = self._socket.recv(64)
        finally:
            os.close(writing)
            # From now on only: children that it has adopted stay its own, and it wants no other orphans.
            _LIBC.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert told, "the process to fork from has ended"
        return ForkedProcess(int(told), os.fdopen(reading))

    def close(self) -> None:
        """End it; its engines go on."""
        self._socket.close()
        self._process.wait()


def _import_all_but_the_engine() -> None:
    """Import the modules that `lake serve` needs, but none that reads the environment or the engine's state."""
    for package in map(importlib.import_module, ("lakefs", "gateway")):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in ("cli.main", "pyfuse3", "lmdb", "prometheus_client", "cli.terminal.systemd_notify"):
        importlib.import_module(name)
    engine = [name for name in sys.modules if name.partition(".")[0] == "engine"]
    assert not engine, f"{engine} would be imported before its failpoint is known"
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"


def _serve(asked: socket.socket) -> None:
    """Fork for each request, until nobody is left to send one."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, 1)
        if not request:
            return
        between = os.fork()
        if between == 0:
            _fork_an_orphan(asked, request, descriptors[0])
        os.close(descriptors[0])
        os.waitpid(between, 0)
        asked.send(os.read(_TOLD[0], 64))


_TOLD: Final = os.pipe()


def _fork_an_orphan(asked: socket.socket, request: bytes, stdout: int) -> None:
    """Fork the engine and end, so that it becomes the child of the process that asked."""
    pid = os.fork()
    if pid:
        os.write(_TOLD[1], str(pid).encode())
        os._exit(0)
    asked.close()
    for descriptor in _TOLD:
        os.close(descriptor)
    os.dup2(stdout, 1)
    os.close(stdout)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # the old object knows what descriptor 1 was before
    arguments, environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["lake", *arguments]
    random.seed()
    small_lake.be_lake()


if __name__ == "__main__":
    small_lake.make_small()
    _import_all_but_the_engine()
    _serve(socket.socket(fileno=int(sys.argv[1])))
