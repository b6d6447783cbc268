"""`lake.chunks` of the trio client: chunks by their ids, without a round trip if they are indexed and cached.

Only `get_into` and `get_many_into` read so, in the event loop, and at most `AT_ONCE_BYTES` in one call.  The engine
locates all other chunks, and every chunk of `get` and `get_many`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from lakefs.direct.batch_reads import DirectBatch, memories_of
from lakefs.direct.chunk_reads import NOT_READ
from lakefs.get.opened import AT_ONCE_BYTES
from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import ChunkId

if TYPE_CHECKING:
    from lakefs.client.trio.driver import TrioDriver


class TrioChunks:
    """Chunks of a lake by id, from `TrioLake.chunks`."""

    def __init__(self, driver: TrioDriver) -> None:
        self._driver = driver
        self._index = driver.shares.index

    async def get(self, chunk: bytes) -> bytes:
        """Return a chunk, checked.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
        return (await self.get_many([chunk]))[0]

    async def get_many(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Return chunks, checked, in order.  The first failure is raised."""
        contents = await self._driver.run(self._driver.steps.get_chunks(chunks))
        await self._renew()
        return contents

    async def get_into(self, chunk: bytes, buffer: WritableBuffer) -> int:
        """Read a chunk straight into a buffer, array or tensor at least as long; return its length.

        ChunkNotFound, ChunkDamaged, InvalidArgument; after an error or a cancellation the buffer may hold anything.
        """
        return (await self.get_many_into([chunk], [buffer]))[0]

    async def get_many_into(self, chunks: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Read chunks, each straight into a buffer, array or tensor at least as long; return their lengths, in order.

        ChunkNotFound, ChunkDamaged, InvalidArgument; after an error or a cancellation the buffers may hold anything.
        """
        targets = memories_of(chunks, buffers)
        lengths = self._read_directly(chunks, targets)
        left = [index for index, length in enumerate(lengths) if length == NOT_READ]
        if not left:
            if self._index.notes.note_many(chunks):
                self._index.tell_notes()
            await trio.lowlevel.checkpoint()
            return lengths
        wanted = [chunks[index] for index in left], [targets[index] for index in left]
        found = await self._driver.run(self._driver.steps.get_chunks_into(*wanted))
        for index, length in zip(left, found, strict=True):
            lengths[index] = length
        await self._renew()
        return lengths

    async def _renew(self) -> None:
        if self._index.is_due:
            await self._driver.run(self._index.renewal())

    def _read_directly(self, chunks: Sequence[bytes], targets: list[memoryview]) -> list[int]:
        """Read what needs no request; return the lengths, NOT_READ for the rest."""
        lengths = [NOT_READ] * len(chunks)
        shared = self._index.at_hand()
        if shared is None:
            return lengths
        if sum(map(len, targets)) <= AT_ONCE_BYTES:
            with DirectBatch(shared, chunks, targets) as batch:
                for task in batch.tasks(is_shared=False):
                    task()
            return batch.lengths
        room = AT_ONCE_BYTES
        found_all = shared.places_of(chunks)
        for index, (chunk, found, target) in enumerate(zip(chunks, found_all, targets, strict=True)):
            if found is not None and found[3] <= min(len(target), room):
                lengths[index] = shared.read_found(ChunkId(chunk), found, target[: found[3]])
                room -= found[3]
        return lengths
