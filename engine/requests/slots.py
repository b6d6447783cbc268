"""Payloads that the engine takes itself: from slots of lent memory, from memory registered for RDMA, from sources.

Rules kept here:
- A slot of lent memory is copied into the engine's memory by a system call, then hashed and written from there: the
  payload never passes the socket.  A client that writes to the slot during the copy changes only what is stored for
  it; one that shrinks the memory gets an error.
- A slot of memory that the client registered for RDMA is READ into the engine's memory in the same way.
- Lent memory stays mapped until every copy has ended, even if the request is cancelled or the memory returned earlier.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from engine.chunks.payload import Fill, Payload, PayloadMemory, check_lengths
from engine.memory.lent_memory import LentMemory, read_into
from engine.requests.fabric_puts import check_slots, read_slots
from engine.requests.lent import LendingStore
from engine.sessions.references import Client
from lakefs.errors import InvalidArgument
from lakefs.ids import ChunkKind
from lakefs.wire import messages as m


class SlotStore(LendingStore, Protocol):
    """The part of a store that is used here."""

    payload_memory: PayloadMemory


class SlotPayloads:
    """Fills payloads from memory of clients."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store

    @asynccontextmanager
    async def from_request(self, client: Client, request: m.StoreSlots | m.PutSlots) -> AsyncIterator[list[Payload]]:
        """Yield payloads that are filled from the slots; their memory lasts until the block ends.

        InvalidArgument, RequestTooLarge; SessionLost when the memory is not lent on this connection.
        """
        check_lengths(request.lengths)  # bounds their number before the loops below
        if len(request.offsets) != len(request.lengths):
            raise InvalidArgument(f"{len(request.offsets)} offsets for {len(request.lengths)} slots")
        if request.fabric is not None:
            link = self._store.fabric.link_for(client, request.fabric)
            check_slots(request.fabric, request.offsets, request.lengths)
            async with AsyncExitStack() as stack:
                async with link.put_turn:
                    payloads = await stack.enter_async_context(self.filled(request.lengths, ()))
                    await read_slots(link, request.fabric, request.offsets, payloads, self._store.offload)
                yield payloads
            return
        with self._store.lent.using(client, request.memory) as memory:
            for offset, length in zip(request.offsets, request.lengths, strict=True):
                memory.check_range(offset, length)
            fills = [_filler(memory, offset) for offset in request.offsets]
            async with self.filled(request.lengths, fills) as payloads:
                yield payloads

    @asynccontextmanager
    async def filled(self, lengths: Sequence[int], fills: Sequence[Fill]) -> AsyncIterator[list[Payload]]:
        """Yield payloads of data that these calls fill; their memory lasts until the block ends.

        Without calls the caller fills them at once.
        """
        taken = await self._store.payload_memory.take([ChunkKind.DATA] * len(lengths), lengths)
        try:
            for payload, fill in zip(taken.payloads, fills, strict=bool(fills)):
                payload.fill = fill
            yield taken.payloads
        finally:
            taken.release()


def _filler(memory: LentMemory, offset: int) -> Fill:
    """Return a call that fills memory of the engine from a slot; it blocks, and raises SourceChanged."""

    def fill(target: memoryview, begin: int) -> bytes:
        return read_into(memory, offset + begin, target)

    return fill
