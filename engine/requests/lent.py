"""Requests about memory of clients that the engine reads and writes: lent on one machine, or registered for RDMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.fabric.engine_fabric import EngineFabric
from engine.requests.handlers import handles
from engine.requests.local_clients import require_local
from engine.sessions.lendings import Lendings
from engine.sessions.references import Client
from lakefs.errors import InvalidArgument
from lakefs.host.descriptors import duplicates
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class LendingStore(Protocol):
    """The part of a store that is used here."""

    lent: Lendings
    fabric: EngineFabric
    offload: Offload


class LentRequests:
    """Handlers of requests about memory of clients."""

    def __init__(self, store: LendingStore) -> None:
        self._store = store

    async def disconnected(self, client: Client) -> None:
        """End the lent memory and the queue pair of a connection that ends."""
        self._store.lent.end_all(client)
        await self._store.fabric.close(client)

    @handles(m.LendMemory)
    async def lend_memory(self, client: Client, request: m.LendMemory, descriptors: Sequence[int]) -> Reply:
        require_local(client, "memory is lent on the Unix socket only; send and ask for the bytes instead")
        if len(descriptors) != 1:
            raise InvalidArgument(f"LendMemory takes one descriptor, {len(descriptors)} came with it")
        (own,) = duplicates(descriptors)
        number = await self._store.lent.lend(client, own, request.size_bytes, writable=request.writable)
        return Reply(m.MemoryLent(number))

    @handles(m.ReturnMemory)
    async def return_memory(self, client: Client, request: m.ReturnMemory) -> Reply:
        await self._store.lent.give_back(client, request.memory)
        return Reply(m.Done())

    @handles(m.FabricOpen)
    async def fabric_open(self, client: Client, request: m.FabricOpen) -> Reply:
        return Reply(m.FabricOpened(await self._store.fabric.open(client, request.end, self._store.offload)))
