"""The port between clients and engine: requests in, replies out, payload beside them.

The port has two sides.  `EngineClient` is the side that `Lake` uses: the embedded engine and the remote one (over a
stream) implement it, and one contract suite holds them equal.  `EngineService` is the side that a server calls: it
also provides the memory for a request's body, so that payload is received directly where it is used.
`BlockingEngineClient` is the counterpart of `EngineClient` for threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from lakefs.ids import Buffer
from lakefs.wire.messages import Message, Request, Watch, WatchEvent
from lakefs.wire.offers import Offers

if TYPE_CHECKING:
    from lakefs.host.buffers import PooledPayload  # it loads trio, which the blocking client does without


def nothing() -> None:
    """Do nothing: the release of a body that owns no pooled memory, the end of a connection that has none."""


@dataclass(eq=False)
class Body:
    """Payload of one request or reply: parts that follow each other, and a function that gives the memory back.

    The consumer of the body calls `release` exactly once; the parts must not be touched afterwards.
    """

    parts: Sequence[Buffer] = ()
    release: Callable[[], None] = nothing

    @property
    def nbytes(self) -> int:
        """Total length in bytes; parts are byte buffers."""
        return sum(len(part) for part in self.parts)

    def joined(self) -> bytes:
        """All parts as one bytes object (copies); for small bodies."""
        return b"".join(self.parts)


NO_BODY: Final = Body()
"""The body of the many messages without one; there is nothing to release."""


Later = Callable[[Callable[["Reply"], None]], Callable[[], None]]
"""Called once with what takes a reply; returns what gives the reply up.  The reply may be given before it returns."""


@dataclass
class Reply:
    """An answer: the message, its payload, and descriptors.

    A server sends the descriptors and closes none of them: `descriptors` from an `EngineService` stay the
    service's own (the kernel duplicates them in flight).  Those from a remote `EngineClient` are new, and the
    caller closes them.

    `then` of a service's answer is called after the answer was handed on: work that the answer did not need.

    With `later` the service has no answer yet, and `message` is none: it gives one in a later step, and no task waits.
    """

    message: Message
    body: Body = NO_BODY
    descriptors: Sequence[int] = ()
    then: Callable[[], None] | None = None
    epoch: int = 0
    """Number of the connection that the answer arrived on, as a client counts them."""
    later: Later | None = None


class ConnectedClient(Protocol):
    """The part of a client that does not depend on whether its callers wait."""

    @property
    def epoch(self) -> int:
        """Count of connections so far: descriptors, leases and sources of an earlier epoch are void."""
        ...

    @property
    def carries_descriptors(self) -> bool:
        """True if descriptors can be sent with requests and replies."""
        ...

    @property
    def offers(self) -> Offers:
        """Offers of the present connection's engine, of what goes by memory; always the same object."""
        ...

    def is_connected(self) -> bool:
        """Return True if the connection of this epoch is still open.  Checks for its end and never waits."""
        ...

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter, if no other request is under way and sending need not wait.

        Returns True if it was sent; it may get lost even then.
        """
        ...


class EngineClient(ConnectedClient, Protocol):
    """Sends requests to one engine.  Safe for use by many tasks at once."""

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """Send a request and return the engine's reply.  Raises the error of `lakefs.errors` that the engine sent.

        The memory of `body` must not change until the call ends; afterwards it is the caller's, also if cancelled.  A
        `PooledPayload` may be stored from where it lies.

        `into` is writable memory for the reply's body: if the body fits, the reply's parts are slices of `into`, from
        its front; else they are other memory.  The reply's parts say where the bytes are.

        On cancellation the request may or may not be done; a reply that arrives later is dropped.
        """
        ...

    def watch(
        self, bucket: str, *, others_only: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Iterate over a bucket's events from now on, in order, each after it is durable, until the connection ends.

        `others_only`: leave out changes made by this connection's own requests.
        BucketNotFound, EngineBusy.  After a `resync` event, or a new connection, look at everything again.
        """
        ...


def never() -> bool:
    """Return False: a client in the engine's process never leaves."""
    return False


class ServedClient(Protocol):
    """State that a service keeps for one connection; opaque to the server."""


class EngineService(Protocol):
    """The engine as a server calls it."""

    def connected(
        self,
        peer: str,
        *,
        descriptors: bool,
        trusted: bool,
        uid: int | None = None,
        has_left: Callable[[], bool] = never,
        end: Callable[[], None] = nothing,
    ) -> ServedClient:
        """Begin a connection.  `trusted`: it arrived on a Unix socket that checked its owner; `uid` is that owner.

        `has_left()` returns True once the client has ended the connection, at once, before the end is received.
        `end()` ends it: a service calls it when it has lost what it keeps for the connection.
        """
        ...

    async def disconnected(self, client: ServedClient) -> None:
        """End a connection: its leases are dropped; its sessions end or linger."""
        ...

    async def receive(
        self, client: ServedClient, request: Request, body_bytes: int, pooled: PooledPayload | None = None
    ) -> Body:
        """Return memory for a request's body, exactly `body_bytes` in all, to be filled before `serve`.

        `pooled`: the body, which is in memory of this process already.  If the service stores it from there, the parts
        that it returns are `pooled`, and it uses the buffer until `serve` ends.

        Called for every request that has a body, and for StoreChunks and PutObjects always.
        Raises UserError when the request's lengths do not fit its body; waits when the pool is empty.
        """
        ...

    async def serve(self, client: ServedClient, request: Request, body: Body, descriptors: Sequence[int]) -> Reply:
        """Do the request.  Takes over `body` (releases it) and `descriptors` (closes them), also if it raises."""
        ...

    def watch(self, client: ServedClient, request: Watch) -> AsyncIterator[WatchEvent]:
        """Iterate over a bucket's events, until closed: `aclose` of a generator, else `close`, if it has one.

        The watch has begun when this returns, so no event after the client's answer is missed.  One that is a
        `BeginsLater` has begun when its `begin` returns, which is awaited before the client is answered.
        """
        ...


@runtime_checkable
class BeginsLater(Protocol):
    """A watch that has to wait for its beginning."""

    async def begin(self) -> None:
        """Begin; called once, before the first event is asked for.  Errors are the answer to the client."""
        ...


class BlockingEngineClient(ConnectedClient, Protocol):
    """The blocking counterpart of `EngineClient`: requests are started, and finished in any order.

    Used by one thread at a time.  `start` and `finish` raise the errors of `EngineClient.call`.
    """

    @property
    def address(self) -> str:
        """The engine's address: `unix:PATH`, `tcp://HOST:PORT`, `data:PATH`."""
        ...

    @property
    def timeout_s(self) -> float:
        """Seconds that the engine may be silent while a request waits, before EngineUnreachable is raised."""
        ...

    def job(self, limit_s: float) -> AbstractContextManager[None]:
        """Give the requests of a block so many seconds together; EngineUnreachable then, with the connection closed.

        For one thread at a time.
        """
        ...

    def start(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> object:
        """Send a request; return its ticket."""
        ...

    def finish(self, ticket: Any) -> Reply:
        """Wait for the reply of a started request and return it."""
        ...

    def cancel(self, ticket: Any) -> None:
        """Give up a request that will not be finished; its memory is not written from now on."""
        ...

    def forget(self, ticket: Any) -> None:
        """Let a request run that will not be finished: the engine does it all the same."""
        ...

    def close(self) -> None:
        """Close the connection; idempotent."""
        ...

    def forked(self) -> BlockingEngineClient:
        """Return another client of the engine, to use in place of this one in a child process just forked."""
        ...
