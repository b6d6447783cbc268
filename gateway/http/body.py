"""The body of one request: its framing, its `100 Continue`, and what is left of it on the connection."""

from __future__ import annotations

from typing import Final, Protocol

from gateway.http.framing import ChunkedDecoder
from gateway.http.head import HttpRefusal, RequestHead
from lakefs.limits import HTTP_STALL_TIMEOUT_S

_SKIP_BYTES_MAX: Final = 256 << 10
"""Longest unread rest of a body that is dropped to keep the connection."""
_DROPPED_BYTES: Final = 64 << 10


class Receiving(Protocol):
    """The part of a connection that its body uses (`gateway.http.connection.Connection`)."""

    deadline: float

    @property
    def has_buffered(self) -> bool:
        """True if there are received bytes that were not used."""
        ...

    def take_buffered(self, target: memoryview) -> int:
        """Move bytes received with the head into `target`; return their number."""
        ...

    async def receive_direct(self, target: memoryview) -> int:
        """Receive from the socket into `target`; 0 if the client has ended."""
        ...

    async def buffered(self) -> memoryview:
        """Return the buffered bytes, received now if there were none."""
        ...

    def use(self, count: int) -> None:
        """Drop `count` buffered bytes, which were taken."""
        ...

    async def send_continue(self) -> None:
        """Ask the client to send the body."""
        ...

    async def end(self) -> None:
        """Break the connection off, in any state."""
        ...


class Body:
    """The body of one request (`RequestBody`)."""

    def __init__(self, connection: Receiving, length: int | None, head: RequestHead) -> None:
        self.length = length
        self.is_broken = False
        self._connection = connection
        self._left_bytes = length or 0
        self._decoder = ChunkedDecoder() if length is None else None
        self._pieces: list[memoryview] = []
        self._is_awaited = head.headers.get(b"expect", b"").lower() == b"100-continue"
        self._chunked_bytes = 0

    @property
    def received_bytes(self) -> int:
        """Number of body bytes received."""
        return (self.length or 0) - self._left_bytes if self._decoder is None else self._chunked_bytes

    @property
    def has_ended(self) -> bool:
        """True if the whole body was received."""
        if self._decoder is not None:
            return self._decoder.done and not self._pieces
        return not self._left_bytes

    @property
    def can_be_skipped(self) -> bool:
        """True if the connection can be used behind the unread rest of the body."""
        if self.is_broken or self._is_awaited:  # an awaited body may never be sent
            return not self.is_broken and self.has_ended
        return self.has_ended or (self._decoder is None and self._left_bytes <= _SKIP_BYTES_MAX)

    @property
    def waits_since(self) -> float:
        """See `RequestBody`."""
        return self._connection.deadline - HTTP_STALL_TIMEOUT_S

    async def end(self) -> None:
        """See `RequestBody`."""
        await self._connection.end()

    async def continue_when_empty(self) -> None:
        """Send 100 Continue to a client that waits for it with an empty body.

        Nothing will be received that would send it.  A final answer in its place is allowed, but some clients then read
        the connection's next answer wrongly.
        """
        if self._is_awaited and self.length == 0:
            self._is_awaited = False
            await self._connection.send_continue()

    async def receive_into(self, target: memoryview) -> int:
        """See `RequestBody`."""
        if not len(target) or self.has_ended:
            return 0
        if self._is_awaited:
            self._is_awaited = False
            if not self._connection.has_buffered:
                await self._connection.send_continue()
        if self._decoder is not None:
            return await self._receive_chunked(self._decoder, target)
        target = target[: self._left_bytes]
        count = self._connection.take_buffered(target) or await self._connection.receive_direct(target)
        if not count:
            raise _cut_short()
        self._left_bytes -= count
        return count

    async def _receive_chunked(self, decoder: ChunkedDecoder, target: memoryview) -> int:
        while not self._pieces:
            if decoder.done:
                return 0
            data = await self._connection.buffered()
            if not len(data):
                raise _cut_short()
            self._pieces, used = decoder.feed(data)
            self._connection.use(used)
        piece = self._pieces[0]
        count = min(len(piece), len(target))
        self._chunked_bytes += count
        target[:count] = piece[:count]
        if count < len(piece):
            self._pieces[0] = piece[count:]
        else:
            self._pieces.pop(0)
        return count

    async def skip(self) -> bool:
        """Read and drop the rest; True when it has ended."""
        if self.has_ended:
            return True
        dropped = memoryview(bytearray(_DROPPED_BYTES))
        while await self.receive_into(dropped):
            pass
        return True


def _cut_short() -> HttpRefusal:
    return HttpRefusal(400, "IncompleteBody", "the connection ended before the body did")
