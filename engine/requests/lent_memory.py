"""Requests that lend a client's memory to the engine, and end the loan."""

from __future__ import annotations

from collections.abc import Sequence

from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.errors import InvalidArgument, PermissionDenied
from lakefs.host.descriptors import duplicates
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class MemoryRequests:
    """Handlers of requests about lent memory."""

    def __init__(self, store: Store) -> None:
        self._lent = store.lent

    @handles(m.LendMemory)
    async def lend(self, client: Client, request: m.LendMemory, descriptors: Sequence[int]) -> Reply:
        if not (client.descriptors and client.trusted):
            raise PermissionDenied("memory is lent on the Unix socket only; send and ask for the bytes instead")
        if len(descriptors) != 1:
            raise InvalidArgument(f"LendMemory takes one descriptor, {len(descriptors)} came with it")
        (own,) = duplicates(descriptors)
        number = await self._lent.lend(client, own, request.size_bytes, writable=request.writable)
        return Reply(m.MemoryLent(number))

    @handles(m.ReturnMemory)
    async def give_back(self, client: Client, request: m.ReturnMemory) -> Reply:
        await self._lent.give_back(client, request.memory)
        return Reply(m.Done())
