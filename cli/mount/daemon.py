"""A process in the background that tells its maker when it serves, or why it cannot.

`detach` forks, so it is called before any thread or loop is started.  The parent waits on a pipe, for one line or the
end: it returns with the line, raises the child's error as its own, or says where the child's log is.

Rules kept here:
- The child has a session of its own, `/` as its folder, and holds none of the files that its maker had open: who
  reads the maker's output to its end does not wait for the mount to end.
- A child whose maker is gone before it serves ends: nobody was told of the mount.
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
_SIGNALS_OF_A_SHELL: Final = 128


class Reporter(Protocol):
    """How a mount process tells whoever waits for it."""

    def ready(self, line: str) -> None:
        """It serves."""

    def failed(self, error: LakeError) -> None:
        """It will not."""


class PipeReporter:
    """The child's end."""

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
    """Fork.  In the child: its reporter, stderr being the log.  In the parent: the line that the child gave.

    In the parent LakeError of the child, InternalError when it ended without a word, LocalFileError for the log.
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
        raise InternalError(
            f"the mount process ended with {how} before it served; its log: {log}", subject=str(log)
        )
    message: dict[str, Any] = json.loads(text)
    if "ready" in message:
        return str(message["ready"])
    os.waitpid(child, 0)
    raise from_wire(message["error"], message["message"], message["subject"])


def _become_daemon(sending: int, log_descriptor: int) -> int:
    """Leave everything of the maker behind; the number that `sending` has now."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, nothing), (1, log_descriptor), (2, log_descriptor)):
        os.dup2(source, target)
    # Above what is closed for certain: dup2 to 3 leaves nothing of ours behind it.
    if sending != 3:
        os.dup2(sending, 3, inheritable=False)
    os.closerange(4, DESCRIPTORS_WORTH_CLOSING)
    return 3
