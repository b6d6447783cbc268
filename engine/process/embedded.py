"""Runs an engine in the process of its client, for `--data DIR`, tests and tools.

`EmbeddedEngine` is the `EngineClient` of a service in the same process: requests reach the service as they are, without
frames, under the same rules.

`open_lake` gives blocking callers the methods of `lakefs.client.blocking.lake.Lake` on a store opened with its
exclusive lock.  The engine runs in a trio loop in its own thread, and is stopped cleanly at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from pathlib import Path

import trio

from engine.requests.answers import PackedLocated
from engine.requests.table import Service
from engine.server.later import given
from engine.server.watches import close_events
from engine.store.local_store import open_local_store
from lakefs.client.blocking.lake import Lake
from lakefs.errors import EngineUnreachable, InvalidArgument
from lakefs.host.buffers import PooledPayload
from lakefs.host.descriptors import duplicates
from lakefs.ids import Buffer
from lakefs.limits import ENGINE_SILENCE_S
from lakefs.wire.connection import reply_memory
from lakefs.wire.engine_port import BeginsLater, Body, EngineService, Reply, ServedClient
from lakefs.wire.messages import PutObjects, Request, StoreChunks, Watch, WatchEvent
from lakefs.wire.offers import EVERYTHING, Offers

_ENDED = "the engine in this process has ended; open the store again"


class _Connection:
    """A connection to a service in this process."""

    def __init__(self, service: EngineService, *, descriptors: bool) -> None:
        self.is_ended = False
        """The service has ended it, as a head does when it has lost the names."""
        self.calls = 0
        """Requests under way."""
        self.client = service.connected(
            "embedded", descriptors=descriptors, trusted=True, uid=os.geteuid(), end=self.end
        )

    def end(self) -> None:
        """Note that the service has ended it."""
        self.is_ended = True


class EmbeddedEngine:
    """One client of a service in this process.

    A connection that the service ends is followed by another one, with the next request, as over a socket; it is
    disconnected when its last request has been answered.
    """

    def __init__(self, service: EngineService, *, descriptors: bool = True, features: int = EVERYTHING) -> None:
        """`features`: bits of what the service shares by memory, as its reply to Hello names them."""
        self.carries_descriptors = descriptors
        self.offers = Offers(features, by_memory=descriptors)
        self.epoch = 0
        """See `EngineClient.epoch`."""
        self._service = service
        self._connection = _Connection(service, descriptors=descriptors)
        self._left: list[_Connection] = []
        """Connections that were ended, with requests under way."""

    def is_connected(self) -> bool:
        """See `EngineClient.is_connected`: always True, as the engine is in this process."""
        return True

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """Return the engine's reply; see `EngineClient`.  Descriptors are duplicated both ways, as by a socket."""
        if descriptors and not self.carries_descriptors:
            raise InvalidArgument("descriptors cannot be sent to this engine")
        if self._connection.is_ended:
            await self._connect_anew()
        connection = self._connection
        connection.calls += 1
        try:
            return await self._call(connection.client, request, body, descriptors, into)
        except EngineUnreachable:  # a head that cannot reach the names, which keeps the connection's state there
            connection.end()
            raise
        finally:
            connection.calls -= 1

    async def _call(
        self,
        client: ServedClient,
        request: Request,
        body: Sequence[Buffer],
        descriptors: Sequence[int],
        into: Sequence[memoryview],
    ) -> Reply:
        if body or isinstance(request, (StoreChunks, PutObjects)):
            pooled = body if isinstance(body, PooledPayload) else None
            memory = await self._service.receive(client, request, sum(len(part) for part in body), pooled)
        else:
            memory = Body()
        try:
            if memory.parts is not body:
                _copy(body, memory.parts)
            sent = duplicates(descriptors) if descriptors else ()
        except BaseException:
            memory.release()
            raise
        reply = await self._service.serve(client, request, memory, sent)
        if reply.later is not None:
            reply = await given(reply.later)
        if isinstance(reply.message, PackedLocated):
            reply.message = reply.message.unpacked()
        if reply.then is not None:
            reply.then()
        if reply.descriptors:
            reply.descriptors = duplicates(reply.descriptors)
        if into and reply.body.nbytes <= sum(len(target) for target in into):
            _, parts = reply_memory(into, reply.body.nbytes)
            _copy(reply.body.parts, parts)
            reply.body.release()
            reply.body = Body(parts)
        return reply

    @asynccontextmanager
    async def watch(self, bucket: str, *, others_only: bool = False) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Yield the events of a bucket from now on; see `EngineClient`."""
        await trio.lowlevel.checkpoint()
        if self._connection.is_ended:
            await self._connect_anew()
        events = self._service.watch(self._connection.client, Watch(bucket, others_only))
        try:
            if isinstance(events, BeginsLater):
                await events.begin()
            yield events
        finally:
            await close_events(events)

    def tell(self, request: Request) -> bool:
        """Return False: nothing is sent; a client in the engine's process uses requests only."""
        return False

    async def aclose(self) -> None:
        """Disconnect the client: its leases end; its sessions end or linger."""
        for connection in [*self._left, self._connection]:
            await self._service.disconnected(connection.client)
        self._left.clear()

    async def _connect_anew(self) -> None:
        """Follow a connection that was ended by another one; disconnect those that have no requests any more."""
        self._left.append(self._connection)
        self._connection = _Connection(self._service, descriptors=self.carries_descriptors)
        self.epoch += 1
        done = [connection for connection in self._left if not connection.calls]
        self._left = [connection for connection in self._left if connection.calls]
        with trio.CancelScope(shield=True):
            for connection in done:
                await self._service.disconnected(connection.client)


class EmbeddedBlockingEngine:
    """The client that `Lake` drives, with an engine in a thread of this process."""

    carries_descriptors = True
    epoch = 0
    timeout_s = ENGINE_SILENCE_S

    def __init__(self, data: Path) -> None:
        self.offers = Offers(EVERYTHING, by_memory=True)
        self.address = f"data:{data}"
        self._data = data
        self._started: Future[None] = Future()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="lake-engine", daemon=True)
        self._thread.start()
        self._closed_because = ""
        """The reason why requests fail; empty while the store is open."""
        self._started.result()

    def is_connected(self) -> bool:
        """See `BlockingEngineClient.is_connected`."""
        return not self._closed_because and self._thread.is_alive()

    def start(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Future[Reply]:
        """Begin a request; returns its ticket."""
        ticket: Future[Reply] = Future()
        if self._closed_because:
            ticket.set_exception(EngineUnreachable(self._closed_because))
            return ticket
        try:
            call = partial(self._engine.call, request, body, descriptors, into=into)
            self._token.run_sync_soon(self._spawn, ticket, call)
        except trio.RunFinishedError:
            ticket.set_exception(EngineUnreachable(_ENDED))
        return ticket

    def finish(self, ticket: object) -> Reply:
        """Wait for a request's reply."""
        assert isinstance(ticket, Future)
        reply = ticket.result()
        assert isinstance(reply, Reply)
        return reply

    def cancel(self, ticket: object) -> None:
        """Cancel a request that was not begun yet; else wait for its end, after which its memory is not used."""
        assert isinstance(ticket, Future)
        ticket.cancel() or ticket.exception()

    def forget(self, ticket: object) -> None:
        """Do nothing: a request that no caller finishes runs to its end."""

    def tell(self, request: Request) -> bool:
        """Return False: nothing is sent; a client in the engine's process uses requests only."""
        return False

    def close(self) -> None:
        """Stop the engine cleanly; idempotent."""
        if self._closed_because:
            return
        self._closed_because = "the store was closed"
        with suppress(trio.RunFinishedError):  # the loop has ended already; its error is raised below
            self._token.run_sync_soon(self._stop)
        self._thread.join()
        self._ended.result()

    def job(self, limit_s: float) -> AbstractContextManager[None]:
        """Give the block all the time that it takes: this process is the engine."""
        return nullcontext()

    def forked(self) -> EmbeddedBlockingEngine:
        """Mark the client closed: a forked child has no engine."""
        self._closed_because = f"{self.address} is open in the process that this one was forked from; serve it"
        return copy(self)

    # --- in the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        self._ended: Future[None] = Future()
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - raised by close, or by the constructor
            self._ended.set_exception(error)
            if not self._started.done():
                self._started.set_exception(error)
            return
        self._ended.set_result(None)

    async def _main(self) -> None:
        async with open_local_store(self._data, grace_s=0.0) as store:  # it has no other client
            self._engine = EmbeddedEngine(Service(store))
            self._token = trio.lowlevel.current_trio_token()
            stop = trio.Event()
            self._stop = stop.set
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._started.set_result(None)
                await stop.wait()
            await self._engine.aclose()

    def _spawn(self, ticket: Future[Reply], call: Callable[[], Awaitable[Reply]]) -> None:
        try:
            self._nursery.start_soon(self._call, ticket, call)
        except RuntimeError:  # closed to new tasks: the engine is ending
            ticket.set_exception(EngineUnreachable(_ENDED))

    async def _call(self, ticket: Future[Reply], call: Callable[[], Awaitable[Reply]]) -> None:
        if not ticket.set_running_or_notify_cancel():
            return
        try:
            reply = await call()
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread, whatever it is
            ticket.set_exception(error)
        except BaseException:
            ticket.set_exception(EngineUnreachable(_ENDED))
            raise
        else:
            ticket.set_result(reply)


def open_lake(data: Path) -> Lake:
    """Open the store in a folder in this process; it is open until the lake is closed.

    StoreLocked when an engine has it open, StoreUnusable, StoreDamaged.
    """
    return Lake(EmbeddedBlockingEngine(data))


def _copy(parts: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """Copy parts into targets that hold at least as many bytes; part and target borders may differ."""
    remaining = [memoryview(target).cast("B") for target in targets]
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            target = remaining[0]
            count = min(len(view), len(target))
            target[:count] = view[:count]
            view = view[count:]
            remaining[0] = target[count:]
            if not len(remaining[0]):
                remaining.pop(0)
