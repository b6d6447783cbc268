"""Stores chunks and whole objects from slots of lent memory: the payload never passes the socket.

Rules kept here:
- A slot is copied into the engine's memory by a system call, then hashed and written from there.  A client that writes
  to the slot during the copy changes only what is stored for it; one that shrinks the memory gets an error.
- The memory stays mapped until every copy has ended, even if the request is cancelled or the memory returned earlier.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.chunks.payload import Fill, Payload, check_lengths
from engine.memory.lent_memory import LentMemory, read_into
from engine.requests.answers import stored
from engine.requests.handlers import handles
from engine.requests.put import Puts
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.errors import InvalidArgument, SessionLost
from lakefs.ids import ChunkKind, SessionId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class SlotRequests:
    """Handlers of requests that store from lent memory."""

    def __init__(self, store: Store, puts: Puts) -> None:
        self._lent = store.lent
        self._references = store.references
        self._chunks = store.chunks
        self._payload_memory = store.payload_memory
        self._puts = puts

    @handles(m.StoreSlots)
    async def store(self, client: Client, request: m.StoreSlots) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        if 0 in request.lengths:
            raise InvalidArgument("a chunk has at least 1 byte")
        async with self._payloads(client, request) as payloads:
            return stored(await self._chunks.store(session, payloads))

    @handles(m.PutSlots)
    async def put(self, client: Client, request: m.PutSlots) -> Reply:
        async with self._payloads(client, request) as payloads:
            return await self._puts.put_payloads(client, payloads, request.changes, durable=request.durable)

    @asynccontextmanager
    async def _payloads(self, client: Client, request: m.StoreSlots | m.PutSlots) -> AsyncIterator[list[Payload]]:
        """Yield payloads that are filled from the slots; their memory lasts until the block ends.

        InvalidArgument, RequestTooLarge; SessionLost when the memory is not lent on this connection.
        """
        check_lengths(request.lengths)  # bounds their number before the loops below
        if len(request.offsets) != len(request.lengths):
            raise InvalidArgument(f"{len(request.offsets)} offsets for {len(request.lengths)} slots")
        if request.memory not in client.memories:
            raise SessionLost(f"memory {request.memory} is not lent on this connection; lend it again")
        with self._lent.using(client, request.memory) as memory:
            for offset, length in zip(request.offsets, request.lengths, strict=True):
                memory.check_range(offset, length)
            kinds = [ChunkKind.DATA] * len(request.lengths)
            taken = await self._payload_memory.take(kinds, request.lengths)
            try:
                for payload, offset in zip(taken.payloads, request.offsets, strict=True):
                    payload.fill = _filler(memory, offset)
                yield taken.payloads
            finally:
                taken.release()


def _filler(memory: LentMemory, offset: int) -> Fill:
    """Return a call that fills memory of the engine from a slot; it blocks, and raises SourceChanged."""

    def fill(target: memoryview, begin: int) -> bytes:
        return read_into(memory, offset + begin, target)

    return fill
