"""Commands forked from a process that has `lake` imported: each starts in a tenth of the time.

A forked command is a whole `lake`, child of the process that asked for it, with a pid, arguments, environment, folder
and standard streams of its own.  It differs from one that is started in what it need not import.

There are two kinds.  `small` has the bounds of `small_lake`, and imports the `engine` package, with its failpoints,
after the fork.  The other has everything imported, with the bounds of the product.

The process that is forked from holds no store and no state; it ends when its socket is closed.

    python -m tests.warm_lake DESCRIPTOR [small]
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final, NoReturn

from tests.crash import small_lake

_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.002
_REQUEST_BYTES: Final = 1 << 17
_PACKAGES: Final = ("lakefs", "engine", "fuse", "gateway", "cli")
_OF_HOSTS: Final = ("lakefs.plugins.kv.vllm_tier",)
"""Plug-ins that only their host can import."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """A child that this process did not start itself: has what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
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

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmLake:
    """The process to fork from."""

    def __init__(self, *, small: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_lake", str(theirs.fileno()), *(["small"] if small else [])],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
            )

    def start(self, arguments: Sequence[str], environment: dict[str, str], errors: int = 2) -> ForkedProcess:
        """Run `lake ARGUMENTS` in a new child of the caller's, which reads its stdout.

        `errors`: the descriptor that is its stderr, the caller's own by default.
        """
        reading, writing = os.pipe()
        try:
            pid = self._fork(arguments, environment, "", {1: writing, 2: errors})
        finally:
            os.close(writing)
        return ForkedProcess(pid, os.fdopen(reading))

    def start_with_log(self, arguments: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> ForkedProcess:
        """Run `lake ARGUMENTS` in a new child of the caller's; its input is empty, and both its outputs are a file."""
        with open(os.devnull, "rb") as nothing:
            streams = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
            return ForkedProcess(self._fork(arguments, environment, "", streams), None)

    def run(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        *,
        stdin: bytes,
        folder: Path | None,
        timeout_s: float,
    ) -> tuple[int, bytes, bytes]:
        """Run `lake ARGUMENTS` to its end; return its exit code and both its outputs.

        A command that is not done in time is killed: subprocess.TimeoutExpired.
        """
        with ExitStack() as stack:
            ours: list[IO[bytes]] = []
            theirs: dict[int, int] = {}
            for number in (0, 1, 2):
                reading, writing = os.pipe()
                theirs[number], own, mode = (reading, writing, "wb") if number == 0 else (writing, reading, "rb")
                ours.append(stack.enter_context(os.fdopen(own, mode)))
            try:
                pid = self._fork(arguments, environment, str(folder or ""), theirs)
            finally:
                for descriptor in theirs.values():
                    os.close(descriptor)
            command = ForkedProcess(pid, None)
            outputs: dict[int, bytes] = {}
            threads = [
                threading.Thread(target=_feed, args=(ours[0], stdin)),
                *(threading.Thread(target=_read, args=(ours[number], outputs, number)) for number in (1, 2)),
            ]
            for thread in threads:
                thread.start()
            try:
                code = command.wait(timeout_s)
            except subprocess.TimeoutExpired:
                command.kill()
                raise
            finally:
                for thread in threads:
                    thread.join()
            return code, outputs[1], outputs[2]

    def _fork(self, arguments: Sequence[str], environment: dict[str, str], folder: str, streams: dict[int, int]) -> int:
        """Have a command forked whose standard streams are these; return its pid."""
        assert _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        try:
            request = json.dumps([list(arguments), environment, folder, list(streams)]).encode()
            assert len(request) <= _REQUEST_BYTES, "the request is received whole"
            socket.send_fds(self._socket, [request], list(streams.values()))
            told = self._socket.recv(64)
        finally:
            # From now on only: children that it has adopted stay its own, and it wants no other orphans.
            _LIBC.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert told, "the process to fork from has ended"
        return int(told)

    def close(self) -> None:
        """End it; its commands go on."""
        self._socket.close()
        self._process.wait()


def _feed(stream: IO[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError), stream:
        stream.write(content)


def _read(stream: IO[bytes], outputs: dict[int, bytes], number: int) -> None:
    outputs[number] = stream.read()


def _import_all(*, small: bool) -> None:
    """Import what commands need; with `small`, nothing that reads the environment or the engine's state."""
    for package in map(importlib.import_module, ("lakefs", "gateway") if small else _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in _OF_HOSTS:
                importlib.import_module(module.name)
    for name in ("cli.main", "fuse", "pyfuse3", "lmdb", "prometheus_client", "cli.terminal.systemd_notify"):
        importlib.import_module(name)
    engine = [name for name in sys.modules if name.partition(".")[0] == "engine"]
    assert not small or not engine, f"{engine} would be imported before its failpoint is known"
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"


def _serve(asked: socket.socket) -> None:
    """Fork for each request, until nobody is left to send one."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, 3)
        if not request:
            return
        between = os.fork()
        if between == 0:
            _fork_an_orphan(asked, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        asked.send(os.read(_TOLD[0], 64))


_TOLD: Final = os.pipe()


def _fork_an_orphan(asked: socket.socket, request: bytes, descriptors: list[int]) -> None:
    """Fork the command and end, so that it becomes the child of the process that asked."""
    pid = os.fork()
    if pid:
        os.write(_TOLD[1], str(pid).encode())
        os._exit(0)
    asked.close()
    for descriptor in _TOLD:
        os.close(descriptor)
    arguments, environment, folder, streams = json.loads(request)
    for descriptor, number in zip(descriptors, streams, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The old objects know what the descriptors were before.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    sys.argv = ["lake", *arguments]
    random.seed()
    _be_lake()


def _be_lake() -> NoReturn:
    """Run the command and end as the interpreter does, but leave what was imported to the kernel: it frees faster."""
    code = 0
    try:
        small_lake.be_lake()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        traceback.print_exception(error)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    is_small = sys.argv[2:] == ["small"]
    if is_small:
        small_lake.make_small()
    _import_all(small=is_small)
    gc.collect()
    gc.freeze()  # a child's collector leaves the pages of what was imported as they are
    _serve(socket.socket(fileno=int(sys.argv[1])))
