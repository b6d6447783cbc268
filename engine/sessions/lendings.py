"""Lent memory of each connection (`engine.memory.lent_memory`), within bounds.

Rules kept here:
- Lendings are bounded for each connection, and in all by number and bytes; they end with their connection.
- No request uses memory before its check has ended: a client could guess its number during the check.
- After the reply to ReturnMemory the engine does not read or write the memory.

All methods run on the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from engine.memory.lent_memory import LentMemory
from engine.sessions.references import Client
from lakefs.errors import EngineBusy, InvalidArgument, SessionLost
from lakefs.host.new_memory import check_lendable
from lakefs.limits import GIB, LENT_MEMORIES_MAX, LENT_MEMORIES_PER_CONNECTION_MAX, LENT_MEMORY_BYTES_MAX
from lakefs.ports import Offload


class Lendings:
    """All lendings of one engine."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._count = 0
        self._bytes = 0
        self._lenders: dict[int, Client] = {}
        """The lending client by number."""

    async def lend(self, client: Client, descriptor: int, size_bytes: int, *, writable: bool) -> int:
        """Take the memory of `descriptor`; the lending owns the descriptor from now on, even when this raises.

        Returns its number on the client's connection.  InvalidArgument, EngineBusy.
        """
        memory = LentMemory(descriptor, size_bytes, writable=writable)
        try:
            self._make_room(client, size_bytes)
        except BaseException:
            memory.end()
            raise
        number = client.number()
        client.memories[number] = memory
        self._lenders[number] = client
        self._count += 1
        self._bytes += size_bytes
        memory.enter()
        try:
            await self._offload.run(memory.open)
        except BaseException:
            self._end(client, number)
            raise
        finally:
            memory.leave()
        return number

    @contextmanager
    def using(self, client: Client, number: int, *, writable: bool = False) -> Iterator[LentMemory]:
        """Yield the memory, mapped until the block ends.

        SessionLost when it is not lent, InvalidArgument when it is not lent for writing.
        """
        memory = client.memories.get(number)
        if memory is None or not memory.is_open:
            raise SessionLost(f"memory {number} is not lent on this connection; lend it again")
        if writable and not memory.writable:
            raise InvalidArgument(f"memory {number} was lent for reading only")
        memory.enter()
        try:
            yield memory
        finally:
            memory.leave()

    async def give_back(self, client: Client, number: int) -> None:
        """End a lending and wait until its last use ends; does nothing for an unknown number.

        The lending may be another connection's: a client that closed that one so waits for its end, which a load under
        way may delay.
        """
        ended = self._end(self._lenders.get(number, client), number)
        if ended is not None:
            await ended.wait()

    def end_all(self, client: Client) -> None:
        """End all lendings of a connection that has ended."""
        for number in list(client.memories):
            self._end(client, number)

    def statistics(self) -> dict[str, int]:
        """Counts for `lake status`."""
        return {"count": self._count, "bytes": self._bytes}

    def _end(self, client: Client, number: int) -> trio.Event | None:
        memory = client.memories.pop(number, None)
        if memory is None:
            return None
        if self._lenders.get(number) is client:
            del self._lenders[number]
        self._count -= 1
        self._bytes -= memory.size_bytes
        assert self._count >= 0, "a lending ends once"
        assert self._bytes >= 0
        return memory.end()

    def _make_room(self, client: Client, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise InvalidArgument("memory that is lent has at least 1 byte")
        check_lendable(size_bytes)
        if len(client.memories) >= LENT_MEMORIES_PER_CONNECTION_MAX:
            raise EngineBusy(f"{LENT_MEMORIES_PER_CONNECTION_MAX} memories are lent on this connection; return some")
        if self._count >= LENT_MEMORIES_MAX or self._bytes + size_bytes > LENT_MEMORY_BYTES_MAX:
            raise EngineBusy(
                f"{self._count} memories of {self._bytes} bytes are lent to the engine, and {size_bytes} bytes "
                f"more pass its limit of {LENT_MEMORIES_MAX} and {LENT_MEMORY_BYTES_MAX // GIB} GiB; "
                "try again when others have returned theirs"
            )
