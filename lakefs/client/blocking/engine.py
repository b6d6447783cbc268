"""The blocking client of one engine: plain sockets, pipelined requests, no trio.

`start` sends a request and returns a ticket; `finish` waits for its reply; `call` does both.  Replies to other tickets
that arrive during `finish` are kept; their bodies are received where they belong.

Rules kept here:
- May be used by several threads.  One at a time connects and sends; one at a time receives, for all of them.
- `start` cannot deadlock with an engine that waits for its client: it receives replies while a request cannot be sent.
- An engine that is silent for some time (default 30 s) while a request waits is lost (`lakefs.client.silence`).
- The next caller waits for a lost engine, at most 5 s.  `finish` sends again requests that may be repeated; others
  raise.  The first connect does not wait for an engine.  After `close` the next `start` connects anew.

One connection is `lakefs.client.blocking.link.Link`; this module replaces it when it is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from lakefs.client.blocking.link import Link, Ticket
from lakefs.client.blocking.time_limits import TimeLimits
from lakefs.client.silence import given_up
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument, LakeError
from lakefs.ids import Buffer
from lakefs.limits import ENGINE_SILENCE_S, ENGINE_WAIT_S
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import HelloReply, Request, Watch
from lakefs.wire.offers import Offers
from lakefs.wire.repeat import ATTEMPTS_MAX, GREETINGS_MAX, REPEATABLE, SESSION_REQUESTS, SessionKeeper, loss_error

_RETRY_S: Final = 0.05


def _is_refused_at_the_end(ticket: Ticket) -> bool:
    """Return True if an engine that shuts down has refused the request: its goodbye was not yet read as it was sent.

    Nothing of it was done, or it asked for descriptors that did not arrive; so any request may be sent again.
    """
    return ticket.link is not None and ticket.link.draining and isinstance(ticket.error, EngineBusy)


def connect_blocking(address: str, *, token: str = "", timeout_s: float = ENGINE_SILENCE_S) -> BlockingEngine:
    """Connect to an engine, which may be silent for `timeout_s` while a request waits.

    EngineUnreachable, PermissionDenied, UnsupportedVersion, InvalidArgument.
    """
    engine = BlockingEngine(address, token=token, timeout_s=timeout_s)
    engine.connect()
    return engine


class BlockingEngine:
    """Blocking requests to one engine.  Use as a context manager, or `close()`."""

    def __init__(self, address: str, *, token: str = "", timeout_s: float = ENGINE_SILENCE_S) -> None:
        self.address = address
        self.limits = TimeLimits(timeout_s)
        self.epoch = 0
        """Count of connections so far: descriptors, leases and sources of an earlier epoch are void."""
        self.offers = Offers()
        """See `ConnectedClient.offers`."""
        self._token = token
        self._link: Link | None = None
        self._sessions = SessionKeeper()
        self._closings = 0
        """Calls of `close`; one during a connect ends what that makes."""
        self._sending = threading.RLock()
        self._process: Final = os.getpid()
        """The process that made this.  A forked child has the same connection, and only one process may write to it."""

    def __enter__(self) -> BlockingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hello(self) -> HelloReply:
        """The engine's answer to the last Hello: store id, boot id, limits."""
        return self._usable_link().hello

    @property
    def carries_descriptors(self) -> bool:
        """See `ConnectedClient.carries_descriptors`."""
        return self._usable_link().carries_descriptors

    def is_connected(self) -> bool:
        """See `BlockingEngineClient.is_connected`; asks the system at most once in a millisecond.  From any thread."""
        link = self._link
        return link is not None and link.is_there()

    @property
    def timeout_s(self) -> float:
        """See `BlockingEngineClient.timeout_s`."""
        return self.limits.timeout_s

    @contextmanager
    def job(self, limit_s: float) -> Iterator[None]:
        """See `BlockingEngineClient.job`."""
        self.limits.begin(limit_s)
        try:
            yield
        finally:
            if not self.limits.left_s():
                self.close()  # what was lent ends with it
            self.limits.end()

    def connect(self) -> None:
        """Connect, unless connected."""
        self._usable_link()

    def close(self) -> None:
        """Close the connection; open tickets raise EngineUnreachable.  Safe in a signal handler."""
        self._closings += 1
        link, self._link = self._link, None
        if link is not None:
            link.lose(given_up(f"the connection to {self.address} was closed", self.address))

    def forked(self) -> BlockingEngine:
        """In a child just forked: return another client of the engine, which connects at its first request.

        This client sends nothing and waits for nothing; its epoch has ended.
        """
        link, self._link = self._link, None
        if link is not None:
            link.leave(EngineUnreachable(f"the connection to {self.address} is the parent's"))
        other = BlockingEngine(self.address, token=self._token, timeout_s=self.limits.timeout_s)
        other.epoch = self.epoch + 1
        other.offers = self.offers
        return other

    def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """Send a request and return its reply: `start`, then `finish`."""
        return self.finish(self.start(request, body, descriptors, into=into))

    def start(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Ticket:
        """Send a request.  `body`, `descriptors` and `into` stay in use until `finish` has returned.

        `into`: see `EngineClient.call`.  Errors: those of connecting, RequestTooLarge, InvalidArgument.
        """
        if isinstance(request, Watch):
            raise InvalidArgument("a blocking connection cannot watch; use the trio client")
        ticket = Ticket(request, body, descriptors, into)
        self._submit(ticket)
        return ticket

    def finish(self, ticket: Ticket) -> Reply:
        """Wait for the reply.  Raises the engine's error, or EngineUnreachable."""
        while True:
            assert ticket.link is not None, "a ticket was started"
            reply = ticket.link.wait(ticket)
            if ticket.link is not self._link and not ticket.link.open_count:
                ticket.link.lose(EngineUnreachable(f"{self.address} was shut down"))  # drained, and this was the last
            if reply is not None:
                if isinstance(ticket.request, SESSION_REQUESTS):
                    self._sessions.note(ticket.request, reply.message)
                reply.epoch = ticket.link.epoch
                return reply
            assert ticket.error is not None, "a ticket ends with a reply or an error"
            if _is_refused_at_the_end(ticket) and ticket.attempts < ATTEMPTS_MAX:
                self._submit(ticket)
            elif ticket.lost:
                self._recover(ticket, ticket.error)
            else:
                raise ticket.error

    def cancel(self, ticket: Ticket) -> None:
        """Give up a ticket that will not be finished: tell the engine, drop the reply, and leave `into` alone."""
        with self._sending:
            if ticket.link is not None:
                ticket.link.cancel(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Give up a ticket that will not be finished: the request is done all the same, and its reply dropped."""
        ticket.dropped = True

    def tell(self, request: Request) -> bool:
        """See `BlockingEngineClient.tell`.  Never connects, waits or raises."""
        if os.getpid() != self._process or not self._sending.acquire(blocking=False):
            return False
        try:
            return self._link is not None and self._link.tell(Ticket(request))
        finally:
            self._sending.release()

    def _recover(self, ticket: Ticket, error: LakeError) -> None:
        """Send a request again after its connection was lost; raise if it may not be repeated."""
        repeatable = type(ticket.request) in REPEATABLE and ticket.attempts < ATTEMPTS_MAX
        if not repeatable or self._link is None:
            raise loss_error(ticket.request, error)
        self._submit(ticket)

    def _submit(self, ticket: Ticket) -> None:
        if self.limits.until is not None:
            self.limits.check(self.address)
        with self._sending:
            if self._link is not None:
                self._link.look()
            self._usable_link().submit(ticket)

    def _usable_link(self) -> Link:
        link = self._link
        if link is not None and link.error is None and not link.draining:
            return link
        with self._sending:
            present = self._link
            if present is not None and present is not link and present.error is None:  # another thread has connected
                return present
            closings = self._closings
            connected = self._link = self._connected(patience_s=ENGINE_WAIT_S if link is not None else 0.0)
            if self._closings != closings:  # `close` found no link to close
                self.close()
                raise EngineUnreachable(f"the connection to {self.address} was closed", subject=self.address)
            if present is not None and not present.open_count:  # else its last ticket ends it
                present.lose(EngineUnreachable(f"{self.address} was shut down"))
            return connected

    def _connected(self, patience_s: float) -> Link:
        give_up_at = time.monotonic() + min(patience_s, self.limits.left_s())
        refused = 0
        while True:
            try:
                link = Link(self.address, self._token, self.limits)
                break
            except EngineBusy:
                refused += 1
                if refused >= GREETINGS_MAX or not self.limits.left_s():
                    raise
            except EngineUnreachable:
                if time.monotonic() >= give_up_at:
                    raise
            time.sleep(_RETRY_S)
        self.offers.take(link.hello.features, by_memory=link.carries_descriptors)
        self.epoch += 1
        link.epoch = self.epoch
        for join in self._sessions.joins():
            ticket = Ticket(join)
            link.submit(ticket)
            if link.wait(ticket) is None:
                self._sessions.forget(join.session)
        return link
