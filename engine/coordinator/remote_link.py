"""`RemoteLink`: this process's one connection to the names of its lake, made when first used, and again after a loss.

    unused --used--> connecting --greeted--> connected --lost, draining--> connecting
                         |                                                     |
                         +--------------------- failed --> away --after a pause+

Rules kept here:
- Callers wait while a connect is under way, at most NAMES_CONNECT_S.  While the names are known to be away they are
  refused at once, and the names are tried in the background, after pauses that grow to NAMES_PAUSE_S_MAX.
- After a loss the names are tried at once: when they have only restarted, or the network lost one connection, callers
  wait for that instead of getting an error.
- Names that shut down finish the requests in flight.  Those that only wait for a change are cancelled, so that nothing
  holds the names back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import structlog
import trio

from lakefs.errors import EngineUnreachable, LakeError
from lakefs.limits import AWAY_PAUSE_S_MIN, MEMBER_ANSWER_S, NAMES_CONNECT_S, NAMES_PAUSE_S_MAX
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import CoordinatorWatch, Request

_log: Final = structlog.get_logger(__name__)


class NamesClient(Protocol):
    """A connection to the names; `RemoteEngine` is one."""

    @property
    def draining(self) -> bool:
        """True if the names refuse further requests on this connection."""
        ...

    @property
    def lost(self) -> LakeError | None:
        """The error that ended the connection; None while it is open."""
        ...

    def is_connected(self) -> bool:
        """Return True if the connection is open; sees an end that was not read yet."""
        ...

    async def call(self, request: Request) -> Reply:
        """Send a request; see `EngineClient.call`."""
        ...

    async def wait_ended(self) -> None:
        """Wait until the connection is lost, or the names shut down."""
        ...

    async def wait_idle(self) -> None:
        """Wait until no request is in flight, or the connection is lost."""
        ...


Connect = Callable[[], AbstractAsyncContextManager[NamesClient]]
"""Connects to the names, and makes sure of them; the connection ends with the block.  Raises LakeErrors."""


class RemoteLink:
    """The link to the names.  Used on the loop; its task runs in the nursery of its owner."""

    def __init__(self, address: str, connect: Connect, nursery: trio.Nursery) -> None:
        self.address: Final = address
        self._connect = connect
        self._nursery = nursery
        self._client: NamesClient | None = None
        self._away: LakeError | None = None
        """The reason why the names are away; None while they are not known to be."""
        self._settled = trio.Event()
        """Set when the connect under way has ended."""
        self._is_kept = False
        self._is_closed = False
        self._waiting: dict[trio.CancelScope, None] = {}
        """Scopes of requests that only wait."""

    def close(self) -> None:
        """Refuse further calls with EngineUnreachable."""
        self._is_closed = True
        self._settled.set()

    async def usable(self) -> NamesClient:
        """Return the connection; connects if there is none.

        EngineUnreachable; while the names refuse this process, the error with which they do: PermissionDenied,
        UnsupportedVersion, PreconditionFailed, EngineBusy.
        """
        while not self._is_closed:
            client = self._client
            if client is not None and client.is_connected() and not client.draining:
                return client
            self._forget(client)
            if self._away is not None:
                raise type(self._away)(self._away.message, subject=self._away.subject)
            if not self._is_kept:
                self._is_kept = True
                self._nursery.start_soon(self._keep)
            await self._settled.wait()
        raise EngineUnreachable("the coordinator was closed", subject=self.address)

    async def send(self, client: NamesClient, request: Request) -> Reply | None:
        """Send a request.  None for one that only waits for a change, if the names shut down in the meantime."""
        if not isinstance(request, CoordinatorWatch):
            return await client.call(request)
        with trio.CancelScope() as scope:
            self._waiting[scope] = None
            try:
                return await client.call(request)
            finally:
                del self._waiting[scope]
        return None

    def _forget(self, client: NamesClient | None) -> None:
        """Note that a connection is of no use any more; does nothing if that is known."""
        if client is not None and client is self._client:
            self._client = None
            self._settled = trio.Event()

    async def _keep(self) -> None:
        """Connect, and hold the connection until it is lost, again and again until cancelled."""
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            began = trio.current_time()
            error = await self._hold_one()
            if error is None:  # it was connected
                pause_s = AWAY_PAUSE_S_MIN
                if trio.current_time() > began + pause_s:
                    continue  # else the names end each connection
            else:
                if self._away is None:
                    _log.warning("names_away", address=self.address, reason=error.message)
                self._away = error
                self._settled.set()
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, NAMES_PAUSE_S_MAX)

    async def _hold_one(self) -> LakeError | None:
        """Connect, and hold the connection until it is lost; returns the reason if there was none."""
        client: NamesClient | None = None
        with trio.CancelScope(deadline=trio.current_time() + NAMES_CONNECT_S) as connecting:
            try:
                async with self._connect() as client:
                    connecting.deadline = math.inf
                    await self._serve(client)
                return None
            except LakeError as error:
                return error
            finally:
                self._forget(client)
        assert connecting.cancelled_caught, "the block returns, or was cancelled"
        return EngineUnreachable(f"nothing answers at {self.address}", subject=self.address)

    async def _serve(self, client: NamesClient) -> None:
        """Offer the connection to callers until it is lost, or the names shut down and have answered."""
        if self._away is not None:
            _log.info("names_reached", address=self.address)
        self._client, self._away = client, None
        self._settled.set()
        await client.wait_ended()
        self._forget(client)
        for scope in self._waiting:
            scope.cancel()
        with trio.move_on_after(MEMBER_ANSWER_S):
            await client.wait_idle()
