"""Requests that store chunks for a session: offers, chunks in the body, sources, slots of lent memory.

Each reply is sent when the chunks are stored; the session holds them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from engine.chunks.manifests import checked_chunks
from engine.chunks.payload import Payload, PayloadMemory, ReceivedBody, check_body, check_lengths
from engine.host.client_files import check_source, filler
from engine.requests.answers import stored
from engine.requests.handlers import handles
from engine.requests.slots import SlotPayloads
from engine.sessions.references import Client, References, Session
from lakefs.errors import EngineBusy, InvalidArgument
from lakefs.host.buffers import PooledPayload
from lakefs.host.descriptors import close_all, close_later, duplicates
from lakefs.ids import ChunkId, SessionId
from lakefs.limits import BLOB_BYTES_MAX, SOURCES_PER_CONNECTION_MAX
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


class StoredChunks(Protocol):
    """Stores chunks for sessions."""

    async def offer(self, session: Session, chunks: Sequence[ChunkId], /) -> list[bool]:
        """Return True for each chunk that is stored (durably), and hold it for the session."""
        ...

    async def store(self, session: Session, payloads: Sequence[Payload], /) -> list[tuple[ChunkId, bool]]:
        """Store payloads: (id, True if it was new) in order.  Durable on return, and held for the session."""
        ...


class PutStore(Protocol):
    """The part of a store that is used here."""

    references: References
    payload_memory: PayloadMemory
    offload: Offload

    @property
    def chunks(self) -> StoredChunks:
        """Where chunks are stored."""
        ...


class Puts:
    """Handlers of the requests that store chunks."""

    def __init__(self, store: PutStore, slots: SlotPayloads) -> None:
        self._store = store
        self._references = store.references
        self._chunks = store.chunks
        self._slots = slots

    async def receive(self, request: m.StoreChunks, body_bytes: int, pooled: PooledPayload | None) -> ReceivedBody:
        """Allocate memory for the payloads of a request; see `PayloadMemory.take`."""
        check_body(request.lengths, body_bytes)
        if 0 in request.lengths:
            raise InvalidArgument("a chunk has at least 1 byte")
        return await self._store.payload_memory.take(request.kinds, request.lengths, pooled)

    async def disconnected(self, client: Client) -> None:
        """Close the sources of a connection that ends."""
        close_all(client.sources.values())  # closing does not block: `check_source` accepted the files
        client.sources.clear()

    @handles(m.Offer)
    async def offer(self, client: Client, request: m.Offer) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        present = await self._chunks.offer(session, checked_chunks(request.chunks))
        return Reply(m.Offered(present))

    # --- chunks ------------------------------------------------------------------------------------

    @handles(m.StoreChunks)
    async def store_chunks(self, client: Client, request: m.StoreChunks, body: Body) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        assert isinstance(body, ReceivedBody)
        return stored(await self._chunks.store(session, body.payloads))

    @handles(m.SourceOpen)
    async def source_open(self, client: Client, request: m.SourceOpen, descriptors: Sequence[int]) -> Reply:
        if len(descriptors) != 1:
            raise InvalidArgument(f"SourceOpen takes one descriptor, {len(descriptors)} came with it")
        _check_room(client)
        (own,) = duplicates(descriptors)
        try:
            await self._store.offload.run(check_source, own)
            _check_room(client)  # others may have been opened during the check
        except BaseException:
            close_later([own])
            raise
        number = client.number()  # not sent before the check, nor guessable: every source that is read was checked
        client.sources[number] = own
        return Reply(m.SourceOpened(number))

    @handles(m.SourceClose)
    async def source_close(self, client: Client, request: m.SourceClose) -> Reply:
        descriptor = client.sources.pop(request.source, None)
        if descriptor is not None:  # reads under way have a descriptor of their own
            os.close(descriptor)  # closing does not block: `check_source` accepted the file
        return Reply(m.Done())

    @handles(m.StoreFromSource)
    async def store_from_source(self, client: Client, request: m.StoreFromSource) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        opened = client.sources.get(request.source)
        if opened is None:
            raise InvalidArgument(f"source {request.source} is not open on this connection")
        check_lengths(request.lengths)  # bounds their number before the loops below
        if len(request.offsets) != len(request.lengths) or 0 in request.lengths:
            raise InvalidArgument("a source's offsets and lengths go in pairs, and no length is 0")
        if any(not 0 <= offset <= BLOB_BYTES_MAX for offset in request.offsets):
            raise InvalidArgument(f"an offset in a source is from 0 to {BLOB_BYTES_MAX}")
        (descriptor,) = duplicates([opened])
        try:
            fills = [filler(descriptor, offset) for offset in request.offsets]
            async with self._slots.filled(request.lengths, fills) as payloads:
                return stored(await self._chunks.store(session, payloads))
        finally:
            os.close(descriptor)

    @handles(m.StoreSlots)
    async def store_slots(self, client: Client, request: m.StoreSlots) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        if 0 in request.lengths:
            raise InvalidArgument("a chunk has at least 1 byte")
        async with self._slots.from_request(client, request) as payloads:
            return stored(await self._chunks.store(session, payloads))


def _check_room(client: Client) -> None:
    if len(client.sources) >= SOURCES_PER_CONNECTION_MAX:
        raise EngineBusy(f"{SOURCES_PER_CONNECTION_MAX} sources are open on this connection; close some")
