"""Dispatches requests to the handlers of a choice of groups; begins and ends connections.

A `Group` is handlers that a process serves together, with what else they need of a connection.  Groups stand on as
little as they can (`engine.requests.table`), so that a process without segments can serve names.

Rules kept here:
- A reply is sent only when the state it rests on is durable; for a change requested with `durable` false, when that
  change is visible.
- A request's body is released and its descriptors are closed exactly once, whether it succeeds or not.
- A client's input is checked here or in the handler before it is used; a bad request does not affect other clients.
- A request of a group that the process does not serve is refused by UnsupportedVersion, and nothing is received for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.chunks.payload import ReceivedBody
from engine.namespace.buckets import find_bucket
from engine.namespace.watch import Watch
from engine.requests.handlers import Handler, Handlers
from engine.sessions.references import Client, References
from engine.store.names_store import NamesStore
from engine.upkeep.index_upkeep import with_what_happens
from lakefs.errors import IndexDamaged, InvalidArgument, LakeError, UnsupportedVersion
from lakefs.host.buffers import PooledPayload
from lakefs.host.descriptors import close_later
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply, ServedClient, never, nothing

Receive = Callable[[Any, int, PooledPayload | None], Awaitable[ReceivedBody]]
"""Allocates memory for the body of a request: (request, body bytes, the body if it is in memory already)."""


@dataclass(frozen=True)
class Group:
    """Handlers that a process serves together.

    `parts`: the objects whose methods they are.  `bodies`: the requests that bring a body, and who receives it.
    `ends`: what ends with a connection, in order.  `others`: handlers that are no marked methods.
    """

    parts: Sequence[object]
    bodies: Mapping[type[m.Request], Receive] = field(default_factory=dict)
    ends: Sequence[Callable[[Client], Awaitable[None]]] = ()
    others: Mapping[type[m.Request], Handler] = field(default_factory=dict)


class Groups:
    """Requests and connections of an `EngineService` on groups of handlers; all but its watches."""

    def __init__(
        self, references: References, groups: Iterable[Group], requests: Iterable[type[m.Request]], *, offers: str
    ) -> None:
        """`references` has the clients.  `requests`: those that must have a handler; BugError if one has none.

        `offers` begins the refusal of requests that have no handler; their kind follows.
        """
        groups = list(groups)
        self._references = references
        parts = (part for group in groups for part in group.parts)
        others = {request: handler for group in groups for request, handler in group.others.items()}
        self._handlers: Final = Handlers(parts, requests, others)
        self._bodies: Final = {request: receive for group in groups for request, receive in group.bodies.items()}
        self._ends: Final = [end for group in groups for end in group.ends]
        self._offers = offers

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
        """Begin a connection."""
        client = self._references.connect(peer, descriptors=descriptors, trusted=trusted, uid=uid)
        client.has_left = has_left
        client.end = end
        return client

    async def disconnected(self, client: ServedClient) -> None:
        """End a connection: all that the groups keep for it, then its sessions and leases."""
        assert isinstance(client, Client)
        for end in self._ends:
            await end(client)
        self._references.disconnect(client)

    async def receive(
        self, client: ServedClient, request: m.Request, body_bytes: int, pooled: PooledPayload | None = None
    ) -> Body:
        """Allocate memory for the body of a request."""
        receive = self._bodies.get(type(request))
        if receive is not None:
            return await receive(request, body_bytes, pooled)
        if type(request) not in self._handlers.by_request:
            raise self._refusal(type(request))
        if body_bytes:
            raise InvalidArgument(f"{type(request).__name__} has no body, {body_bytes} bytes came with it")
        return ReceivedBody()

    async def serve(self, client: ServedClient, request: m.Request, body: Body, descriptors: Sequence[int]) -> Reply:
        """Run the request's handler; releases the body and closes the descriptors."""
        assert isinstance(client, Client)
        handler = self._handlers.by_request.get(type(request))
        try:
            if handler is None:
                raise self._refusal(type(request))
            if descriptors and type(request) not in self._handlers.takes_descriptors:
                raise InvalidArgument(f"{type(request).__name__} takes no descriptors")
            return await handler(client, request, body, descriptors)
        except IndexDamaged as error:
            raise self._explained(error) from error
        finally:
            body.release()
            if descriptors:
                close_later(descriptors)

    def _explained(self, error: IndexDamaged) -> LakeError:
        """Return the error with what happens next."""
        return error

    def _refusal(self, request: type[m.Request]) -> UnsupportedVersion:
        return UnsupportedVersion(f"{self._offers} {request.__name__}")


class Dispatch(Groups):
    """Implements `lakefs.wire.engine_port.EngineService` on groups of handlers, over names that are kept here."""

    def __init__(
        self,
        store: NamesStore,
        groups: Iterable[Group],
        requests: Iterable[type[m.Request]] = (),
        *,
        watches: bool = True,
        offers: str = "this engine does not offer",
    ) -> None:
        """`watches`: Watch is served.  See `Groups`."""
        super().__init__(store.references, groups, requests, offers=offers)
        self._names = store
        self._watches = watches

    def watch(self, client: ServedClient, request: m.Watch) -> Watch:
        """Subscribe to the events of a bucket, or of all ("").  BucketNotFound, EngineBusy, UnsupportedVersion."""
        assert isinstance(client, Client)
        if not self._watches:
            raise self._refusal(m.Watch)
        if request.bucket:
            with self._names.metadata.view() as view:
                find_bucket(view, request.bucket)
        left_out = client if request.others_only else None
        return self._names.watchers.subscribe(request.bucket, left_out, client.user)

    def _explained(self, error: IndexDamaged) -> LakeError:
        return with_what_happens(self._names, error)
