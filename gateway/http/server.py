"""The HTTP server: admits connections, makes room, ends those past their deadline, drains.

Rules kept here:
- At most `connections_max`.  When all are taken the one that has been idle longest is ended, so idle clients keep no
  other out; when none is idle the new one is turned away (503).
- One sweep a second ends the connections that are past their deadline.
- A drain lets answers under way finish, and nothing else.
- A bug in a handler ends its connection, is logged, and ends no other.
"""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import formatdate
from typing import Final

import structlog
import trio

from gateway.http.connection import NOT_PARKED, Connection
from gateway.http.door import Door
from gateway.http.messages import Handler, Observer, Refused
from lakefs.errors import EngineUnreachable
from lakefs.limits import HTTP_IDLE_TIMEOUT_S, HTTP_STALL_TIMEOUT_S
from lakefs.ports import Listener, Stream

_log: Final = structlog.get_logger(__name__)
_SWEEP_S: Final = 1.0
_TURNED_AWAY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class HttpServer:
    """Serves any number of listeners with one handler."""

    def __init__(
        self,
        handler: Handler,
        refused: Refused,
        *,
        connections_max: int,
        observer: Observer | None = None,
        door: Door | None = None,
    ) -> None:
        self.connections: set[Connection] = set()
        self.turned_away = 0
        self.timed_out = 0
        self._observer = observer
        self._door = door
        self._handler = handler
        self._refused = refused
        self._connections_max = connections_max
        self._one_ended = trio.Event()
        self._accepting = trio.CancelScope()
        self._date = (0, b"")

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or drained; closes the listener.  Started with its address."""
        async with trio.open_nursery() as nursery:
            sweeping = trio.CancelScope()
            nursery.start_soon(self._sweep, sweeping)
            task_status.started(listener.address)
            try:
                with self._accepting:
                    while True:
                        await self._admit(await listener.accept(), nursery)
            finally:
                with trio.CancelScope(shield=True):
                    await listener.aclose()
            await self._all_ended()
            sweeping.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Accept no more, let answers under way finish for at most `timeout_s`, and end the rest."""
        self._accepting.cancel()
        for connection in list(self.connections):
            connection.finish()
            if connection.is_idle:
                await connection.end()
        with trio.move_on_after(timeout_s):
            await self._all_ended()
        for connection in list(self.connections):
            await connection.end()

    async def _admit(self, stream: Stream, nursery: trio.Nursery) -> None:
        if len(self.connections) >= self._connections_max and not await self._make_room():
            self.turned_away += 1
            with suppress(EngineUnreachable):
                stream.send_nowait([_TURNED_AWAY])
            await stream.aclose()
            return
        connection = Connection(stream, self._handler, self._refused, self._fixed_lines, self._observer, self._door)
        self.connections.add(connection)
        nursery.start_soon(self._serve, connection)

    async def _make_room(self) -> bool:
        longest = self._idle_longest()
        if longest is None:
            return False
        self._discard(longest)
        await longest.end()
        return True

    def _idle_longest(self) -> Connection | None:
        """Return the connection that has been idle longest, a parked one if there is any; None if none is idle."""
        quietest = NOT_PARKED if self._door is None else self._door.quietest()
        if quietest != NOT_PARKED:
            return next((found for found in self.connections if found.parked_as == quietest), None)
        idle = [found for found in self.connections if found.parked_as == NOT_PARKED and found.is_idle]
        return min(idle, key=lambda found: found.deadline) if idle else None

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.serve()
        except Exception:  # noqa: BLE001 - a bug, met by one connection
            _log.exception("a connection was ended by a bug in its handler")
        finally:
            self._discard(connection)

    def _discard(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._one_ended.set()
        self._one_ended = trio.Event()  # the set one wakes all waiters: a drain, and each listener

    async def _all_ended(self) -> None:
        while self.connections:
            await self._one_ended.wait()

    async def _sweep(self, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                await trio.sleep(_SWEEP_S)
                now = trio.current_time()
                for connection in self._late(now):
                    self.timed_out += 1
                    await connection.end()

    def _late(self, now: float) -> list[Connection]:
        parked = set() if self._door is None else set(self._door.late(HTTP_IDLE_TIMEOUT_S, HTTP_STALL_TIMEOUT_S))
        return [
            found
            for found in self.connections
            if (found.deadline < now if found.parked_as == NOT_PARKED else found.parked_as in parked)
        ]

    def _fixed_lines(self) -> bytes:
        second = int(time.time())
        if second != self._date[0]:
            date = formatdate(second, usegmt=True).encode()
            self._date = (second, b"Server: lake\r\nDate: " + date + b"\r\n")
        return self._date[1]
