"""A background process that reports to its parent when it serves, or why it cannot.

`detach` forks, so call it before any thread or loop is started.  The parent waits on a pipe for one message, or for its
end.  It returns with the child's line, raises the child's error as its own, or says where the child's log is.

Rules kept here:
- The child has a session of its own, `/` as its folder, and none of its parent's open files: a reader of the parent's
  output does not wait for the mount to end.
- A child whose parent is gone before it serves ends: nothing else knows of the mount.
- Its log is a file of bounded size, descriptors 1 and 2 of the process, so output of libraries and the interpreter is
  in it, too.  A full file is renamed to `log.1`, replacing the older `log.1`.  Sizes are checked when our own lines are
  written.
- It keeps serving if its log cannot be written: the line is lost.

In the foreground logs go to stderr unbounded: to a terminal, or to the journal, which bounds itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from lakefs.errors import InternalError, LakeError, LocalFileError, from_wire

MESSAGE_BYTES_MAX: Final = 64 << 10
DESCRIPTORS_WORTH_CLOSING: Final = 4096
LOG_BYTES_MAX: Final = 8 << 20
"""Size of a full log.  With as much in `log.1` 16 MiB in all, some 100,000 lines."""


class Reporter(Protocol):
    """Port to the process that waits for the mount."""

    def ready(self, line: str) -> None:
        """Report that it serves."""

    def failed(self, error: LakeError) -> None:
        """Report that it will not serve."""


class PipeReporter:
    """The child's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def ready(self, line: str) -> None:
        self._send({"ready": line})

    def failed(self, error: LakeError) -> None:
        self._send({"error": error.wire_code, "message": error.message, "subject": error.subject})

    def _send(self, message: dict[str, Any]) -> None:
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        with open(descriptor, "wb", buffering=0) as pipe:
            pipe.write(json.dumps(message).encode()[:MESSAGE_BYTES_MAX])


def detach(log: Path) -> PipeReporter | str:
    """Fork.  In the child: return its reporter; stderr is the log.  In the parent: return the child's line.

    In the parent raises the child's LakeError, InternalError if it ended without a message, LocalFileError for the log.
    """
    log_descriptor = open_log(log)
    receiving, sending = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # An interrupt during the fork would be lost, or leave the child alone: hooks of the fork swallow exceptions.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sending = _become_daemon(sending, log_descriptor)
        return PipeReporter(sending)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(sending)
        os.close(log_descriptor)
        with open(receiving, "rb") as pipe:
            text = pipe.read(MESSAGE_BYTES_MAX)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    return _understood(text, child, log)


def _understood(text: bytes, child: int, log: Path) -> str:
    if not text:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise InternalError(f"the mount process ended with {how} before it served; its log: {log}", subject=str(log))
    message: dict[str, Any] = json.loads(text)
    if "ready" in message:
        return str(message["ready"])
    os.waitpid(child, 0)
    raise from_wire(message["error"], message["message"], message["subject"])


def _become_daemon(sending: int, log_descriptor: int) -> int:
    """Detach from the parent; returns the new number of `sending`."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, nothing), (1, log_descriptor), (2, log_descriptor)):
        os.dup2(source, target)
    # Above what is closed for certain: dup2 to 3 leaves no descriptor of ours behind it.
    if sending != 3:
        os.dup2(sending, 3, inheritable=False)
    os.closerange(4, DESCRIPTORS_WORTH_CLOSING)
    return 3


def open_log(log: Path) -> int:
    """Open the log to append; returns the descriptor.  A full one is renamed first.  Raises LocalFileError."""
    try:
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_name(f"{log.name}.1"))
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LocalFileError(f"{log}: {error.strerror}", subject=str(log)) from error


class BoundedLog:
    """File object for a logger.  `path` is open as descriptors 1 and 2."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        """Append; does nothing if that fails."""
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Begin a new file, between two lines, if this one is full."""
        with suppress(OSError, LocalFileError):
            if os.fstat(2).st_size > LOG_BYTES_MAX:
                self._begin_anew()

    def _begin_anew(self) -> None:
        descriptor = open_log(self._path)
        try:
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        finally:
            os.close(descriptor)
