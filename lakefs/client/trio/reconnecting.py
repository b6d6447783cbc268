"""An `EngineClient` that outlives its connection: it connects again when the engine was lost.

A decorator around `RemoteEngine`.  After a loss, requests that may be repeated (`lakefs.wire.repeat`) are sent again,
others raise.  A request that a draining engine refused was not done, and is always sent again.

Rules kept here:
- The first connect does not wait for an engine.  Later ones wait (default 5 s), once for all callers: a caller that
  waited while another caller tried in vain raises the same error and does not try again.
- An engine that sends nothing for some time (default 30 s) while requests wait, not even an answer to a Ping, is lost,
  too: its process may be stopped, or its machine off.
- Each connection increments `epoch`: leases, sources and descriptors of an earlier epoch are void.  Put sessions are
  joined again before anything else is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import trio

from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.client.trio.watch_events import WatchEvents
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import Buffer
from lakefs.limits import ENGINE_SILENCE_S, ENGINE_WAIT_S
from lakefs.ports import Network
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import HelloReply, Request
from lakefs.wire.offers import Offers
from lakefs.wire.repeat import ATTEMPTS_MAX, GREETINGS_MAX, REPEATABLE, SessionKeeper, loss_error

_RETRY_S: Final = 0.05


@asynccontextmanager
async def connect_reconnecting(
    address: str,
    *,
    token: str = "",
    network: Network | None = None,
    patience_s: float = ENGINE_WAIT_S,
    silence_s: float = ENGINE_SILENCE_S,
    offers: Offers | None = None,
) -> AsyncIterator[ReconnectingEngine]:
    """Connect to an engine, and again whenever it was lost; wait for it then, at most `patience_s`.

    An engine that has sent nothing for `silence_s` while requests wait is lost, too.  `offers`: kept up to date; by
    default an object of its own.

    Errors of the first connect are those of `connect_engine`.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        engine = ReconnectingEngine(address, token, network, nursery, patience_s, silence_s, offers or Offers())
        try:
            await engine.connect()
            yield engine
        except BaseException as error:  # noqa: BLE001 - raised below: not wrapped in the nursery's group
            failure = error
        engine.end()
        nursery.cancel_scope.cancel()
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # no cycle of frame and traceback


class ReconnectingEngine:
    """An `EngineClient`.  Made by `connect_reconnecting`."""

    def __init__(
        self,
        address: str,
        token: str,
        network: Network | None,
        nursery: trio.Nursery,
        patience_s: float,
        silence_s: float,
        offers: Offers,
    ) -> None:
        self.address = address
        self.offers = offers
        """See `EngineClient.offers`."""
        self.epoch = 0
        """Count of connections so far."""
        self._token = token
        self._network = network
        self._nursery = nursery
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._failures = 0
        self._failure: LakeError | None = None
        self._engine: RemoteEngine | None = None
        self._connecting = trio.Lock()
        self._is_over = False
        self._sessions = SessionKeeper()

    @property
    def hello(self) -> HelloReply:
        """The engine's answer to the last Hello: store id, boot id, limits."""
        assert self._engine is not None, "connect_reconnecting has connected"
        return self._engine.hello

    @property
    def carries_descriptors(self) -> bool:
        """See `EngineClient.carries_descriptors`."""
        return self._engine is not None and self._engine.carries_descriptors

    def is_connected(self) -> bool:
        """See `EngineClient.is_connected`; a system call."""
        return self._engine is not None and self._engine.is_connected()

    async def connect(self) -> None:
        """Connect, unless connected."""
        await self._usable()

    def end(self) -> None:
        """End with the block of this client: a task that outlives it gets EngineUnreachable, and no new connection."""
        self._is_over = True

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """See `EngineClient.call`.

        EngineUnreachable if the engine did not come back, or if the request may not be repeated; then it may or may not
        have been done.
        """
        attempts = 0
        while True:
            if self._engine is not None and type(request) not in REPEATABLE:
                self._engine.is_connected()  # notice a loss first: this request could not be sent again
            engine = await self._usable()
            epoch = self.epoch
            attempts += 1
            try:
                reply = await engine.call(request, body, descriptors, into=into)
            except EngineBusy:
                if not engine.draining or attempts >= ATTEMPTS_MAX:
                    raise
            except EngineUnreachable as error:
                if engine.lost is None:
                    raise
                if type(request) not in REPEATABLE or attempts >= ATTEMPTS_MAX:
                    raise loss_error(request, error) from error
            else:
                self._sessions.note(request, reply.message)
                reply.epoch = epoch
                return reply

    def tell(self, request: Request) -> bool:
        """See `EngineClient.tell`."""
        return self._engine is not None and self._engine.tell(request)

    @asynccontextmanager
    async def watch(self, bucket: str, *, others_only: bool = False) -> AsyncIterator[WatchEvents]:
        """See `RemoteEngine.watch`.  A watch ends with its connection; the caller then watches anew."""
        engine = await self._usable()
        async with engine.watch(bucket, others_only=others_only) as events:
            yield events

    async def _usable(self) -> RemoteEngine:
        engine = self._engine
        if engine is not None and engine.lost is None and not engine.draining:
            return engine
        failures = self._failures
        async with self._connecting:
            if self._engine is engine:
                if self._failures != failures and self._failure is not None:
                    raise type(self._failure)(self._failure.message, subject=self._failure.subject)
                try:
                    await self._connect(patience_s=0.0 if engine is None else self._patience_s)
                except LakeError as error:
                    self._failures += 1
                    self._failure = error
                    raise
            assert self._engine is not None, "connecting gives an engine or raises"
            return self._engine

    async def _connect(self, patience_s: float) -> None:
        give_up_at = trio.current_time() + patience_s
        refused = 0
        while True:
            if self._is_over:  # also while this waited for the engine
                raise EngineUnreachable("the connection was closed", subject=self.address)
            try:
                connection = connect_engine(self.address, token=self._token, network=self._network)
                engine: RemoteEngine = await self._nursery.start(_hold, connection, self._silence_s)
                break
            except EngineBusy:
                refused += 1
                if refused >= GREETINGS_MAX:
                    raise
            except EngineUnreachable:
                if trio.current_time() >= give_up_at:
                    raise
            await trio.sleep(_RETRY_S)
        for join in self._sessions.joins():
            try:
                await engine.call(join)
            except LakeError:
                self._sessions.forget(join.session)  # its next use raises SessionLost
        self.offers.take(engine.hello.features, by_memory=engine.carries_descriptors)
        self._engine = engine
        self.epoch += 1


async def _hold(
    connection: AbstractAsyncContextManager[RemoteEngine],
    silence_s: float,
    *,
    task_status: trio.TaskStatus[RemoteEngine] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Hold one connection until it is lost, or until the engine drains and the last request has ended."""
    async with connection as engine:
        task_status.started(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.end_when_silent, silence_s)
            await engine.wait_ended()
            await engine.wait_idle()
            nursery.cancel_scope.cancel()
