"""Load for an HTTP server: requests made ahead, over a number of connections that are kept open.

One thread and one epoll, and it parses only the answer's first line and its length: about 12 us of CPU per small
request, less than any measured server takes.  `Outcome.own_cpu_s` shows how close it was to being the limit.

With a rate it is an open loop: requests have their times whether or not earlier ones have been answered.  A request
that finds no connection free waits, and its latency counts from the time that it was meant to begin.  So a server
that stalls is charged with all requests due during the stall (no coordinated omission).  Without a rate the loop is
closed: each connection sends its next request once the previous answer is complete.

Every answer's status, and its length where known, is compared: a wrong one is `WrongAnswer`, never a figure.
Contents are compared separately, by `ask`, which keeps a body.
"""

from __future__ import annotations

import gc
import http.client
import math
import re
import resource
import select
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from bench.harness.arrivals import Arrivals
from bench.harness.s3_requests import Endpoint, Request

_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength:[ \t]*([0-9]+)")
_CHUNKED: Final = re.compile(rb"\r\n[Tt]ransfer-[Ee]ncoding:[ \t]*chunked", re.IGNORECASE)
_LAST_CHUNK: Final = b"0\r\n\r\n"
_RECEIVE_BYTES: Final = 1 << 20
_SEND_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 64 << 10
"""Longest body that is sent with its head in one piece."""
_WAIT_S: Final = 60.0
"""A server that is silent for so long has failed."""
_READ: Final = select.EPOLLIN
_READ_WRITE: Final = select.EPOLLIN | select.EPOLLOUT


class WrongAnswer(Exception):
    """A server answered wrongly, or not at all; the text says how."""


@dataclass
class Outcome:
    """Results of a run.  `latencies_s`: of answered requests; `unfinished_s`: age of requests that were unanswered
    when the time was up.  `moved_bytes`: of bodies, in both directions."""

    elapsed_s: float = 0.0
    own_cpu_s: float = 0.0
    moved_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list)
    unfinished_s: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of answered requests."""
        return len(self.latencies_s)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.moved_bytes / self.elapsed_s

    def percentile_s(self, share: float) -> float:
        """Return a percentile of the time to the last byte; infinite if too few requests were answered in time."""
        begun = self.count + len(self.unfinished_s)
        rank = max(0, math.ceil(share * begun) - 1)
        return sorted(self.latencies_s)[rank] if rank < self.count else math.inf


class _Connection:
    """One socket and the request in progress on it."""

    __slots__ = ("begun_s", "body", "chunked", "fresh", "head", "left", "masked", "request", "sock", "tail")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.request: Request | None = None
        self.begun_s = 0.0
        self.body: memoryview | None = None  # rest of the request still to send
        self.head = b""  # head of the answer, as far as received
        self.left = -1  # bytes of the answer still to receive; -1: its head is incomplete
        self.chunked = False
        self.tail = b""  # last bytes of a chunked answer
        self.masked = _READ
        self.fresh = True


class Load:
    """Connections to one server; a context manager.  They stay open between runs."""

    def __init__(self, endpoint: Endpoint, connections: int) -> None:
        self._address = ("127.0.0.1", endpoint.port)
        self._count = connections
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, _Connection] = {}
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._outcome = Outcome()
        self._left: Iterator[Request] = iter(())
        self._last_begin_s = math.inf
        self._under_way = 0
        self._arrivals: Arrivals | None = None
        self._idle: list[_Connection] = []

    def __enter__(self) -> Load:
        try:
            while len(self._by_descriptor) < self._count:
                self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, whatever their state."""
        for connection in self._by_descriptor.values():
            connection.sock.close()
        self._by_descriptor.clear()
        self._epoll.close()

    def run(
        self,
        requests: Iterable[Request],
        *,
        for_s: float = math.inf,
        give_up_s: float = math.inf,
        rate_per_s: float = 0.0,
    ) -> Outcome:
        """Send all requests, or as many as begin within `for_s`; wait for their answers, at most `give_up_s` in all.

        `rate_per_s`: an open loop with so many arrivals a second.  Requests in progress when the time is up are
        abandoned, and their connections reopened for the next run.  WrongAnswer, or OSError if the server is gone.
        """
        self._outcome = outcome = Outcome()
        self._left = iter(requests)
        was_collecting = gc.isenabled()
        gc.disable()
        cpu_begin, begin = time.thread_time(), time.perf_counter()
        self._last_begin_s = begin + for_s
        self._arrivals = Arrivals(begin, rate_per_s, begin + for_s) if rate_per_s else None
        self._idle = []
        try:
            for connection in list(self._by_descriptor.values()):
                self._next(connection)
            self._drive(begin + give_up_s)
        finally:
            if was_collecting:
                gc.enable()
        outcome.elapsed_s = time.perf_counter() - begin
        outcome.own_cpu_s = time.thread_time() - cpu_begin
        self._give_up()
        return outcome

    def _drive(self, until_s: float) -> None:
        while self._under_way or (self._arrivals is not None and not self._arrivals.ended):
            left_s = until_s - time.perf_counter()
            if left_s <= 0:
                return
            events = self._events(min(_WAIT_S, left_s))
            if not events and left_s > _WAIT_S and self._arrivals is None:
                raise WrongAnswer(f"no answer within {_WAIT_S:.0f} s")
            for descriptor, event in events:
                connection = self._by_descriptor[descriptor]
                if event & select.EPOLLOUT:
                    self._send(connection)
                if event & ~select.EPOLLOUT:
                    self._receive(connection)

    def _events(self, wait_s: float) -> list[tuple[int, int]]:
        """Return events of the connections; in an open loop the wait also ends when the next request is due."""
        if self._arrivals is None:
            return self._epoll.poll(wait_s)
        if self._idle:
            wait_s = min(wait_s, self._arrivals.due_s - time.perf_counter())
            # Unlike epoll's, select's time-out is not rounded to milliseconds.
            select.select([self._epoll.fileno()], (), (), max(0.0, wait_s))
            wait_s = 0
        events = self._epoll.poll(wait_s)
        self._begin_due()
        return events

    def _begin_due(self) -> None:
        """Begin the requests that are due, as long as connections are free."""
        arrivals = self._arrivals
        assert arrivals is not None
        while self._idle and arrivals.due_s <= time.perf_counter():
            request = next(self._left, None)
            if request is None:
                arrivals.due_s = math.inf
                return
            connection = self._idle.pop()
            connection.begun_s = arrivals.take()
            connection.request = request
            self._under_way += 1
            try:
                self._begin(connection, request)
            except ConnectionError:
                self._ended(connection)

    def _give_up(self) -> None:
        """Replace connections with incomplete answers; requests that were due and never begun are unfinished, too."""
        now = time.perf_counter()
        while self._arrivals is not None and self._arrivals.due_s <= now:
            self._outcome.unfinished_s.append(now - self._arrivals.take())
        for connection in [found for found in self._by_descriptor.values() if found.request is not None]:
            self._outcome.unfinished_s.append(now - connection.begun_s)
            if connection.request is not None and connection.body is not None:
                self._outcome.moved_bytes += len(connection.request.body) - len(connection.body)
            self._drop(connection)
            self._open()
        self._under_way = 0

    # --- one connection ------------------------------------------------------------------------------

    def _open(self) -> _Connection:
        sock = socket.create_connection(self._address, timeout=_WAIT_S)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._by_descriptor[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), _READ)
        return connection

    def _drop(self, connection: _Connection) -> None:
        del self._by_descriptor[connection.sock.fileno()]
        connection.sock.close()

    def _next(self, connection: _Connection) -> None:
        if self._arrivals is not None:
            connection.request = None
            self._idle.append(connection)
            return
        connection.begun_s = now = time.perf_counter()
        connection.request = request = next(self._left, None) if now < self._last_begin_s else None
        if request is not None:
            self._under_way += 1
            try:
                self._begin(connection, request)
            except ConnectionError:
                self._ended(connection)

    def _begin(self, connection: _Connection, request: Request) -> None:
        connection.left = -1
        connection.head = b""
        if len(request.body) > _SMALL_BYTES:
            connection.body = memoryview(request.body).cast("B")
            connection.sock.send(request.head, socket.MSG_MORE)
            self._send(connection)
            return
        whole = request.head + request.body
        sent = connection.sock.send(whole)
        self._outcome.moved_bytes += len(request.body)
        if sent < len(whole):
            connection.body = memoryview(whole)[sent:]
            self._mask(connection, _READ_WRITE)

    def _send(self, connection: _Connection) -> None:
        body = connection.body
        if body is None:
            return
        try:
            for _ in range(4):  # let other connections have their turn
                body = body[connection.sock.send(body[:_SEND_BYTES]) :]
                if not len(body):
                    break
        except BlockingIOError:
            pass
        except ConnectionError:
            body = body[:0]  # the server may have sent a reason
        connection.body = body if len(body) else None
        request = connection.request
        if connection.body is None and request is not None and len(request.body) > _SMALL_BYTES:
            self._outcome.moved_bytes += len(request.body)
        self._mask(connection, _READ if connection.body is None else _READ_WRITE)

    def _mask(self, connection: _Connection, wanted: int) -> None:
        if connection.masked != wanted:
            connection.masked = wanted
            self._epoll.modify(connection.sock.fileno(), wanted)

    def _receive(self, connection: _Connection) -> None:
        try:
            count = connection.sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except ConnectionError:
            count = 0
        if not count:
            self._ended(connection)
        elif connection.left < 0:
            self._receive_head(connection, bytes(self._buffer[:count]))
        elif connection.chunked:
            self._receive_chunked(connection, self._buffer[:count])
        else:
            connection.left -= count
            self._outcome.moved_bytes += count
            if connection.left <= 0:
                self._answered(connection)

    def _receive_head(self, connection: _Connection, received: bytes) -> None:
        received = connection.head + received
        end = received.find(b"\r\n\r\n")
        if end < 0:
            connection.head = received
            return
        request = connection.request
        if request is None:
            raise WrongAnswer(f"an answer without a request: {received[:200]!r}")
        found = _LENGTH.search(received, 0, end + 2)
        length = int(found[1]) if found else 0
        status = int(received[9:12])
        if status != request.status or (request.answer_bytes not in (None, length) and found):
            raise WrongAnswer(f"{_line(request)} was answered with {length} bytes: {received[:600]!r}")
        connection.left = length - (len(received) - end - 4)
        connection.chunked = found is None and _CHUNKED.search(received, 0, end + 2) is not None
        self._outcome.moved_bytes += len(received) - end - 4
        if connection.chunked:
            connection.left = 1
            connection.tail = b""
            self._outcome.moved_bytes -= len(received) - end - 4
            self._receive_chunked(connection, memoryview(received)[end + 4 :])
        elif connection.left <= 0:
            self._answered(connection)

    def _receive_chunked(self, connection: _Connection, received: memoryview) -> None:
        self._outcome.moved_bytes += len(received)
        connection.tail = (connection.tail + bytes(received[-len(_LAST_CHUNK) :]))[-len(_LAST_CHUNK) :]
        if connection.tail == _LAST_CHUNK:
            self._answered(connection)

    def _answered(self, connection: _Connection) -> None:
        self._outcome.latencies_s.append(time.perf_counter() - connection.begun_s)
        connection.fresh = False
        self._under_way -= 1
        self._next(connection)

    def _ended(self, connection: _Connection) -> None:
        """Replace a connection that the server closed between two requests, and send the affected request again."""
        request = connection.request
        self._drop(connection)
        if request is not None and (connection.fresh or connection.left >= 0 or connection.head):
            raise WrongAnswer(f"the connection ended before the answer to {_line(request)}")
        another = self._open()
        if connection in self._idle:
            self._idle.remove(connection)
            self._idle.append(another)
        if request is not None:
            another.request = request
            another.begun_s = connection.begun_s
            self._begin(another, request)


def _line(request: Request) -> str:
    return request.head.partition(b"\r\n")[0].decode()


def allow_descriptors(count: int) -> None:
    """Allow so many open files for this process, and for the servers that it starts from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def ask(endpoint: Endpoint, request: Request) -> tuple[int, bytes]:
    """Send one request on its own connection; return the answer's status and its whole body.  Compares nothing."""
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=_WAIT_S) as sock:
        sock.sendall(request.head)
        sock.sendall(request.body)
        response = http.client.HTTPResponse(sock)
        try:
            response.begin()
            return response.status, response.read()
        finally:
            response.close()
