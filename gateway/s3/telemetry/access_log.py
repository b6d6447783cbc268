"""The access log: one line of JSON for each request, or one of N; errors of the server always.

Rules kept here:
- Access key ids are logged; secrets, signatures and queries never.
- All input from clients is escaped by JSON and cut to a length, so a line is one line, of at most some 8 KiB.
- Lines gather in memory and are written once a second, or when there are many, in a thread, with O_APPEND and whole:
  several processes may share a file.  Lines that a slow or full disk does not take are dropped and counted; no request
  waits.
- `reopen` (SIGHUP) continues in a new file of the same name, so that the old one may be renamed before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import structlog
import trio

from gateway.http.messages import Request, Response
from gateway.s3.protocol.signing import Signature
from gateway.s3.protocol.targets import Target
from lakefs.errors import LocalFileError
from lakefs.limits import S3_ACCESS_LOG_BYTES_MAX
from lakefs.ports import Offload

STDERR: Final = "stderr"
_NOT_IMPLEMENTED: Final = 501
"""The status of what is not offered: no error of the server, though above 500."""
_WRITE_EVERY_S: Final = 1.0
WRITE_BYTES: Final = 64 << 10
"""Bytes of lines that are written at once."""
_AGENT_BYTES: Final = 256
_PATH_BYTES: Final = 1024
_log: Final = structlog.get_logger(__name__)
_encode: Final = msgspec.json.Encoder().encode


class AccessLog:
    """One log; `run` writes it, in a task of its owner.  Raises LocalFileError if it cannot be opened."""

    def __init__(self, destination: str, one_of: int, offload: Offload) -> None:
        """`destination`: `stderr` or a path."""
        self.lost = 0
        """Number of lines that could not be written."""
        self._destination = destination
        self._one_of = one_of
        self._turn = 0
        self._offload = offload
        self._lines: list[bytes] = []
        self._bytes = 0
        self._is_due = trio.Event()
        self._second = (0, "")
        self._file = self._opened()
        self.take_more: Callable[[], tuple[bytes, int]] = lambda: (b"", 0)
        """Returns lines that were written elsewhere since the last call, and the count of those lost there."""

    def answered(
        self,
        request: Request,
        response: Response,
        took_s: float,
        first_s: float,
        received: int,
        sent: int,
        is_cut: bool,
    ) -> None:
        """Note one request."""
        self._turn += 1
        is_ours = response.status >= 500 and response.status != _NOT_IMPLEMENTED
        if self._turn < self._one_of and not is_ours:
            return
        if self._turn >= self._one_of:
            self._turn = 0
        fields = self._who_and_what(request, response)
        fields |= {
            "status": response.status,
            "error": response.code,
            "bytes_in": received,
            "bytes_out": sent,
            "total_ms": round(took_s * 1000, 3),
            "first_byte_ms": round(first_s * 1000, 3),
            "user_agent": request.head.headers.get(b"user-agent", b"")[:_AGENT_BYTES].decode("latin-1"),
        }
        if is_cut:
            fields["cut_short"] = True
        line = _encode(fields) + b"\n"
        if self._bytes + len(line) > S3_ACCESS_LOG_BYTES_MAX:
            self.lost += 1
            return
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= WRITE_BYTES:
            self._is_due.set()

    async def run(self) -> None:
        """Write noted lines until cancelled; then the rest."""
        try:
            while True:
                with trio.move_on_after(_WRITE_EVERY_S):
                    await self._is_due.wait()
                self._is_due = trio.Event()
                await self._write()
        finally:
            with trio.CancelScope(shield=True):
                await self._write()
            if self._destination != STDERR:
                os.close(self._file)

    def reopen(self) -> None:
        """Continue in a new file; in the old one if the new one cannot be opened."""
        if self._destination == STDERR:
            return
        try:
            new = self._opened()
        except LocalFileError as error:
            _log.error("access_log_not_reopened", reason=error.message)
            return
        os.dup2(new, self._file, inheritable=False)  # a write under way ends in one of the two
        os.close(new)

    def write_soon(self) -> None:
        """Write what has gathered now, here and elsewhere."""
        self._is_due.set()

    async def _write(self) -> None:
        more, lost = self.take_more()
        self.lost += lost
        lines, self._lines, self._bytes = self._lines, [], 0
        if more:
            lines.append(more)
        if not lines:
            return
        try:
            await self._offload.run(_write_all, self._file, b"".join(lines))
        except OSError as error:
            count = sum(line.count(b"\n") for line in lines)
            self.lost += count
            _log.error("access_log_not_written", lines=count, reason=error.strerror)

    def _opened(self) -> int:
        if self._destination == STDERR:
            return 2
        try:
            return os.open(self._destination, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise LocalFileError(
                f"access log {self._destination}: {error.strerror}", subject=self._destination
            ) from error

    def _who_and_what(self, request: Request, response: Response) -> dict[str, Any]:
        target, signature = request.target, request.signature
        fields: dict[str, Any] = {
            "event": "s3_request",
            "timestamp": self._timestamp(),
            "request_id": _id_of(response),
            "remote": request.peer,
            "access_key": signature.key.access_key if isinstance(signature, Signature) else "",
            "method": request.head.method,
        }
        if isinstance(target, Target):
            fields |= {"operation": target.operation.value, "bucket": target.bucket, "key": target.key}
        else:
            fields["path"] = request.head.path[:_PATH_BYTES].decode("latin-1")
        return fields

    def _timestamp(self) -> str:
        now = time.time_ns()
        second, rest = divmod(now, 1_000_000_000)
        if second != self._second[0]:
            self._second = (second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S"))
        return f"{self._second[1]}.{rest // 1_000_000:03}Z"


def _id_of(response: Response) -> str:
    return next((value.decode() for name, value in response.headers if name == b"x-amz-request-id"), "")


def _write_all(descriptor: int, lines: bytes) -> None:
    left = memoryview(lines)
    while left:
        left = left[os.write(descriptor, left) :]
