"""One request and its response, as the parts of the gateway hand them to each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

from gateway.http.head import RequestHead
from gateway.http.refusal import HttpRefusal
from lakefs.ids import Buffer

Headers = Sequence[tuple[bytes, bytes]]


class RequestBody(Protocol):
    """The payload of a request, in its order, once."""

    @property
    def length(self) -> int | None:
        """Bytes in all; None while that is not known (chunked)."""
        ...

    async def receive_into(self, target: memoryview) -> int:
        """At least one byte of the body into `target`, 0 at its end.  HttpRefusal when the client breaks off."""
        ...

    @property
    def waits_since(self) -> float:
        """When, on trio's clock, the wait for the client's next bytes began; infinite while there is none."""
        ...

    async def end(self) -> None:
        """Break the connection off: whoever receives from it gets EngineUnreachable."""
        ...


class ResponseSender(Protocol):
    """Where a long body goes."""

    def send_nowait(self, parts: Sequence[Buffer]) -> int:
        """Send what fits without waiting: the count of bytes; EngineUnreachable when the client is gone."""
        ...

    async def wait_writable(self) -> None:
        """Until `send_nowait` may take something; EngineUnreachable when the client is gone or stalled for too long."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send the next parts; EngineUnreachable when the client is gone or stalled for too long."""
        ...


@dataclass(slots=True)
class Request:
    """What is asked, by whom."""

    head: RequestHead
    body: RequestBody
    peer: str
    target: object = None
    """What the handler found it to be about, and who signed it: for those who count and log."""
    signature: object = None


@dataclass(slots=True)
class Response:
    """What is answered: a body at hand in `parts`, or one of `length` bytes that `stream` sends piece by piece.

    `length` of a response without a body (HEAD) is that of the body it would have.  A stream that raises, or ends
    early, ends the connection: the client sees a body cut short, never a whole one that is wrong.
    """

    status: int
    headers: Headers = ()
    parts: Sequence[Buffer] = ()
    length: int | None = None
    stream: Callable[[ResponseSender], Awaitable[None]] | None = None
    close: bool = False
    """Whether the connection ends with it."""
    done: Callable[[], Awaitable[None]] | None = None
    """Called once the response is sent, or is not; also when the connection is cancelled meanwhile."""
    code: str = ""
    """S3's code of a refusal."""


Handler = Callable[[Request], Awaitable[Response]]
"""Answers one request.  What it raises, but HttpRefusal of a body that it read, is a bug: the connection ends."""
Refused = Callable[[HttpRefusal], Response]
"""The answer to a request that HTTP forbids."""


class Observer(Protocol):
    """Is told of every request, when it is over; must not wait."""

    def answered(
        self, request: Request, response: Response, began: float, first: float, received: int, sent: int
    ) -> None:
        """Answered, or broken off: times of `perf_counter`, bytes of the bodies.

        `first` is when the first bytes of the answer were sent, 0.0 when that is now; `sent` is -1 for all of
        `response.parts`.
        """
        ...

    def malformed(self, response: Response) -> None:
        """What came was no request; this was the answer."""
        ...


FixedLines = Callable[[], bytes]
"""Headers that every answer has, each with its CRLF."""

_BODILESS: Final = frozenset((204, 304))
_STATUS_LINES: Final = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def response_head(response: Response, *, keep_alive: bool, fixed: bytes) -> bytes:
    """Status line and headers; `fixed` are lines that every response has, each with its CRLF."""
    pieces = [_STATUS_LINES[response.status], fixed]
    for name, value in response.headers:
        pieces += (name, b": ", value, b"\r\n")
    if response.status not in _BODILESS:
        length = sum(map(len, response.parts)) if response.length is None else response.length
        pieces.append(b"Content-Length: %d\r\n" % length)
    pieces.append(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
    return b"".join(pieces)
