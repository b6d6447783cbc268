"""The admin port: `/health`, `/ready` and `/metrics` over HTTP/1.1, for monitors and service managers.

- `/health` answers 200 while the process can answer at all.
- `/ready` answers 200 when the engine serves, else 503 with the reason.
- `/metrics` is the registry in Prometheus' text format, version 0.0.4.

Rules kept here:
- A client can only hurt itself: heads, time and the number of connections are bounded (`lakefs.limits`).  When all
  connections are taken, the one that has waited longest for a request is ended, so idle or trickling clients never
  keep a monitor out.
- Cancelling `serve_admin` closes the listeners and all waiting connections at once; an answer under way is finished
  first, for at most ADMIN_RESPONSE_TIMEOUT_S.
- No request changes anything, so there is no login; that is also why the port listens on loopback by default.

It knows nothing of the engine: readiness is a callable and the metrics are a registry.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import h11
import structlog
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.http.head import HttpRefusal, check_beginning
from lakefs.config.settings import Address
from lakefs.errors import AddressInUse, ConfigError, PermissionDenied
from lakefs.limits import (
    ADMIN_CONNECTIONS_MAX,
    ADMIN_HEAD_BYTES_MAX,
    ADMIN_LINGER_S,
    ADMIN_REQUEST_TIMEOUT_S,
    ADMIN_RESPONSE_TIMEOUT_S,
)

_log: Final = structlog.get_logger(__name__)
_METHODS: Final = (b"GET", b"HEAD")
_TEXT: Final = "text/plain; charset=utf-8"
_METRICS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_PATHS: Final = ("/health", "/ready", "/metrics")


@dataclass(frozen=True)
class Answer:
    """Status, body and content type of one response."""

    status: int
    body: bytes
    content_type: str = _TEXT


async def bind_admin(address: Address) -> list[trio.SocketListener]:
    """Listen on every address of the host name.  AddressInUse, PermissionDenied, ConfigError."""
    try:
        return await trio.open_tcp_listeners(address.port, host=address.host)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"admin port {address}: no such host: {error}", subject=str(address)) from error
    except OSError as error:
        raise _bind_error(address, error) from error


async def serve_admin_at(
    address: Address,
    *,
    ready: Callable[[], str | None],
    registry: CollectorRegistry,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `bind_admin` and `serve_admin`; started with the URL, which has the real port."""
    listeners = await bind_admin(address)
    port = listeners[0].socket.getsockname()[1]
    task_status.started(f"http://{Address(address.host, port)}")
    await serve_admin(listeners, ready=ready, registry=registry)


async def serve_admin(
    listeners: Sequence[trio.SocketListener],
    *,
    ready: Callable[[], str | None],
    registry: CollectorRegistry,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; owns and closes the listeners.  Started with them once it accepts.

    `ready` is called for each `/ready`, must not block, and returns None if the engine serves, else the reason.
    """
    port = _AdminPort(ready, registry)
    async with trio.open_nursery() as connections:
        await trio.serve_listeners(port.serve, list(listeners), handler_nursery=connections, task_status=task_status)


def answer_request(path: str, ready: Callable[[], str | None], registry: CollectorRegistry) -> Answer:
    """Return the answer to a GET of `path`."""
    if path == "/health":
        return Answer(200, b"ok\n")
    if path == "/ready":
        reason = ready()
        return Answer(200, b"ready\n") if reason is None else Answer(503, f"{reason}\n".encode())
    if path == "/metrics":
        return Answer(200, generate_latest(registry), _METRICS_TEXT)
    return Answer(404, f"not found; this port answers {', '.join(_PATHS)}\n".encode())


def _bind_error(address: Address, error: OSError) -> AddressInUse | PermissionDenied | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"admin port {address} is taken; choose another with --admin HOST:PORT, or --admin off",
            subject=str(address),
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            f"admin port {address} may not be used by this user; ports under 1024 need root", subject=str(address)
        )
    return ConfigError(f"admin port {address} cannot be used: {error.strerror or error}", subject=str(address))


class _AdminPort:
    """All connections of the port.

    `_open` holds every connection that was not ended to make room; `_waiting` the open ones that wait for a request,
    longest wait first.
    """

    def __init__(self, ready: Callable[[], str | None], registry: CollectorRegistry) -> None:
        self._ready = ready
        self._registry = registry
        self._waiting: dict[trio.SocketStream, trio.CancelScope] = {}
        self._open: set[trio.SocketStream] = set()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serve one connection, from accept to close."""
        async with stream:
            if not self._has_room():
                return
            self._open.add(stream)
            try:
                await self._converse(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client has gone
            finally:
                self._open.discard(stream)

    def _has_room(self) -> bool:
        """Return True if one more may be served, ending the longest wait if needed.  False: all are being answered."""
        if len(self._open) < ADMIN_CONNECTIONS_MAX:
            return True
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self._waiting.pop(longest).cancel()
        self._open.discard(longest)
        return True

    async def _converse(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=ADMIN_HEAD_BYTES_MAX)
        while True:
            try:
                request = await self._next_request(stream, connection)
            except h11.RemoteProtocolError as error:
                await self._refuse(stream, connection, error.error_status_hint, str(error))
                return
            except HttpRefusal as refusal:
                await self._refuse(stream, connection, refusal.status, refusal.message)
                return
            if request is None:
                return
            await self._respond(stream, connection, request)
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                await _linger(stream)
                return
            connection.start_next_cycle()

    async def _next_request(self, stream: trio.SocketStream, connection: h11.Connection) -> h11.Request | None:
        """Return the next head; None if the client has finished, is too slow, or was ended to make room.

        h11 rejects a bad head only when its first line has ended; bytes that begin no request are refused on arrival.
        """
        with trio.move_on_after(ADMIN_REQUEST_TIMEOUT_S) as scope:
            self._waiting[stream] = scope
            try:
                while True:
                    event = connection.next_event()
                    if isinstance(event, h11.Request):
                        return event
                    if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                        return None
                    if event is h11.NEED_DATA:
                        received = await stream.receive_some(ADMIN_HEAD_BYTES_MAX)
                        if not connection.trailing_data[0]:
                            check_beginning(received)
                        connection.receive_data(received)
            finally:
                self._waiting.pop(stream, None)
        return None

    async def _respond(self, stream: trio.SocketStream, connection: h11.Connection, request: h11.Request) -> None:
        if request.method in _METHODS:
            answer = self._answer(request)
            headers = [("Content-Type", answer.content_type)]
        else:
            answer = Answer(405, b"only GET and HEAD\n")
            headers = [("Content-Type", answer.content_type), ("Allow", "GET, HEAD")]
        if not _ends_here(connection):
            headers.append(("Connection", "close"))  # an unexpected body is not waited for
        await _send(stream, connection, answer, headers, with_body=request.method != b"HEAD")

    def _answer(self, request: h11.Request) -> Answer:
        try:
            path = urlsplit(request.target.decode("ascii")).path
        except ValueError:
            return Answer(400, b"the request's target is not a URL\n")
        try:
            return answer_request(path, self._ready, self._registry)
        except Exception:  # noqa: BLE001 - logged; the comment says why
            # A broken collector is a bug, but a scrape must not end the engine that serves clients.
            _log.exception("admin request failed", path=path)
            return Answer(500, b"internal error; see the log\n")

    async def _refuse(self, stream: trio.SocketStream, connection: h11.Connection, status: int, reason: str) -> None:
        if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        answer = Answer(status, f"not a request that this port takes: {reason}\n".encode())
        headers = [("Content-Type", answer.content_type), ("Connection", "close")]
        await _send(stream, connection, answer, headers, with_body=True)
        await _linger(stream)


def _ends_here(connection: h11.Connection) -> bool:
    """Return True if the request has no body; h11 then reports its end without more data."""
    try:
        return isinstance(connection.next_event(), h11.EndOfMessage)
    except h11.RemoteProtocolError:
        return False


async def _send(
    stream: trio.SocketStream,
    connection: h11.Connection,
    answer: Answer,
    headers: list[tuple[str, str]],
    *,
    with_body: bool,
) -> None:
    """Send one whole response; cancellation waits for it; a client that does not read is cut off."""
    fixed = [("Content-Length", str(len(answer.body))), ("Cache-Control", "no-store")]
    parts = [connection.send(h11.Response(status_code=answer.status, headers=[*headers, *fixed]))]
    if with_body:
        parts.append(connection.send(h11.Data(data=answer.body)))
    parts.append(connection.send(h11.EndOfMessage()))
    with trio.move_on_after(ADMIN_RESPONSE_TIMEOUT_S, shield=True) as scope:
        await stream.send_all(b"".join(part for part in parts if part))
    if scope.cancelled_caught:
        raise trio.BrokenResourceError("the client does not read its answer")


async def _linger(stream: trio.SocketStream) -> None:
    """Read unread bytes before closing: closing with unread bytes resets the socket, and may lose the answer."""
    with trio.move_on_after(ADMIN_LINGER_S):
        await stream.send_eof()
        for _ in range(16):
            if not await stream.receive_some(ADMIN_HEAD_BYTES_MAX):
                return
