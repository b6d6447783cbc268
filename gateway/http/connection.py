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
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from gateway.http.body import Body
from gateway.http.door import Door, Failed, HandedOver
from gateway.http.framing import body_framing
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
from lakefs.transport.streams import SocketStream

if TYPE_CHECKING:
    from gateway.http._door import Rest

_CONTINUE: Final = (b"HTTP/1.1 100 Continue\r\n\r\n",)
_BUFFER_BYTES: Final = 8 << 10
"""Receive buffer of a connection; it grows with a longer head."""
_DROPPED_BYTES: Final = 64 << 10
_NO_BUFFER: Final = memoryview(b"")
"""The buffer of a connection that has received nothing.  Read-only buffers hold what the door received."""
NOT_PARKED: Final = -1
_NS: Final = 1_000_000_000
_REQUESTS_IN_A_ROW: Final = 2
"""Requests answered before a client that always has its next request ready lets others in: with 64 the slowest of
8 busy clients waited for 450 requests of the others, and an answer was no cheaper."""


class Connection:
    """Serves one stream.  `deadline` is in seconds of trio's clock."""

    def __init__(
        self,
        stream: Stream,
        handler: Handler,
        refused: Refused,
        fixed: FixedLines,
        observer: Observer | None = None,
        door: Door | None = None,
        left: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """With a `door` the connection waits there for each request, if its stream is a plain socket.

        `left` is called if the door keeps it without a task.
        """
        self.deadline = trio.current_time() + HTTP_IDLE_TIMEOUT_S
        self._is_idle = True
        self.is_last = False
        """True if the connection ends with the answer under way."""
        self._stream = stream
        self._door = door if isinstance(stream, SocketStream) and not stream.carries_descriptors else None
        self.parked_as = NOT_PARKED
        """Its descriptor while the door has it, or has handed it over and its task has not run yet."""
        self._peer = msgspec.json.encode(stream.peer)
        self._failed: Failed | None = None
        """Set if the next request was tried before this task has got it."""
        self._handler = handler
        self._refused = refused
        self._fixed = fixed
        self._left = left
        self._observer = observer
        self._first_sent_at = 0.0  # of a streamed answer
        self._sent_bytes = -1  # of its body
        self._buffer = _NO_BUFFER
        self._begin = self._end = 0  # of bytes received and not used yet
        self._is_unread = False  # more bytes of the last request may arrive

    async def serve(self, handed: HandedOver | None = None) -> None:
        """Serve until the connection has ended, or was let go; closes the stream.  Begins with what the door had."""
        try:
            if handed is not None:
                await self._take(handed)
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

    @property
    def is_idle(self) -> bool:
        """True if no byte of a next request was received, or none will be answered."""
        if self._door is None or self.parked_as == NOT_PARKED:
            return self._is_idle
        return self._door.is_quiet(self.parked_as)

    def finish(self) -> None:
        """Let the connection end with the answer under way."""
        self.is_last = True
        if self._door is not None and self.parked_as != NOT_PARKED:
            self._door.finish(self.parked_as)

    async def end(self) -> None:
        """Break the connection off, in any state."""
        if self._door is not None and self.parked_as != NOT_PARKED:
            self._door.leave(self.parked_as)
        await self._stream.aclose()

    def _let_go(self) -> None:
        """Leave the connection to the door, with its descriptor: this task ends."""
        assert isinstance(self._stream, SocketStream)
        self.parked_as = NOT_PARKED
        self._stream.detach()
        self._left(self)

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
        failed, self._failed = self._failed, None
        try:
            if failed is not None:
                request.failure, began = failed.error, failed.began_ns / _NS  # both are CLOCK_MONOTONIC
                await body.skip()  # it has been received
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
        self._is_idle = True  # it may be ended to make room
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
            self._is_idle = True
            self.deadline = trio.current_time() + HTTP_IDLE_TIMEOUT_S
            if self.is_last or not await self._next_bytes():
                return None
            self._is_idle = False
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

    async def _next_bytes(self) -> int:
        """Receive the first bytes of the next request that the door does not answer; 0 if the client has ended."""
        if self._door is None or not isinstance(self._stream, SocketStream):
            return await self._receive()
        self._buffer = _NO_BUFFER  # a waiting connection costs no memory
        received: bytes | None = b""
        while received == b"" and not self.is_last:  # a client that was slow to take an answer has not asked again
            descriptor = self.parked_as = self._stream.descriptor
            if descriptor < 0:
                raise EngineUnreachable("the connection was closed here")
            try:
                handed = await self._door.next_bytes(descriptor, self._peer, let_go=self._let_go)
            except OSError:  # the system watches no more descriptors
                return await self._receive()
            finally:
                self.parked_as = NOT_PARKED
            received = await self._take(handed)
        return len(received or b"")

    async def _take(self, handed: HandedOver) -> bytes | None:
        """Send what the door has left of an answer, and use what it has received; return that."""
        received, unsent, rest, self._failed = handed
        self._is_idle = False
        if unsent:
            await self.send([unsent])
        if rest is not None:
            assert self._door is not None
            await self._door.send_rest(rest, self._go_on, _Counted(self))
        self._is_idle = not received
        if received:
            self.deadline = trio.current_time() + HTTP_IDLE_TIMEOUT_S
            self._buffer = memoryview(received)
            self._end = len(received)
        return received

    async def _go_on(self, rest: Rest) -> Rest | None:
        """Let the door send the rest of an answer; return what is left when its next bytes are not at hand there."""
        assert self._door is not None
        assert isinstance(self._stream, SocketStream)
        self.parked_as = self._stream.descriptor
        try:
            received, unsent, left, _ = await self._door.next_bytes(self.parked_as, self._peer, rest=rest)
        finally:
            self.parked_as = NOT_PARKED
        if received is None:
            raise EngineUnreachable("the client is gone")
        assert not received, "nothing is received while an answer is under way"
        assert not unsent, "the head has been sent"
        return left

    async def _receive(self) -> int:
        """Receive bytes behind those in the buffer, before the deadline; 0 if the client has ended."""
        if self._buffer.readonly and self._begin == self._end:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
            self._begin = self._end = 0
        count = await self._stream.receive_into(self._buffer[self._end :])
        self._end += count
        return count

    def _make_room(self) -> None:
        """Make room for the rest of a head, which is at most HTTP_HEAD_BYTES_MAX long."""
        kept = bytes(self._buffer[self._begin : self._end])
        if len(kept) == len(self._buffer) or self._buffer.readonly:
            whole = len(kept) >= _BUFFER_BYTES
            self._buffer = memoryview(bytearray(HTTP_HEAD_BYTES_MAX if whole else _BUFFER_BYTES))
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
