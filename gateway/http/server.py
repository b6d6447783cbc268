"""The HTTP server: admits connections, makes room, ends those past their deadline, drains.

Rules kept here:
- At most `connections_max`.  When all are taken the one that has been idle longest is ended, so idle clients keep no
  other out; when none is idle the new one is turned away (503).
- A connection begins at the door, dormant, and gets a task when the door hands it over.  It counts as any other.
- One sweep a second ends the connections that are past their deadline.
- A drain lets answers under way finish, and nothing else.
- A bug in a handler ends its connection, is logged, and ends no other.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from email.utils import formatdate
from typing import Final

import msgspec
import structlog
import trio

from gateway.http.connection import NOT_PARKED, Connection
from gateway.http.door import Door, HandedOver
from gateway.http.messages import Handler, Observer, Refused
from lakefs.errors import EngineUnreachable
from lakefs.limits import HTTP_IDLE_TIMEOUT_S, HTTP_STALL_TIMEOUT_S
from lakefs.ports import Listener, Stream
from lakefs.transport.streams import SocketStream, stream_of

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
        """Connections with a task."""
        self.turned_away = 0
        self.timed_out = 0
        self._observer = observer
        self._door = door
        if door is not None:
            door.attend = self._attend
        self._nursery: trio.Nursery | None = None  # of the connections
        self._is_draining = False
        self._handler = handler
        self._refused = refused
        self._connections_max = connections_max
        self._one_ended = trio.Event()
        self._accepting = trio.CancelScope()
        self._date = (0, b"")

    async def serve(self, listener: Listener, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled or drained; closes the listener.  Started with its address."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            sweeping = trio.CancelScope()
            nursery.start_soon(self._sweep, sweeping)
            task_status.started(listener.address)
            try:
                try:
                    with self._accepting:
                        while True:
                            await self._admit(await listener.accept(), nursery)
                finally:
                    with trio.CancelScope(shield=True):
                        await listener.aclose()
                await self._all_ended()
            finally:
                self._nursery = None
                self._end_dormant()
            sweeping.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Accept no more, let answers under way finish for at most `timeout_s`, and end the rest."""
        self._accepting.cancel()
        self._is_draining = True
        for connection in list(self.connections):
            connection.finish()
            if connection.is_idle:
                await connection.end()
        self._finish_dormant()
        with trio.move_on_after(timeout_s):
            await self._all_ended()
        for connection in list(self.connections):
            await connection.end()
        self._end_dormant()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of all connections, and of idle ones; looks at each one, so call it only now and then."""
        idle = sum(connection.is_idle for connection in self.connections)
        if self._door is not None:
            idle += sum(map(self._door.is_quiet, self._door.dormant()))
        return self._count, idle

    @property
    def _count(self) -> int:
        return len(self.connections) + (0 if self._door is None else self._door.dormant_count)

    async def _admit(self, stream: Stream, nursery: trio.Nursery) -> None:
        if self._count >= self._connections_max and not await self._make_room():
            self.turned_away += 1
            with suppress(EngineUnreachable):
                stream.send_nowait([_TURNED_AWAY])
            await stream.aclose()
            return
        if not self._adopted(stream):
            self._begin(stream, nursery)

    def _begin(self, stream: Stream, nursery: trio.Nursery, handed: HandedOver | None = None) -> None:
        connection = Connection(
            stream, self._handler, self._refused, self._fixed_lines, self._observer, self._door, self._discard
        )
        connection.is_last = self._is_draining
        self.connections.add(connection)
        nursery.start_soon(self._serve, connection, handed)

    async def _make_room(self) -> bool:
        quietest = NOT_PARKED if self._door is None else self._door.quietest()
        if self._door is not None and self._door.end(quietest):
            return True
        longest = self._idle_longest(quietest)
        if longest is None:
            return False
        self._discard(longest)
        await longest.end()
        return True

    def _idle_longest(self, quietest: int) -> Connection | None:
        """Return the connection that has been idle longest, the parked one if there is one; None if none is idle."""
        if quietest != NOT_PARKED:
            return next((found for found in self.connections if found.parked_as == quietest), None)
        idle = [found for found in self.connections if found.parked_as == NOT_PARKED and found.is_idle]
        return min(idle, key=lambda found: found.deadline) if idle else None

    async def _serve(self, connection: Connection, handed: HandedOver | None) -> None:
        try:
            await connection.serve(handed)
        except Exception:  # noqa: BLE001 - a bug, met by one connection
            _log.exception("a connection was ended by a bug in its handler")
        finally:
            self._discard(connection)

    def _discard(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._say_ended()

    def _say_ended(self) -> None:
        self._one_ended.set()
        self._one_ended = trio.Event()  # the set one wakes all waiters: a drain, and each listener

    async def _all_ended(self) -> None:
        while self._count:
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
        """Return the connections past their deadline; ends those that are dormant."""
        parked = set() if self._door is None else set(self._door.late(HTTP_IDLE_TIMEOUT_S, HTTP_STALL_TIMEOUT_S))
        if self._door is not None:
            self.timed_out += sum(map(self._door.end, parked))
            self._say_ended()
        return [
            found
            for found in self.connections
            if (found.deadline < now if found.parked_as == NOT_PARKED else found.parked_as in parked)
        ]

    # --- dormant connections ---------------------------------------------------------------------------

    def _adopted(self, stream: Stream) -> bool:
        """Leave a new connection to the door; False if it needs a task at once."""
        if self._door is None or not isinstance(stream, SocketStream) or stream.carries_descriptors:
            return False
        try:
            is_adopted = self._door.adopt(stream.descriptor, msgspec.json.encode(stream.peer))
        except OSError:  # the system watches no more descriptors
            return False
        if is_adopted:
            stream.detach()
        return is_adopted

    def _attend(self, descriptor: int, peer: str, handed: HandedOver) -> None:
        """Serve a dormant connection, with its descriptor, that the door has handed over."""
        has_work = handed.received or handed.unsent or handed.rest is not None
        if has_work and self._nursery is not None:
            self._begin(stream_of(descriptor, peer), self._nursery, handed)
            return
        os.close(descriptor)
        self._say_ended()

    def _finish_dormant(self) -> None:
        """End those with nothing under way; the others are handed over when that is over."""
        if self._door is None:
            return
        for descriptor in self._door.dormant():
            self._door.finish(descriptor)
            if self._door.is_quiet(descriptor):
                self._door.end(descriptor)
        self._say_ended()

    def _end_dormant(self) -> None:
        if self._door is None:
            return
        for descriptor in self._door.dormant():
            self._door.end(descriptor)
        self._say_ended()

    def _fixed_lines(self) -> bytes:
        second = int(time.time())
        if second != self._date[0]:
            date = formatdate(second, usegmt=True).encode()
            self._date = (second, b"Server: lake\r\nDate: " + date + b"\r\n")
        return self._date[1]
