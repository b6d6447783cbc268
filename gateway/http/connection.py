"""One HTTP/1.1 connection: requests in, responses out, in order, until either side ends it.

Rules kept here:
- A receive is tried first and waited for when it would block; nothing is allocated for a request but its own bytes.
- A connection has one deadline at a time (`Connection.deadline`): for the next request to begin, for its head to end,
  for the next bytes of a body to be received or sent; none while its handler works.  The server (`gateway.http.server`)
  ends connections past their deadline; a timer for each would cost as much as a small request.
- A body is received into the memory that its reader gives; only bytes received with the head are copied.
- A short rest of a body that a handler does not read is read and dropped; a longer one ends the connection.
- `100 Continue` is sent when the body is first asked for, not before: a refused request costs no payload.  Exception: a
  client that expects it with an empty body gets it before the handler runs, since no reader would ask for that body.
- A request that breaks HTTP is answered once and ends the connection: where the next one begins is unknown.
- A connection that ends while its client still sends is read for a while, and the bytes dropped: closing a socket with
  unread bytes resets it, and the client would lose the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import trio

from gateway.http.framing import ChunkedDecoder, body_framing
from gateway.http.head import HeadWatch, HttpRefusal, RequestHead, head_length, parse_head
from gateway.http.messages import FixedLines, Handler, Observer, Refused, Request, Response, response_head
from lakefs.errors import EngineUnreachable
from lakefs.ids import Buffer
from lakefs.limits import (
    HTTP_HEAD_BYTES_MAX,
    HTTP_HEAD_TIMEOUT_S,
    HTTP_IDLE_TIMEOUT_S,
    HTTP_LINGER_BYTES_MAX,
    HTTP_LINGER_S,
    HTTP_STALL_TIMEOUT_S,
)
from lakefs.ports import Stream

_CONTINUE: Final = (b"HTTP/1.1 100 Continue\r\n\r\n",)
_SKIP_BYTES_MAX: Final = 256 << 10
"""Longest unread rest of a body that is dropped to keep the connection."""
_BUFFER_BYTES: Final = 8 << 10
"""Receive buffer of a new connection; it grows with a longer head."""
_DROPPED_BYTES: Final = 64 << 10
_REQUESTS_IN_A_ROW: Final = 2
"""Requests answered before a client that always has its next request ready lets others in: with 64 the slowest of
8 busy clients waited for 450 requests of the others, and an answer was no cheaper."""


class Connection:
    """Serves one stream.  `deadline` is in seconds of trio's clock."""

    def __init__(
        self, stream: Stream, handler: Handler, refused: Refused, fixed: FixedLines, observer: Observer | None = None
    ) -> None:
        self.deadline = trio.current_time() + HTTP_IDLE_TIMEOUT_S
        self.is_idle = True
        """True if no byte of a next request was received, or none will be answered."""
        self.is_last = False
        """True if the connection ends with the answer under way."""
        self._stream = stream
        self._handler = handler
        self._refused = refused
        self._fixed = fixed
        self._observer = observer
        self._first_sent_at = 0.0  # of a streamed answer
        self._sent_bytes = -1  # of its body
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # of bytes received and not used yet
        self._is_unread = False  # more bytes of the last request may arrive

    async def serve(self) -> None:
        """Serve until the connection has ended; closes the stream."""
        try:
            served = 0
            while await self._serve_next():
                served += 1
                if served % _REQUESTS_IN_A_ROW == 0:
                    await trio.lowlevel.checkpoint()
            if self._is_unread and not self.is_last:
                await self._linger()
        except EngineUnreachable:
            pass  # the client is gone, or took too long
        finally:
            with trio.CancelScope(shield=True):
                await self._stream.aclose()

    async def end(self) -> None:
        """Break the connection off, in any state."""
        await self._stream.aclose()

    async def _serve_next(self) -> bool:
        """Answer one request; return True if there may be another."""
        try:
            head = await self._head()
            if head is None:
                return False
            body = Body(self, body_framing(head), head)
            await body.continue_when_empty()
        except HttpRefusal as refusal:
            self._is_unread = True
            response = self._refused(refusal)
            if self._observer is not None:
                self._observer.malformed(response)
            await self._answer(response, keep_alive=False, with_body=True)
            return False
        began = perf_counter()
        request = Request(head, body, self._stream.peer)
        try:
            response = await self._handler(request)
        except HttpRefusal as refusal:  # the body broke the rules
            response = self._refused(refusal)
            body.is_broken = True
        keep_alive = head.keep_alive and not (response.close or self.is_last) and body.can_be_skipped
        try:
            await self._answer(response, keep_alive=keep_alive, with_body=head.method != "HEAD")
        finally:
            if self._observer is not None:
                self._observer.answered(
                    request, response, began, self._first_sent_at, body.received_bytes, self._sent_bytes
                )
            if response.done is not None:
                await response.done()
        if keep_alive:
            keep_alive = await self._skipped(body)
        self._is_unread = not keep_alive and not body.has_ended
        return keep_alive

    async def _linger(self) -> None:
        self.is_idle = True  # it may be ended to make room
        self.deadline = trio.current_time() + HTTP_LINGER_S
        self._stream.send_end()
        dropped = memoryview(bytearray(_DROPPED_BYTES))
        left_bytes = HTTP_LINGER_BYTES_MAX
        while left_bytes > 0 and (count := await self._stream.receive_into(dropped)):
            left_bytes -= count

    async def _skipped(self, body: Body) -> bool:
        try:
            return await body.skip()
        except HttpRefusal:
            return False

    # --- receiving -----------------------------------------------------------------------------------

    async def _head(self) -> RequestHead | None:
        """Return the next request's head; None if the client has ended."""
        if self._begin == self._end:
            self._begin = self._end = 0
            self.is_idle = True
            self.deadline = trio.current_time() + HTTP_IDLE_TIMEOUT_S
            if self.is_last or not await self._receive():
                return None
            self.is_idle = False
        self.deadline = trio.current_time() + HTTP_HEAD_TIMEOUT_S
        scanned = 0
        watch: HeadWatch | None = None
        while True:
            received = bytes(self._buffer[self._begin : self._end])
            if received[:2] == b"\r\n":  # RFC 9112, 2.2: some clients end a body with an empty line
                self._begin += 2
                scanned = 0
                watch = None
                continue
            length = head_length(received, scanned)
            if length:
                self._begin += length
                self.deadline = math.inf
                return parse_head(received[:length])
            watch = watch or HeadWatch()
            watch.feed(received[scanned:])
            scanned = len(received)
            self._make_room()
            if not await self._receive():
                return None

    async def _receive(self) -> int:
        """Receive bytes behind those in the buffer, before the deadline; 0 if the client has ended."""
        count = await self._stream.receive_into(self._buffer[self._end :])
        self._end += count
        return count

    def _make_room(self) -> None:
        """Make room for the rest of a head, which is at most HTTP_HEAD_BYTES_MAX long."""
        kept = bytes(self._buffer[self._begin : self._end])
        if len(kept) == len(self._buffer):
            self._buffer = memoryview(bytearray(HTTP_HEAD_BYTES_MAX))
        self._begin, self._end = 0, len(kept)
        self._buffer[: len(kept)] = kept

    def take_buffered(self, target: memoryview) -> int:
        """Move bytes received with the head into `target`; return their number."""
        count = min(len(target), self._end - self._begin)
        target[:count] = self._buffer[self._begin : self._begin + count]
        self._begin += count
        return count

    async def receive_direct(self, target: memoryview) -> int:
        """Receive from the socket into `target`; 0 if the client has ended.  The buffer must be empty."""
        self.deadline = trio.current_time() + HTTP_STALL_TIMEOUT_S
        count = await self._stream.receive_into(target)
        self.deadline = math.inf
        return count

    async def buffered(self) -> memoryview:
        """Return the buffered bytes, received now if there were none; the caller passes the number it took to `use`."""
        if self._begin == self._end:
            self._begin = self._end = 0
            self.deadline = trio.current_time() + HTTP_STALL_TIMEOUT_S
            await self._receive()
            self.deadline = math.inf
        return self._buffer[self._begin : self._end]

    def use(self, count: int) -> None:
        """Drop `count` buffered bytes, which were taken."""
        self._begin += count

    @property
    def has_buffered(self) -> bool:
        """True if there are received bytes that were not used."""
        return self._begin < self._end

    async def send_continue(self) -> None:
        """Ask the client to send the body."""
        await self._stream.send(_CONTINUE)

    # --- sending -------------------------------------------------------------------------------------

    async def _answer(self, response: Response, *, keep_alive: bool, with_body: bool) -> None:
        head = response_head(response, keep_alive=keep_alive, fixed=self._fixed())
        parts: list[Buffer] = [head]
        self._first_sent_at = 0.0
        self._sent_bytes = -1 if with_body else 0
        if with_body:
            parts += response.parts
        await self.send(parts)
        if with_body and response.stream is not None:
            self._first_sent_at = perf_counter()
            sender = _Counted(self)
            try:
                await response.stream(sender)
            finally:
                self._sent_bytes = sender.sent_bytes
            if sender.sent_bytes != response.length:
                raise EngineUnreachable("a response ended early")  # the client must not take it as whole

    def send_nowait(self, parts: Sequence[Buffer]) -> int:
        """Send as much as fits without waiting; return the byte count.  EngineUnreachable if the client is gone."""
        return self._stream.send_nowait(parts)

    async def wait_writable(self) -> None:
        """Wait until `send_nowait` may send more.  EngineUnreachable if the client is gone or stalled too long."""
        self.deadline = trio.current_time() + HTTP_STALL_TIMEOUT_S
        await self._stream.wait_writable()
        self.deadline = math.inf

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send all parts.  EngineUnreachable if the client is gone or stalled too long."""
        self.deadline = trio.current_time() + HTTP_STALL_TIMEOUT_S
        await self._stream.send(parts)
        self.deadline = math.inf


class _Counted:
    """Sender of a streamed body; counts the bytes."""

    def __init__(self, connection: Connection) -> None:
        self.sent_bytes = 0
        self._connection = connection

    def send_nowait(self, parts: Sequence[Buffer]) -> int:
        """See `ResponseSender`."""
        count = self._connection.send_nowait(parts)
        self.sent_bytes += count
        return count

    async def wait_writable(self) -> None:
        """See `ResponseSender`."""
        await self._connection.wait_writable()

    async def send(self, parts: Sequence[Buffer]) -> None:
        """See `ResponseSender`."""
        await self._connection.send(parts)
        self.sent_bytes += sum(map(len, parts))


class Body:
    """The body of one request (`RequestBody`)."""

    def __init__(self, connection: Connection, length: int | None, head: RequestHead) -> None:
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
