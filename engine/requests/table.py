"""Dispatches requests: one handler for each request of `lakefs.wire.messages`.

The other modules of this package hold the handlers by subject (`put`, `names`, `open`, ...) and mark them
(`engine.requests.handlers`).  This one begins and ends connections, and answers requests about the engine itself.

Rules kept here:
- A reply is sent only when the state it rests on is durable; for a change requested with `durable` false, when that
  change is visible.
- A request's body is released and its descriptors are closed exactly once, whether it succeeds or not.
- A client's input is checked here or in the handler before it is used; a bad request does not affect other clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from engine.chunks.payload import ReceivedBody
from engine.namespace.buckets import find_bucket
from engine.namespace.watch import Watch
from engine.requests.handlers import Handlers, handles
from engine.requests.keyed import KeyedRequests
from engine.requests.keyed_load import KeyedLoads
from engine.requests.keyed_put import KeyedPuts
from engine.requests.load_ranges import Loads
from engine.requests.local_clients import LocalRequests
from engine.requests.names import NameRequests
from engine.requests.open import Reads
from engine.requests.put import Puts
from engine.requests.read_chunks import ChunkReads
from engine.requests.shards import ShardRequests
from engine.requests.uploads import UploadRequests
from engine.sessions.references import Client
from engine.store.store import Store
from engine.upkeep.index_upkeep import with_what_happens
from lakefs.errors import IndexDamaged, InvalidArgument, UnsupportedVersion
from lakefs.host.buffers import PooledPayload
from lakefs.host.descriptors import close_all, close_later
from lakefs.limits import (
    COMPACT_SHARE,
    COMPACT_SHARE_MOST,
    GATEWAY_REASON_CHARACTERS_MAX,
    GATEWAY_REASONS_MAX,
    GATEWAY_URL_CHARACTERS_MAX,
    SCRUB_STEP_S_MAX,
)
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply, ServedClient, never

_SERVED: Final = [request for request in m.REQUESTS.values() if request is not m.Watch]
"""`Service.watch` serves Watch, which has more than one reply."""


class Service:
    """Implements `lakefs.wire.engine_port.EngineService` on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._puts = Puts(store)
        self._keyed_puts = KeyedPuts(store)
        self._shards = ShardRequests(store)
        loads = Loads(store)
        self._handlers: Final = Handlers(
            (
                self,
                self._puts,
                Reads(store),
                ChunkReads(store),
                NameRequests(store),
                UploadRequests(store),
                LocalRequests(store),
                loads,
                KeyedRequests(store),
                self._keyed_puts,
                KeyedLoads(store, loads),
                self._shards,
            ),
            _SERVED,
        )

    # --- EngineService -----------------------------------------------------------------------------

    def connected(
        self,
        peer: str,
        *,
        descriptors: bool,
        trusted: bool,
        uid: int | None = None,
        has_left: Callable[[], bool] = never,
    ) -> ServedClient:
        """Begin a connection."""
        client = self._store.references.connect(peer, descriptors=descriptors, trusted=trusted, uid=uid)
        client.has_left = has_left
        return client

    async def disconnected(self, client: ServedClient) -> None:
        """End a connection: close its sources, end its lent memory, queue pair, pins, sessions and leases."""
        assert isinstance(client, Client)
        close_all(client.sources.values())  # closing does not block: `check_source` accepted the files
        client.sources.clear()
        self._store.lent.end_all(client)
        await self._store.fabric.close(client)
        self._store.segments.pins.end_all(client.pins)
        self._store.references.disconnect(client)

    async def receive(
        self, client: ServedClient, request: m.Request, body_bytes: int, pooled: PooledPayload | None = None
    ) -> Body:
        """Allocate memory for the body of a request."""
        if isinstance(request, (m.StoreChunks, m.PutObjects)):
            _check_body(request.lengths, body_bytes)
            return await self._puts.receive(request, pooled)
        if body_bytes and isinstance(request, (m.KeyedPut, m.StoreShards)):
            _check_body(request.lengths, body_bytes)
            if isinstance(request, m.KeyedPut):
                return await self._keyed_puts.receive(request)
            return await self._shards.receive(request)
        if body_bytes:
            raise InvalidArgument(f"{type(request).__name__} has no body, {body_bytes} bytes came with it")
        return ReceivedBody()

    async def serve(self, client: ServedClient, request: m.Request, body: Body, descriptors: Sequence[int]) -> Reply:
        """Run the request's handler; releases the body and closes the descriptors."""
        assert isinstance(client, Client)
        handler = self._handlers.by_request.get(type(request))
        try:
            if handler is None:
                raise UnsupportedVersion(f"this engine does not offer {type(request).__name__}")
            if descriptors and type(request) not in self._handlers.takes_descriptors:
                raise InvalidArgument(f"{type(request).__name__} takes no descriptors")
            return await handler(client, request, body, descriptors)
        except IndexDamaged as error:
            raise with_what_happens(self._store, error) from error
        finally:
            body.release()
            if descriptors:
                close_later(descriptors)

    def watch(self, client: ServedClient, request: m.Watch) -> Watch:
        """Subscribe to the events of a bucket, or of all ("").  BucketNotFound, EngineBusy."""
        assert isinstance(client, Client)
        if request.bucket:
            with self._store.metadata.view() as view:
                find_bucket(view, request.bucket)
        left_out = client if request.others_only else None
        return self._store.watchers.subscribe(request.bucket, left_out, client.user)

    # --- about the engine --------------------------------------------------------------------------

    @handles(m.Hello)
    async def _hello(self, client: Client) -> Reply:
        return Reply(self._store.hello(descriptors=client.descriptors))

    @handles(m.Ping)
    async def _ping(self) -> Reply:
        return Reply(m.Done())

    @handles(m.FabricOpen)
    async def _fabric_open(self, client: Client, request: m.FabricOpen) -> Reply:
        return Reply(m.FabricOpened(await self._store.fabric.open(client, request.end, self._store.offload)))

    @handles(m.Status)
    async def _status(self) -> Reply:
        return Reply(m.StatusReply(json.dumps(await self._store.status())))

    @handles(m.NoteGateway)
    async def _note_gateway(self, client: Client, request: m.NoteGateway) -> Reply:
        _check_note(request)
        client.gateway = request
        return Reply(m.Done())

    @handles(m.Sync)
    async def _sync(self) -> Reply:
        await self._store.metadata.sync()
        return Reply(m.Done())

    @handles(m.RunGc)
    async def _run_gc(self, request: m.RunGc) -> Reply:
        report = await self._store.collect(COMPACT_SHARE_MOST if request.compact else COMPACT_SHARE)
        return Reply(m.ReportReply(json.dumps(asdict(report))))

    @handles(m.RunFsck)
    async def _run_fsck(self, request: m.RunFsck) -> Reply:
        return Reply(m.ReportReply(json.dumps(await self._store.check(full=request.full))))

    @handles(m.RunScrub)
    async def _run_scrub(self, request: m.RunScrub) -> Reply:
        scrubber = self._store.scrubber
        if not 0 <= request.for_s <= SCRUB_STEP_S_MAX or request.rate_bytes_per_s < -1:
            raise InvalidArgument(f"a scrub goes on for 0 to {SCRUB_STEP_S_MAX:.0f} seconds, at a rate of -1 or more")
        done = False
        if request.for_s:
            rate = None if request.rate_bytes_per_s < 0 else request.rate_bytes_per_s
            done = await scrubber.advance(request.for_s, rate_bytes_per_s=rate, restart=request.restart)
        report = {"done": done, **scrubber.status()}
        if request.damaged:
            report["damaged"] = await self._store.damaged()
        return Reply(m.ReportReply(json.dumps(report)))


def _check_body(lengths: Sequence[int], body_bytes: int) -> None:
    if sum(lengths) != body_bytes:
        raise InvalidArgument(f"lengths add up to {sum(lengths)}, the body has {body_bytes} bytes")


def _check_note(note: m.NoteGateway) -> None:
    """Raise InvalidArgument for counts and texts that no gateway has."""
    texts = [(note.url, GATEWAY_URL_CHARACTERS_MAX)]
    texts += [(reason, GATEWAY_REASON_CHARACTERS_MAX) for reason in note.passed_on]
    if len(note.passed_on) > GATEWAY_REASONS_MAX or any(
        len(text) > most or not (text.isascii() and text.isprintable()) for text, most in texts
    ):
        raise InvalidArgument(
            f"a gateway has an address of at most {GATEWAY_URL_CHARACTERS_MAX} characters, and at most "
            f"{GATEWAY_REASONS_MAX} reasons of {GATEWAY_REASON_CHARACTERS_MAX} each, all printable ASCII"
        )
    if min(note.process, note.answers, note.repeated, *note.passed_on.values()) < 0:
        raise InvalidArgument("a gateway's counts are not negative")
