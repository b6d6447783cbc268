"""One HTTP request and its response as values, and the interfaces between connection, handler and observer.  No I/O.

`gateway.http.head` parses requests; `gateway.http.connection` receives and sends bodies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

from gateway.http.head import HttpRefusal, RequestHead
from lakefs.errors import LakeError
from lakefs.ids import Buffer

Headers = Sequence[tuple[bytes, bytes]]


class RequestBody(Protocol):
    """The payload of a request, read once and in order."""

    @property
    def length(self) -> int | None:
        """Length in bytes; None if unknown (chunked)."""
        ...

    async def receive_into(self, target: memoryview) -> int:
        """Receive at least one byte of the body into `target`, 0 at its end.  HttpRefusal if the client breaks off."""
        ...

    @property
    def waits_since(self) -> float:
        """Begin of the present wait for the client's next bytes, on trio's clock; infinite if there is no wait."""
        ...

    async def end(self) -> None:
        """Break the connection off: a task that receives from it gets EngineUnreachable."""
        ...


class ResponseSender(Protocol):
    """Sends a long body piece by piece."""

    sent_bytes: int
    """Count of the bytes that were sent."""

    def send_nowait(self, parts: Sequence[Buffer]) -> int:
        """Send as much as fits without waiting; return the byte count.  EngineUnreachable if the client is gone."""
        ...

    async def wait_writable(self) -> None:
        """Wait until `send_nowait` may send more; EngineUnreachable if the client is gone or stalled too long."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send the next parts; EngineUnreachable if the client is gone or stalled too long."""
        ...


@dataclass(slots=True)
class Request:
    """One request, and the address of its client."""

    head: RequestHead
    body: RequestBody
    peer: str
    target: object = None
    """The parsed target and, next, the signature, set by the handler: for observers."""
    signature: object = None
    answer_headers: Headers = ()
    """Headers that its answer has besides its own, set by the handler."""
    failure: LakeError | None = None
    """It was tried already and has failed: it is answered with this, and not tried again."""


@dataclass(slots=True)
class Response:
    """One response: its body is in `parts`, or has `length` bytes that `stream` sends piece by piece.

    `length` of a response without a body (HEAD) is that of the body it would have.  A stream that raises, or ends
    early, ends the connection: the client sees a body cut short, never a whole one that is wrong.
    """

    status: int
    headers: Headers = ()
    parts: Sequence[Buffer] = ()
    length: int | None = None
    stream: Callable[[ResponseSender], Awaitable[None]] | None = None
    close: bool = False
    """True if the connection ends with it."""
    done: Callable[[], Awaitable[None]] | None = None
    """Called once the response is sent, or has failed; also when the connection is cancelled."""
    code: str = ""
    """S3's code of a refusal."""


Handler = Callable[[Request], Awaitable[Response]]
"""Answers one request.  An exception is a bug and ends the connection, except HttpRefusal of a body that it read."""
Refused = Callable[[HttpRefusal], Response]
"""Returns the answer to a request that breaks HTTP."""


class Observer(Protocol):
    """Called for every request, when it is over; must not wait."""

    def answered(
        self, request: Request, response: Response, began: float, first: float, received: int, sent: int
    ) -> None:
        """Note a request that was answered or broken off: times of `perf_counter`, bytes of the bodies.

        `first` is the time of the answer's first bytes, 0.0 for now; `sent` is -1 for all of `response.parts`.
        """
        ...

    def malformed(self, response: Response) -> None:
        """Note the answer to bytes that were no request."""
        ...


FixedLines = Callable[[], bytes]
"""Returns the header lines that every answer has, each with its CRLF."""

_BODILESS: Final = frozenset((204, 304))
_STATUS_LINES: Final = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}


def response_head(response: Response, *, keep_alive: bool, fixed: bytes) -> bytes:
    """Return status line and headers; `fixed` are lines that every response has, each with its CRLF."""
    pieces = [_STATUS_LINES[response.status], fixed]
    for name, value in response.headers:
        pieces += (name, b": ", value, b"\r\n")
    if response.status not in _BODILESS:
        length = sum(map(len, response.parts)) if response.length is None else response.length
        pieces.append(b"Content-Length: %d\r\n" % length)
    pieces.append(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
    return b"".join(pieces)
