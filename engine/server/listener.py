"""The server of the native protocol: accepts connections, bounds their number, and drains them.

`engine.server.connection` serves one connection.  The listener checks the user of a Unix socket's client; a TCP client
presents the token.

Rules kept here:
- At most `connections_max` clients are served, and users share that number (`engine.host.user_shares`); others get
  EngineBusy and are closed.  A Unix socket's client has its place at once, a TCP client once it has shown the token.
- Strangers (TCP clients that have not shown the token) have `STRANGERS_MAX` places beside those.  When all are taken
  the oldest is closed: a real client sends Hello as soon as it is connected, so the oldest is most likely not one.
- A failing connection, whatever the reason, never ends the server.
- `drain` closes listeners first, lets requests in flight end, then closes the connections that remain.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Final

import structlog
import trio

from engine.host.user_shares import Shares, user_of
from engine.server.connection import ServedConnection, ServerLimits
from lakefs.errors import EngineBusy, EngineUnreachable
from lakefs.limits import CONNECTIONS_MAX, STRANGERS_MAX
from lakefs.ports import Listener, Network, Stream
from lakefs.transport.address import UnixAddress, parse_address
from lakefs.wire.connection import farewell
from lakefs.wire.engine_port import EngineService

_log: Final = structlog.get_logger(__name__)


class Server:
    """Serves one service on any number of listeners.

    Untrusted clients must present `token`; with None they are never let in.  `of_the_lake`: who has the token is a
    process of the same lake, and counts as the engine's own user, not as one of many who share a quarter.
    """

    def __init__(
        self,
        service: EngineService,
        network: Network,
        *,
        token: str | None,
        connections_max: int = CONNECTIONS_MAX,
        limits: ServerLimits | None = None,
        of_the_lake: bool = False,
    ) -> None:
        self._service = service
        self._network = network
        self._token = token
        self._shares = Shares(connections_max, "connections", own_quarters=3)
        self._limits = limits or ServerLimits()
        self._uid_over_tcp = os.geteuid() if of_the_lake else None
        self._connections: dict[ServedConnection, str | None] = {}
        """Each connection with the user whose place it has; None: a stranger."""
        self._strangers: dict[ServedConnection, None] = {}
        """Connections of strangers, oldest first."""
        self._accepting: set[trio.CancelScope] = set()
        self._draining = False
        self._emptied = trio.Event()

    @property
    def connection_count(self) -> int:
        """Number of connections being served."""
        return len(self._connections)

    async def listen_and_serve(
        self, address: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Bind `unix:PATH` (trusted) or `tcp://HOST:PORT` and serve it; `started` gets the real address.

        AddressInUse, PermissionDenied, InvalidArgument.
        """
        trusted = isinstance(parse_address(address), UnixAddress)
        listener = await self._network.listen(address)
        await self.serve(listener, trusted=trusted, task_status=task_status)

    async def serve(
        self, listener: Listener, *, trusted: bool, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve a bound listener until drained or cancelled; closes it.  `trusted`: it checks its clients."""
        async with trio.open_nursery() as nursery:
            accepting = trio.CancelScope()
            self._accepting.add(accepting)
            try:
                with accepting:
                    task_status.started(listener.address)
                    if self._draining:
                        accepting.cancel()
                    await self._accept(listener, trusted, nursery)
            finally:
                self._accepting.discard(accepting)
                with trio.CancelScope(shield=True):
                    await listener.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, wait at most `timeout_s` for requests in flight, close all.  Then `serve` returns."""
        self._draining = True
        for scope in list(self._accepting):
            scope.cancel()
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for connection in list(self._connections):
                    nursery.start_soon(connection.drain)
        for connection in list(self._connections):
            connection.close()
        while self._connections:
            self._emptied = trio.Event()
            await self._emptied.wait()

    async def _accept(self, listener: Listener, trusted: bool, nursery: trio.Nursery) -> None:
        while True:
            try:
                stream = await listener.accept()
            except EngineUnreachable:  # the listener was closed
                return
            uid = self._uid_over_tcp if stream.uid is None else stream.uid
            user = user_of(uid) if trusted else None
            try:
                if user is not None:
                    self._shares.take(user)
            except EngineBusy as error:
                await _refuse(stream, error)
                continue
            connection = ServedConnection(
                self._service,
                stream,
                token=self._token,
                trusted=trusted,
                limits=self._limits,
                uid=uid,
                let_in=partial(self._let_in, user_of(uid)),
            )
            self._connections[connection] = user
            if user is None:
                self._let_wait(connection)
            nursery.start_soon(self._run, connection)

    def _let_in(self, user: str, connection: ServedConnection) -> None:
        """Give a stranger that has shown the token a place of its user's.  EngineBusy when none is free."""
        assert self._connections[connection] is None, "a stranger has no user's place"
        self._shares.take(user)
        self._connections[connection] = user
        self._strangers.pop(connection, None)

    def _let_wait(self, connection: ServedConnection) -> None:
        """Give a stranger a place, the oldest stranger's if all are taken."""
        if len(self._strangers) >= STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.turn_out(
                EngineBusy(
                    f"{STRANGERS_MAX} connections over TCP have not shown the token, the most that may wait, and "
                    "this one was the oldest; connect again"
                )
            )
        self._strangers[connection] = None
        assert len(self._strangers) <= STRANGERS_MAX

    async def _run(self, connection: ServedConnection) -> None:
        try:
            await connection.run()
        except Exception as error:  # noqa: BLE001 - a bug on one connection must not end the others
            _log.error("connection_failed", exc_info=error)
        finally:
            self._strangers.pop(connection, None)
            user = self._connections.pop(connection)
            if user is not None:
                self._shares.give_back(user)
            if not self._connections:
                self._emptied.set()


async def _refuse(stream: Stream, error: EngineBusy) -> None:
    """Send the reason if that needs no wait, and close."""
    try:
        stream.send_nowait([farewell(error)])
    except EngineUnreachable:
        _log.debug("refused_client_gone", peer=stream.peer)
    await stream.aclose()
