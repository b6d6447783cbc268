"""A tiny engine in memory, for tests of the protocol: chunks by id, a few switches to make it wait or fail.

It keeps to `EngineService` and counts what it was given, so that tests see every body released and every
connection ended.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import trio

from engine.host.tasks import run_all
from lakefs.errors import BucketNotFound, ChunkNotFound, InvalidArgument, KeyNotFound
from lakefs.host.buffers import PooledPayload
from lakefs.host.descriptors import close_all
from lakefs.ids import Buffer, ChunkKind, chunk_id_of
from lakefs.wire.engine_port import Body, Later, Reply, ServedClient, never, nothing
from lakefs.wire.messages import (
    BucketCreate,
    BucketRemove,
    Buckets,
    Done,
    Failure,
    Hello,
    HelloReply,
    NameResult,
    NameResults,
    OpenSegments,
    Ping,
    ReadChunks,
    ReadChunksReply,
    ReadPiece,
    Request,
    RunFsck,
    SegmentsOpened,
    SessionEnd,
    SessionJoin,
    SessionOpen,
    SessionOpened,
    SourceOpen,
    SourceOpened,
    StatNames,
    Status,
    StatusReply,
    StoreChunks,
    Stored,
    Watch,
    WatchEvent,
)


@dataclass(eq=False)
class FakeClient(ServedClient):
    """One connection."""

    peer: str
    descriptors: bool
    trusted: bool
    uid: int | None
    has_left: Callable[[], bool] = never
    end: Callable[[], None] = nothing


@dataclass
class FakeService:
    """An `EngineService`.  Requests of `waits` wait for `gate`; RunFsck has a bug; bucket `none` does not exist."""

    store_id: bytes = b"s" * 16
    boot_id: bytes = b"b" * 16
    chunks: dict[bytes, bytes] = field(default_factory=dict)
    segments: dict[int, int] = field(default_factory=dict)
    gate: trio.Event = field(default_factory=trio.Event)
    waits: tuple[type[Request], ...] = (Status,)
    tasks: int = 1
    """Number of tasks in which a request waits."""
    clients: set[FakeClient] = field(default_factory=set)
    connected_total: int = 0
    served: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    bodies_out: int = 0
    bodies_max: int = 1000
    body_back: trio.Event = field(default_factory=trio.Event)
    bytes_out: int = 0
    source_text: bytes = b""
    joined: list[bytes] = field(default_factory=list)
    events: list[WatchEvent] = field(default_factory=list)
    events_changed: trio.Event = field(default_factory=trio.Event)
    watching: int = 0
    ends_watches: bool = False
    then: Callable[[], None] | None = None
    """Called after each answer to Ping."""
    later: Later | None = None
    """Gives the answer to Status, if it is not given at once."""

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
        client = FakeClient(peer, descriptors, trusted, uid, has_left, end)
        self.clients.add(client)
        self.connected_total += 1
        return client

    async def disconnected(self, client: ServedClient) -> None:
        assert isinstance(client, FakeClient)
        await trio.lowlevel.checkpoint()
        self.clients.remove(client)

    async def receive(
        self, client: ServedClient, request: Request, body_bytes: int, pooled: PooledPayload | None = None
    ) -> Body:
        if not isinstance(request, StoreChunks) and not body_bytes:
            return Body()
        if not isinstance(request, StoreChunks) or sum(request.lengths) != body_bytes:
            raise InvalidArgument(f"{type(request).__name__} does not come with {body_bytes} bytes")
        while self.bodies_out >= self.bodies_max:
            self.body_back = trio.Event()
            await self.body_back.wait()
        return self.body(pooled or [memoryview(bytearray(length)) for length in request.lengths])

    def body(self, parts: Sequence[Buffer]) -> Body:
        """Return a body that is counted until it is released."""
        self.bodies_out += 1
        released = False

        def release() -> None:
            nonlocal released
            assert not released, "a body is released once"
            released = True
            self.bodies_out -= 1
            self.body_back.set()

        return Body(parts, release)

    async def serve(self, client: ServedClient, request: Request, body: Body, descriptors: Sequence[int]) -> Reply:
        self.served.append(type(request).__name__)
        try:
            return await self._serve(client, request, body, descriptors)
        except trio.Cancelled:
            self.cancelled.append(type(request).__name__)
            raise
        finally:
            body.release()
            close_all(descriptors)

    async def _serve(self, client: ServedClient, request: Request, body: Body, descriptors: Sequence[int]) -> Reply:
        if isinstance(request, self.waits):
            await run_all(self._wait, range(self.tasks))
        if isinstance(request, Ping):
            return Reply(Done(), then=self.then)
        if isinstance(request, Hello):
            hello = HelloReply(
                1, "fake", self.store_id, b"e" * 16, self.boot_id, 0, [b"d" * 16], 64, 1 << 24, 4096, True
            )
            return Reply(hello)
        if isinstance(request, Status):
            return Reply(StatusReply("{}"), later=self.later)
        if isinstance(request, StoreChunks):
            return self._store(request, body)
        if isinstance(request, ReadChunks):
            return self._read(request)
        if isinstance(request, OpenSegments):
            found = [segment for segment in request.segments if segment in self.segments]
            return Reply(SegmentsOpened(found), descriptors=[self.segments[segment] for segment in found])
        if isinstance(request, SourceOpen):
            self.source_text = b"".join(os.pread(descriptor, 100, 0) for descriptor in descriptors)
            return Reply(SourceOpened(len(descriptors)))
        if isinstance(request, RunFsck):
            raise ZeroDivisionError("planted")
        return self._named(request)

    async def _wait(self, _: int) -> None:
        await self.gate.wait()

    def _named(self, request: Request) -> Reply:
        if isinstance(request, BucketRemove):
            raise BucketNotFound(f"bucket {request.name} does not exist", subject=request.name)
        if isinstance(request, StatNames):
            error = KeyNotFound("no such key")
            return Reply(NameResults([NameResult(None, Failure(error.wire_code, key)) for _, key in request.names]))
        if isinstance(request, SessionOpen):
            return Reply(SessionOpened(os.urandom(16)))
        if isinstance(request, SessionJoin):
            self.joined.append(request.session)
            return Reply(Done())
        if isinstance(request, SessionEnd):
            return Reply(Done())
        if isinstance(request, BucketCreate):
            return Reply(Buckets([]))
        raise InvalidArgument(f"the fake engine does not do {type(request).__name__}")

    def _store(self, request: StoreChunks, body: Body) -> Reply:
        ids: list[bytes] = []
        for kind, part in zip(request.kinds, body.parts, strict=True):
            ids.append(chunk_id_of(ChunkKind(kind), part))
            self.chunks[ids[-1]] = bytes(part)
        return Reply(Stored(ids, [True] * len(ids)))

    def _read(self, request: ReadChunks) -> Reply:
        missing = [chunk for chunk in request.chunks if chunk not in self.chunks]
        if missing:
            raise ChunkNotFound("no such chunk", subject=missing[0].hex())
        parts = [self.chunks[chunk] for chunk in request.chunks]
        return Reply(ReadChunksReply([ReadPiece(0, len(part), b"") for part in parts]), self.body(parts))

    def watch(self, client: ServedClient, request: Watch) -> AsyncIterator[WatchEvent]:
        if request.bucket == "none":
            raise BucketNotFound("bucket none does not exist", subject="none")
        self.watching += 1
        return self._watch()

    async def _watch(self) -> AsyncIterator[WatchEvent]:
        position = 0
        try:
            while not (self.ends_watches and position == len(self.events)):
                while position < len(self.events):
                    yield self.events[position]
                    position += 1
                await self.events_changed.wait()
        finally:
            self.watching -= 1

    def publish(self, *events: WatchEvent) -> None:
        """Give events to every watch."""
        self.events += events
        self.events_changed.set()
        self.events_changed = trio.Event()
