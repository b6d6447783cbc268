"""The port between faces and engine: requests in, replies out, payload beside them.

Two sides of one thing.  `EngineClient` is what `Lake` drives: the embedded engine, and the remote one over a
stream, implement it, and one contract suite holds them equal.  `EngineService` is what a server serves: it also
says where a request's body is to be received, so that payload lands once, where it is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lakefs.ids import Buffer
from lakefs.wire.messages import Message, Request, Watch, WatchEvent


def _nothing() -> None:
    """The release of a body that owns no pooled memory."""


@dataclass
class Body:
    """Payload of one request or reply: parts that follow each other, and who gets the memory back.

    `release` is called exactly once, by whoever consumed the body; the parts must not be touched afterwards.
    """

    parts: Sequence[Buffer] = ()
    release: Callable[[], None] = _nothing

    @property
    def nbytes(self) -> int:
        """Total length in bytes; parts are byte buffers."""
        return sum(len(part) for part in self.parts)

    def joined(self) -> bytes:
        """All parts as one bytes object (copies); for small bodies."""
        return b"".join(self.parts)


@dataclass
class Reply:
    """An answer: the message, its payload, and descriptors whose ownership goes to the receiver.

    A server sends the descriptors and closes none of them: `descriptors` of an `EngineService` stay the
    service's own (the kernel duplicates them in flight); those of a remote `EngineClient` are new and the
    caller closes them.

    `then` of a service's answer is called when that has been handed on: work that the answer did not need.
    """

    message: Message
    body: Body = field(default_factory=Body)
    descriptors: Sequence[int] = ()
    then: Callable[[], None] | None = None
    epoch: int = 0
    """Of the connection that it came over, as a client counts them."""


class EngineClient(Protocol):
    """Asks one engine.  Safe for use by many tasks at once."""

    @property
    def epoch(self) -> int:
        """Counts connections: descriptors, leases and sources of an earlier epoch are void."""
        ...

    @property
    def carries_descriptors(self) -> bool:
        """Whether OpenSegments and SourceOpen can work here."""
        ...

    def is_connected(self) -> bool:
        """Whether the connection of this epoch is still there: looks for its end, and waits for nothing."""
        ...

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """The engine's reply.  Raises the error of `lakefs.errors` that the engine answered with.

        `into` is writable memory for the reply's body: when the body fits, the reply's parts are slices of it,
        from the front; else, or without it, the parts are other memory.  The parts say where the bytes are.

        On cancellation the request may or may not be done; a reply that comes later is dropped.
        """
        ...

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter, when nothing else is under way and it need not wait.

        Whether it was sent; it may get lost even then.
        """
        ...

    def watch(
        self, bucket: str, *, others_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Events of a bucket from now on, in order, each after it is durable; they end with the connection.

        `others_only`: what this connection's own requests change is left out.
        BucketNotFound, EngineBusy.  After a `resync` event, or a new connection, look at everything again.
        """
        ...


class ServedClient(Protocol):
    """What a service keeps for one connection; opaque to the server."""


class EngineService(Protocol):
    """What a server serves."""

    def connected(
        self, peer: str, *, descriptors: bool, trusted: bool, uid: int | None = None
    ) -> ServedClient:
        """A connection has begun.  `trusted`: it came over a Unix socket that checked its owner, who is `uid`."""
        ...

    async def disconnected(self, client: ServedClient) -> None:
        """The connection has ended; its leases are dropped; its sessions end or linger."""
        ...

    async def receive(self, client: ServedClient, request: Request, body_bytes: int) -> Body:
        """Memory for a request's body, exactly `body_bytes` in all, to be filled before `serve`.

        Asked for every request that came with a body, and for StoreChunks and PutObjects always.
        Raises UserError when the request's lengths do not fit its body; waits when the pool is empty.
        """
        ...

    async def serve(
        self, client: ServedClient, request: Request, body: Body, descriptors: Sequence[int]
    ) -> Reply:
        """Do the request.  Takes over `body` (releases it) and `descriptors` (closes them), also when it raises."""
        ...

    def watch(self, client: ServedClient, request: Watch) -> AsyncIterator[WatchEvent]:
        """Events of a bucket, until closed (`aclose` or `close` of the iterator, where it has one).

        The watch has begun when this returns, so that no event after the client's answer is missed.
        """
        ...


class BlockingEngineClient(Protocol):
    """The blocking counterpart of `EngineClient`: requests are started, and finished in any order.

    Used by one thread at a time.  Errors as `EngineClient.call`, raised by either method.
    """

    @property
    def address(self) -> str:
        """Where the engine is: `unix:PATH`, `tcp://HOST:PORT`, `data:PATH`."""
        ...

    @property
    def epoch(self) -> int:
        """Counts connections: descriptors, leases and sources of an earlier epoch are void."""
        ...

    @property
    def carries_descriptors(self) -> bool:
        """Whether OpenSegments and SourceOpen can work here."""
        ...

    def is_connected(self) -> bool:
        """Whether the connection of this epoch is still there: looks for its end, and waits for nothing."""
        ...

    def start(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> object:
        """Send a request; its ticket."""
        ...

    def finish(self, ticket: Any) -> Reply:
        """Wait for the reply of a started request."""
        ...

    def cancel(self, ticket: Any) -> None:
        """Nobody will finish this request; its memory is left alone from now on."""
        ...

    def forget(self, ticket: Any) -> None:
        """Nobody will finish this request; it is done all the same."""
        ...

    def tell(self, request: Request) -> bool:
        """As `EngineClient.tell`."""
        ...

    def close(self) -> None:
        """Close the connection; idempotent."""
        ...

    def forked(self) -> BlockingEngineClient:
        """In a child that was forked just now: another client of the engine, in the place of this one."""
        ...
