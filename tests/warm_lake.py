"""Commands forked from a process that has `lake` imported: each starts in a tenth of the time.

A `lake serve` over several folders has its members forked likewise, by a process of its own (`_forking_members`).

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
from typing import IO, Any, Final, NoReturn

import trio

from tests.crash import small_lake

_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.002
_REQUEST_BYTES: Final = 1 << 17
_STREAMS_MAX: Final = 4
"""Descriptors of a request: the standard streams, and a member's socket to its parent."""
_PACKAGES: Final = ("lakefs", "engine", "fuse", "gateway", "cli")
_LEFT_OUT: Final = ("lakefs.plugins.kv.vllm_tier", "lakefs.plugins.mlflow.", "engine.etcd.")
"""Plug-ins that only their hosts can import, and the client of etcd: gRPC is not made for a process that forks."""
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
        return _forked(self._socket, arguments, environment, folder, streams)

    def close(self) -> None:
        """End it; its commands go on."""
        self._socket.close()
        self._process.wait()


def _forked(
    asked: socket.socket,
    arguments: Sequence[str],
    environment: dict[str, str],
    folder: str,
    streams: dict[int, int],
    *,
    own_group: bool = False,
) -> int:
    """Have a command forked that has these descriptors, the standard streams among them; return its pid."""
    assert _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        request = json.dumps([list(arguments), environment, folder, list(streams), own_group]).encode()
        assert len(request) <= _REQUEST_BYTES, "the request is received whole"
        socket.send_fds(asked, [request], list(streams.values()))
        told = asked.recv(64)
    finally:
        # From now on only: children that it has adopted stay its own, and it wants no other orphans.
        _LIBC.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert told, "the process to fork from has ended"
    return int(told)


def _feed(stream: IO[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError), stream:
        stream.write(content)


def _read(stream: IO[bytes], outputs: dict[int, bytes], number: int) -> None:
    outputs[number] = stream.read()


def _import_all(*, small: bool) -> None:
    """Import what commands need; with `small`, nothing that reads the environment or the engine's state."""
    for package in map(importlib.import_module, ("lakefs", "gateway") if small else _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(_LEFT_OUT):
                importlib.import_module(module.name)
    for name in ("cli.main", "fuse", "pyfuse3", "lmdb", "prometheus_client", "cli.terminal.systemd_notify"):
        importlib.import_module(name)
    engine = [name for name in sys.modules if name.partition(".")[0] == "engine"]
    assert not small or not engine, f"{engine} would be imported before its failpoint is known"
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"


def _serve(asked: socket.socket) -> None:
    """Fork for each request, until nobody is left to send one."""
    heard, told = os.pipe()
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, _STREAMS_MAX)
        if not request:
            return
        between = os.fork()
        if between == 0:
            os.close(heard)
            _fork_an_orphan(asked, told, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        asked.send(os.read(heard, 64))


def _fork_an_orphan(asked: socket.socket, told: int, request: bytes, descriptors: list[int]) -> None:
    """Fork the command and end, so that it becomes the child of the process that asked.

    The command says its pid itself: the interpreter forgets a signal that a child gets before its fork is complete.
    """
    if os.fork():
        os._exit(0)
    os.write(told, str(os.getpid()).encode())
    asked.close()
    os.close(told)
    arguments, environment, folder, streams, own_group = json.loads(request)
    for descriptor, number in zip(descriptors, streams, strict=True):
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
    if own_group:
        os.setpgid(0, 0)
    # The old objects know what the descriptors were before.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    sys.argv = ["lake", *arguments]
    random.seed()
    if arguments[:1] == ["serve"] and "SERVED_DEVICES" in environment:
        _fork_members()
    _be_lake()


# --- members of a lake -----------------------------------------------------------------------------------------------


class _ForkedMember:
    """Has what the parent of members uses of `trio.Process`."""

    def __init__(self, pid: int) -> None:
        self._process = ForkedProcess(pid, None)
        self._pidfd = os.pidfd_open(pid)
        self._one_waits = trio.Lock()

    @property
    def returncode(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
        async with self._one_waits:
            if self._process.poll() is None:
                await trio.lowlevel.wait_readable(self._pidfd)
            code = self._process.wait()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        return code


def _fork_members() -> None:
    """Let a child of this process, which has no threads yet, fork the members that this process will start."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # who started the lake waits for the end of its output
        _serve(theirs)
        os._exit(0)
    theirs.close()
    nothing = os.open(os.devnull, os.O_RDWR)

    async def open_process(command: list[str], *, pass_fds: Sequence[int], **_: Any) -> _ForkedMember:
        assert command[1:4] == ["-P", "-m", "cli.main"], "a member is started"
        streams = {0: nothing, 1: nothing, 2: 2} | {number: number for number in pass_fds}
        return _ForkedMember(_forked(ours, command[4:], dict(os.environ), "", streams, own_group=True))

    trio.lowlevel.open_process = open_process  # type: ignore[assignment]  # all that the parent of members uses of it


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
