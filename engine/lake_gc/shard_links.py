"""Connections to the leaders of other names shards, each for one piece of work.

Rules kept here:
- The work ends with the connection, or with the term of the leader at its other end, whichever is first.
- Errors of the connection and of its requests name the shard; those of the work itself pass as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

import trio

from engine.host.tasks import cancel_after, plain_errors
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient, Reply

M = TypeVar("M", bound=m.Message)


class NamesConnection(Protocol):
    """A connection to names."""

    @property
    def client(self) -> EngineClient:
        """The connection's client: requests are sent through it."""
        ...

    @property
    def wait_ended(self) -> Callable[[], Awaitable[None]]:
        """Returns when the connection is lost, or its other end leads no more."""
        ...


ConnectNames = Callable[[], AbstractAsyncContextManager[NamesConnection]]
"""Connects to the leader of a shard; the connection ends with the block.  EngineUnreachable, PermissionDenied."""
ConnectShard = Callable[[NamesShard], ConnectNames]
"""Returns what connects to the leader of a shard."""


class ShardLink:
    """One connection to the leader of a names shard.  Made by `linked`."""

    def __init__(self, shard: NamesShard, client: EngineClient) -> None:
        self._shard = shard
        self._client = client

    async def call(self, request: m.Request) -> Reply:
        """Send a request; the caller releases the answer's body.  Errors are the request's, and EngineUnreachable."""
        try:
            return await self._client.call(request)
        except LakeError as error:
            raise _of(self._shard, error) from error

    async def ask(self, request: m.Request, answer: type[M]) -> M:
        """Send a request that is answered without a body; errors are those of `call`."""
        reply = await self.call(request)
        reply.body.release()
        assert isinstance(reply.message, answer), reply.message
        return reply.message


@asynccontextmanager
async def linked(shard: NamesShard, connect: ConnectShard) -> AsyncIterator[ShardLink]:
    """Connect to the leader of a shard for the block, which is cancelled when the connection or the term ends.

    EngineUnreachable when it was cancelled so; PermissionDenied, EngineBusy when there is no connection.
    """
    with trio.CancelScope() as scope, plain_errors():
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(connect(shard)())
            except LakeError as error:
                raise _of(shard, error) from error
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(cancel_after, connection.wait_ended, scope)
            yield ShardLink(shard, connection.client)
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        raise _of(shard, EngineUnreachable("its leader was lost, or leads no more"))


def _of(shard: NamesShard, error: LakeError) -> LakeError:
    return type(error)(f"names shard {shard}: {error.message}", subject=error.subject)
