"""One blocking connection to an engine: sends requests, receives replies, ends once.

Rules kept here:
- One thread at a time calls `submit`.  Any number may `wait`: one of them receives for all; the others wait until
  something has arrived.
- While other tickets are open, requests are sent without blocking; when one cannot be sent, replies are received.
- An error or an interruption (Ctrl-C) while sending or receiving ends the link, so bytes never get out of order, and
  so does the engine's silence (`lakefs.client.blocking.waits`).  Every open ticket is then `lost`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lakefs.client.blocking.socket import connected_socket, limit_waits
from lakefs.client.blocking.time_limits import TimeLimits
from lakefs.client.blocking.waits import Waits
from lakefs.client.silence import Asked, silent_error
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument, LakeError, ProtocolError
from lakefs.host.descriptors import after, close_all
from lakefs.ids import Buffer
from lakefs.transport.address import parse_address
from lakefs.transport.sockets import lost_error, receive_with_descriptors, send_some
from lakefs.wire.connection import (
    ClientConnection,
    ClientEvent,
    FailureReceived,
    FrameIgnored,
    GoodbyeReceived,
    ReplyReceived,
    StreamEnded,
    check_hello_reply,
    reply_memory,
)
from lakefs.wire.engine_port import Body, Reply
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.messages import Hello, HelloReply, Ping, Request

CLIENT_NAME: Final = "lakefs-python"
_IDLE_S: Final = 0.02
"""An engine that was heard this recently is not checked for a goodbye or an end: a check costs 5 us."""
LOOK_EVERY_S: Final = 0.001
"""Least time between two checks: no engine starts and frees a place this soon after another was killed."""
_LOOK_AGAIN_S: Final = 0.02
_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)


@dataclass(slots=True, eq=False)
class Ticket:
    """A started request.  Ends with `reply`, or with `error`; `lost`: its connection was lost."""

    request: Request
    body: Sequence[Buffer] = ()
    descriptors: Sequence[int] = ()
    into: Sequence[memoryview] = ()
    link: Link | None = None
    stream_id: int = 0
    attempts: int = 0
    reply: Reply | None = None
    error: LakeError | None = None
    lost: bool = False
    dropped: bool = False

    @property
    def ended(self) -> bool:
        """True if the ticket has its reply or its error."""
        return self.reply is not None or self.error is not None


class Link:
    """A connection.  The constructor connects and says Hello: EngineUnreachable, PermissionDenied, ..."""

    def __init__(self, address: str, token: str, limits: TimeLimits) -> None:
        self.address = address
        self.epoch = 0
        """Number of this connection, as its owner counts them."""
        self.error: LakeError | None = None
        self.draining = False
        self._limits = limits
        self._sock = connected_socket(parse_address(address), limits.hello_s())
        self._unix = self._sock.family == socket.AF_UNIX
        self._wire = ClientConnection()
        self._tickets: dict[int, Ticket] = {}
        self._descriptors: list[int] = []
        self._lock = threading.Lock()
        self._received = threading.Condition(self._lock)
        self._receiver_at_work = False
        self._others_waiting = 0
        self._heard_at = 0.0
        self._looked_at = 0.0
        self._hello: HelloReply | None = None
        self._framing = threading.Lock()
        """Held while a frame is made and sent: the receiving thread may send a Ping between two."""
        self._waits = Waits(address, limits)
        self._greet(token)

    @property
    def hello(self) -> HelloReply:
        """The engine's answer to Hello."""
        assert self._hello is not None, "the constructor has greeted the engine"
        return self._hello

    @property
    def carries_descriptors(self) -> bool:
        """True if descriptors can be sent with requests."""
        return self._unix and self.hello.descriptors

    @property
    def open_count(self) -> int:
        """Tickets that have not ended."""
        return len(self._tickets)

    def submit(self, ticket: Ticket) -> None:
        """Send a request.  If the connection is lost during this, so is the ticket, which then ends `wait`."""
        if ticket.descriptors and not self.carries_descriptors:
            raise InvalidArgument(f"descriptors cannot be sent to {self.address}", subject=self.address)
        while not self._has_room():
            self._receive(self._take_in_one, self._has_room)
        body = ticket.body
        body_bytes = sum(map(len, body)) if body else 0
        with self._framing:
            stream_id, frame = self._wire.request(ticket.request, body_bytes, len(ticket.descriptors))
            ticket.link, ticket.stream_id = self, stream_id
            ticket.attempts += 1
            ticket.error, ticket.lost = None, False
            self._tickets[stream_id] = ticket
            if self.error is not None:  # lost since the caller looked
                self._lose_tickets(self.error)
                return
            self._send([frame, *body] if body else [frame], ticket.descriptors)

    def tell(self, ticket: Ticket) -> bool:
        """Send a short request whose answer is dropped, if nothing is under way; return True if it was sent."""
        if self._tickets:  # the answer to an earlier `tell` may have arrived
            self._receive(self._take_in_arrived, self._is_awaited)
        if self._tickets or self._receiver_at_work or self.draining or self.error is not None:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(0):
            return False
        ticket.dropped = True
        self.submit(ticket)
        return True

    def wait(self, ticket: Ticket) -> Reply | None:
        """Wait for the ticket's end; return its reply, or None if it ended with an error."""
        while not ticket.ended:
            self._receive(self._take_in_one, lambda: ticket.ended)
        return ticket.reply

    def look(self) -> None:
        """If nothing was awaited or heard for a while, take in a goodbye or an end that has arrived since."""
        if not self._is_awaited() and time.monotonic() - self._heard_at > _IDLE_S:
            self._receive(self._take_in_arrived, self._is_awaited)

    def is_there(self) -> bool:
        """Return True if the connection is open; checks at most once in `LOOK_EVERY_S`.  From any thread."""
        now = time.monotonic()
        if self.error is None and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            try:
                is_at_end = not self._sock.recv(1, socket.MSG_PEEK | _DONT_WAIT)
            except BlockingIOError:
                return True
            except OSError:
                is_at_end = True
            if is_at_end:
                self.lose(lost_error(self.address))
            elif not self._is_awaited():  # the end may be behind frames that were not received yet
                self._receive(self._take_in_arrived, self._is_awaited)
        return self.error is None

    def _is_awaited(self) -> bool:
        tickets = list(self._tickets.values()) if self._tickets else ()
        return any(not ticket.dropped for ticket in tickets)

    def cancel(self, ticket: Ticket) -> None:
        """Tell the engine to give up a request; drop its reply if it arrives."""
        ticket.dropped = True
        if self.error is None and ticket.stream_id in self._tickets:
            with self._framing:
                self._send([self._wire.cancel(ticket.stream_id)], ())

    def lose(self, error: LakeError) -> None:
        """End the connection; open tickets are lost.  Does nothing the second time."""
        if self.error is not None:
            return
        if self._hello is not None and not isinstance(error, EngineUnreachable):
            error = EngineUnreachable(f"the connection to {self.address} had to end: {error.message}")
        self.error = error
        with contextlib.suppress(OSError):  # the peer has closed it
            # It wakes a thread that receives.  And from now on the engine takes nothing from slots of its callers.
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._receiver_at_work:
            self._release_if_lost()
        self._lose_tickets(error)

    def leave(self, error: LakeError) -> None:
        """Like `lose`, in a child just forked: the connection stays open in the parent and is not shut down."""
        self.error = error
        self._sock.close()
        close_all(self._claim(len(self._descriptors)))
        self._lose_tickets(error)

    # --- sending -----------------------------------------------------------------------------------

    def _send(self, parts: Sequence[Buffer], descriptors: Sequence[int]) -> None:
        is_new = True
        try:
            while parts and self.error is None:
                alone = len(self._tickets) <= 1
                try:
                    count = send_some(self._sock, parts, descriptors, 0 if alone else _DONT_WAIT)
                except BlockingIOError:
                    is_new = False
                    if alone:
                        self._waits.took_nothing(self._waits.wait_s)
                    else:
                        self._make_way()
                    continue
                parts = after(parts, count) if count < sum(map(len, parts)) else ()
                descriptors = ()
                if not is_new:  # what the socket took at first says nothing of the engine
                    self._waits.signs += 1
                    self._waits.check()
                is_new = False
        except OSError as error:
            self._find_out(lost_error(self.address, error))
        except EngineUnreachable as error:
            self.lose(error)
        except BaseException:
            self.lose(lost_error(self.address))
            raise

    def _make_way(self) -> None:
        """Wait until more can be sent; receive replies while waiting."""
        others_receive = self._receiver_at_work
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT if others_receive else select.POLLOUT | select.POLLIN)
        # A receiving thread stops when it has its reply; then this thread must receive.
        wait_s = min(_LOOK_AGAIN_S, self._waits.wait_s) if others_receive else self._waits.wait_s
        found = poll.poll(wait_s * 1000)
        if not found:
            self._waits.took_nothing(wait_s)
        for _, events in found:
            if events & select.POLLIN and not events & select.POLLOUT:
                self._receive(self._take_in_arrived, lambda: False)

    def _find_out(self, error: LakeError) -> None:
        """After a failed send: receive until the end, because the engine may have said why before it closed."""
        while not self._is_lost() and not self._receiver_at_work:
            self._receive(self._take_in_one, self._is_lost)
        self.lose(error)

    # --- silence -----------------------------------------------------------------------------------

    def _ask(self) -> Asked:
        """Send a Ping, in the receiving thread, if that needs no wait."""
        assert self._hello is not None, "Hello has a deadline, and needs no Ping"
        if not self._framing.acquire(blocking=False):
            return Asked.NOT_NOW
        try:
            if len(self._tickets) >= self._hello.inflight_max:
                return Asked.NOT_NOW
            stream_id, frame = self._wire.request(Ping())
            try:
                count = send_some(self._sock, [frame], (), _DONT_WAIT)
            except BlockingIOError:
                self._wire.withdraw(stream_id)
                return Asked.FULL
            if count < len(frame):  # no later frame may begin in the midst of this one
                raise silent_error(self.address, self._limits.timeout_s)
            self._tickets[stream_id] = Ticket(Ping(), link=self, stream_id=stream_id, dropped=True)
            return Asked.SENT
        finally:
            self._framing.release()

    # --- receiving ---------------------------------------------------------------------------------

    def _receive(self, step: Callable[[], None], enough: Callable[[], bool]) -> None:
        """Do a step of receiving; if another thread is receiving, wait until it has done one.

        `enough` is called under the lock: what the caller waits for may have arrived since it looked.
        """
        is_mine = False
        try:
            with self._lock:
                if enough() or self.error is not None:
                    return
                if self._receiver_at_work:
                    self._others_waiting += 1
                    try:
                        self._received.wait()
                    finally:
                        self._others_waiting -= 1
                    return
                self._receiver_at_work = is_mine = True  # from here on an interruption ends the link
            step()
            self._heard_at = time.monotonic()
        except LakeError as error:
            self.lose(error)
        except OSError as error:
            self.lose(lost_error(self.address, error))
        except BaseException:
            if is_mine:
                self.lose(lost_error(self.address))
            raise
        finally:
            if is_mine:
                with self._lock:
                    self._receiver_at_work = False
                    self._release_if_lost()
                    if self._others_waiting:
                        self._received.notify_all()

    def _take_in_one(self) -> None:
        while (event := self._wire.next_event()) is None:
            self._receive_more()
        self._handle(event)

    def _take_in_arrived(self) -> None:
        """Receive what has arrived, possibly the rest of a dropped body, without waiting for more."""
        with contextlib.suppress(BlockingIOError):
            while True:
                while (event := self._wire.next_event()) is not None:
                    self._handle(event)
                self._receive_more(_DONT_WAIT)

    def _has_room(self) -> bool:
        """Return True if another request may be sent, or none ever, because the connection is lost."""
        return self._is_lost() or self._hello is None or len(self._tickets) < self._hello.inflight_max

    def _is_lost(self) -> bool:
        return self.error is not None

    def _release_if_lost(self) -> None:
        if self.error is not None:
            self._sock.close()
            close_all(self._claim(len(self._descriptors)))

    def _receive_more(self, flags: int = 0) -> None:
        reader = self._wire.reader
        if self._descriptors and not reader.mid_frame:
            close_all(self._claim(len(self._descriptors)))  # no frame announced them
        reader.received(self._receive_into(reader.space(), flags))

    def _receive_into(self, buffer: memoryview, flags: int = 0) -> int:
        while True:
            try:
                if self._unix:
                    count = receive_with_descriptors(self._sock, buffer, self._descriptors, flags)
                else:
                    count = self._sock.recv_into(buffer, 0, flags)
            except BlockingIOError:
                if flags & _DONT_WAIT:
                    raise
                self._waits.sent_nothing(self._sock, self._ask)
                continue
            if not count:
                raise lost_error(self.address)
            self._waits.signs += 1
            return count

    def _handle(self, event: ClientEvent) -> None:
        if isinstance(event, ReplyReceived):
            self._replied(event)
        elif isinstance(event, FailureReceived):
            self._ended(event.stream_id).error = event.error
        elif isinstance(event, StreamEnded):
            self._ended(event.stream_id).error = _cancelled()
        elif isinstance(event, GoodbyeReceived):
            self.draining = True
        elif isinstance(event, FrameIgnored):
            close_all(self._claim(event.descriptor_count))
        else:
            raise ProtocolError("the engine sent an event and nothing is watched here")

    def _replied(self, event: ReplyReceived) -> None:
        ticket = self._tickets.get(event.stream_id)
        if ticket is None:  # another thread has closed the connection
            raise lost_error(self.address)
        descriptors = self._claim(event.descriptor_count)
        parts: Sequence[Buffer] = ()
        if event.body_bytes and ticket.dropped:
            self._wire.reader.skip_body()
        elif event.body_bytes:
            _, parts = reply_memory(ticket.into, event.body_bytes)
            for view in self._wire.reader.take_body(parts):
                while len(view):
                    view = view[self._receive_into(view) :]
                    self._waits.check()
        self._tickets.pop(event.stream_id, None)
        if ticket.dropped:
            close_all(descriptors)
            ticket.error = _cancelled()
        elif len(descriptors) < event.descriptor_count:
            close_all(descriptors)
            ticket.error = EngineBusy("descriptors that the engine sent did not arrive; raise the limit of open files")
        else:
            ticket.reply = Reply(event.message, Body(parts), descriptors)

    def _ended(self, stream_id: int) -> Ticket:
        ticket = self._tickets.pop(stream_id, None)
        if ticket is None:  # another thread has closed the connection
            raise lost_error(self.address)
        return ticket

    def _claim(self, count: int) -> list[int]:
        claimed = self._descriptors[:count]
        del self._descriptors[:count]
        return claimed

    def _lose_tickets(self, error: LakeError) -> None:
        tickets = list(self._tickets.values())
        self._tickets.clear()
        for ticket in tickets:
            ticket.lost = True
            ticket.error = error

    # --- hello -------------------------------------------------------------------------------------

    def _greet(self, token: str) -> None:
        ticket = Ticket(Hello(PROTOCOL_VERSION, CLIENT_NAME, 0, token))
        self._sock.settimeout(self._limits.hello_s())
        try:
            self.submit(ticket)
            reply = self.wait(ticket)
            if reply is None:
                assert ticket.error is not None, "a ticket ends with a reply or an error"
                raise ticket.error
            assert isinstance(reply.message, HelloReply), "Hello is answered with HelloReply"
            check_hello_reply(reply.message)
            self._sock.settimeout(None)
            limit_waits(self._sock, self._limits.wait_s)
            self._hello = reply.message
        except BaseException:
            self.lose(lost_error(self.address))
            raise


def _cancelled() -> EngineUnreachable:
    return EngineUnreachable("the request was cancelled")
