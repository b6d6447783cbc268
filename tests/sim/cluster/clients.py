"""Clients of a service over a simulated connection: of members, of names, of heads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import trio

from engine.process.embedded import EmbeddedEngine
from lakefs.errors import EngineUnreachable
from lakefs.ids import Buffer
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, EngineService, Reply, ServedClient
from lakefs.wire.offers import Offers
from tests.sim.cluster.network import Connection, Network
from tests.sim.cluster.process import SimProcess


class _Ending:
    """A service whose connections can be ended by it, as a server's."""

    def __init__(self, service: EngineService, end: Callable[[], None]) -> None:
        self._service = service
        self._end = end

    def connected(self, peer: str, **arguments: Any) -> ServedClient:
        """See `EngineService.connected`."""
        return self._service.connected(peer, **arguments | {"end": self._end})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


class SimClient:
    """`EngineClient` over a connection; a `MemberClient`, too."""

    epoch = 0
    carries_descriptors = False
    draining = False

    def __init__(self, connection: Connection, engine: EmbeddedEngine) -> None:
        self.connection = connection
        self.offers = Offers(0, by_memory=False)
        self._engine = engine

    @property
    def lost(self) -> EngineUnreachable | None:
        """See `NamesClient`."""
        return self.connection.lost_for()

    def is_connected(self) -> bool:
        """See `ConnectedClient`."""
        return not self.connection.lost.is_set()

    def tell(self, request: m.Request) -> bool:
        """Send nothing."""
        return False

    async def wait_ended(self) -> None:
        """Wait until the connection is lost."""
        await self.connection.lost.wait()

    async def wait_idle(self) -> None:
        """Return at once: it is asked when the connection is lost."""
        await trio.lowlevel.checkpoint()

    async def call(
        self,
        request: m.Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """See `EngineClient.call`; payload is copied both ways, as by a socket."""
        sent = [bytes(part) for part in body]
        await self.connection.passes(request)

        async def served() -> Reply:
            reply = await self._engine.call(request, sent)
            payload = [reply.body.joined()] if reply.body.nbytes else []
            reply.body.release()
            return Reply(reply.message, Body(payload))

        reply = await self.connection.ask(served)
        await self.connection.passes(request, is_answer=True)
        return _into(reply, into) if into else reply

    def watch(
        self, bucket: str, *, others_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[m.WatchEvent]]:
        """See `EngineClient.watch`; events take no time."""
        return self._engine.watch(bucket, others_only=others_only)


def _into(reply: Reply, into: Sequence[memoryview]) -> Reply:
    """Copy a reply's payload to where it is wanted, if it fits."""
    payload = memoryview(reply.body.joined())
    if len(payload) > sum(map(len, into)):
        return reply
    parts: list[memoryview] = []
    for target in into:
        part = target[: len(payload)]
        part[:] = payload[: len(part)]
        payload = payload[len(part) :]
        if len(part):
            parts.append(part)
    return Reply(reply.message, Body(parts))


@asynccontextmanager
async def client_of(
    network: Network, near: str, process: SimProcess | None, service: EngineService | None
) -> AsyncIterator[SimClient]:
    """Connect a client from a host to a service in a process.  EngineUnreachable."""
    async with network.connected(near, process) as connection:
        assert process is not None
        if service is None:
            raise EngineUnreachable("nothing listens there")
        ending = cast(EngineService, _Ending(service, lambda: connection.lose("the other end has ended it")))
        engine = EmbeddedEngine(ending, descriptors=False)
        try:
            yield SimClient(connection, engine)
        finally:
            if process.is_up:
                network.nursery.start_soon(_end, process, engine)


async def _end(process: SimProcess, engine: EmbeddedEngine) -> None:
    """End the service's side of a connection."""
    try:
        await process.serve(engine.aclose)
    except EngineUnreachable:
        await trio.lowlevel.checkpoint()
