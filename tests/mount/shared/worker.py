"""Processes that work on one mount each: a rank of a job on a machine of its own.

A worker is a fresh process, not a fork, so it shares no descriptor with the test or with another mount.  It calls the
functions that it is sent, one after another, and answers with what they returned or raised.  Several workers run their
functions at once when each is started before the first result is waited for.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, Final

from tests.e2e.served import ROOT, environment

HANG_S: Final = 120.0
"""Most seconds for one call."""
_LENGTH: Final = struct.Struct("<I")


class WorkerHangs(AssertionError):
    """A call did not return in time, or killed its process: the mount is to blame."""


class Worker:
    """A process that calls functions."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mount.shared.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            cwd=ROOT,
        )

    def start(self, function: Callable[..., object], *args: object) -> None:
        """Have a function called; `result` returns what it returned."""
        assert self._process.stdin is not None
        _write(self._process.stdin, (function, args))

    def result(self) -> Any:
        """Wait for the call's end; return its value or raise its error."""
        value, error = self.answer()
        if error is not None:
            raise error
        return value

    def answer(self) -> tuple[Any, Exception | None]:
        """Wait for the call's end; return its value and its error."""
        answer: tuple[Any, Exception | None]
        answer = pickle.loads(self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0]))
        return answer

    def call(self, function: Callable[..., object], *args: object) -> Any:
        """Call a function and wait for its end."""
        self.start(function, *args)
        return self.result()

    def _exactly(self, size: int) -> bytes:
        assert self._process.stdout is not None
        descriptor, content, until = self._process.stdout.fileno(), b"", time.monotonic() + HANG_S
        while len(content) < size:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise WorkerHangs(f"no answer for {HANG_S:.0f} s: the mount hangs")
            piece = os.read(descriptor, size - len(content))
            if not piece:
                code = self._process.wait()
                cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise WorkerHangs(f"the process was ended by {cause}")
            content += piece
        return content

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    """Context manager: that many workers for the block."""
    with ExitStack() as stack:
        started: list[Worker] = []
        for _ in range(count):
            started.append(Worker())
            stack.callback(started[-1].close)
        for worker in started:
            worker.call(os.getpid)  # it has imported what it needs
        yield started


def together(of: list[Worker], function: Callable[..., object], *args: object) -> list[Any]:
    """Have all workers call a function at once, each with its number first; return their values in order."""
    for number, worker in enumerate(of):
        worker.start(function, number, *args)
    answers = [worker.answer() for worker in of]  # of all: none may be left for a later call
    for _, error in answers:
        if error is not None:
            raise error
    return [value for value, _ in answers]


def _write(stream: BinaryIO | Any, value: object) -> None:
    content = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def main() -> None:
    """Serve calls until the pipe ends."""
    taking, giving = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a function prints gets between the answers
    while length := taking.read(_LENGTH.size):
        function, args = pickle.loads(taking.read(_LENGTH.unpack(length)[0]))
        answer: tuple[object, Exception | None]
        try:
            answer = (function(*args), None)
        except Exception as error:  # noqa: BLE001 - any of them is the answer
            answer = (None, error)
        _write(giving, answer)


if __name__ == "__main__":
    main()
