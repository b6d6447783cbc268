"""A background process that reports to its parent when it serves, or why it cannot.

`detach` forks, so call it before any thread or loop is started.  The parent waits on a pipe for one message, or for its
end.  It returns with the child's line, raises the child's error as its own, or says where the child's log is.

Rules kept here:
- The child has a session of its own, `/` as its folder, and none of its parent's open files: a reader of the parent's
  output does not wait for the mount to end.
- A child whose parent is gone before it serves ends: nothing else knows of the mount.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final, Protocol

from cli.mount.log import open_log
from lakefs.errors import InternalError, LakeError, from_wire

MESSAGE_BYTES_MAX: Final = 64 << 10
DESCRIPTORS_WORTH_CLOSING: Final = 4096


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
    child = os.fork()
    if child == 0:
        sending = _become_daemon(sending, log_descriptor)
        return PipeReporter(sending)
    try:
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
