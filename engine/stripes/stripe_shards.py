"""Cuts a chunk into its shards for the members, with the CRC32Cs of their granules.

Rules kept here:
- Data shards are slices of the chunk's own memory, and begin at granules: their CRCs are slices of the chunk's.
- The parity of a lone data shard is its copy, so it is the same memory.
- Other parity lies in pooled memory.  A portion of chunks takes all it needs in turn, never more than the pool has; so
  portions that wait for each other cannot deadlock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from engine.members.ports import NewChunk
from lakefs.cluster.erasure import ErasureCode
from lakefs.content.verify import crcs_between, granule_crcs
from lakefs.host.buffers import BUFFER_BYTES, BufferPool, PooledBuffer
from lakefs.ids import ChunkId, MemberId
from lakefs.limits import MIB

PORTION_BYTES: Final = 24 * MIB
"""Shards of one portion: 16 MiB of chunks at 4+2.  At most two thirds are parity (chunks just over a granule): 16 MiB,
which fill fewer than 2 x 16 / 4 + 1 = 9 buffers, since two consecutive ones hold more than one buffer's worth."""
BUFFERS_PER_PORTION_MAX: Final = 9


class Stripe:
    """A chunk being stored: its shards and their CRCs, and who has stored which."""

    __slots__ = ("chunk", "crcs", "data_shards", "fresh", "length", "shards", "stored")

    def __init__(self, code: ErasureCode, new: NewChunk) -> None:
        self.chunk: ChunkId = new.chunk
        self.length = len(new.payload)
        self.data_shards = code.data_shards(self.length)
        self.shards: dict[int, memoryview] = {}
        self.crcs: dict[int, bytes] = {}
        self.stored: dict[int, MemberId] = {}
        self.fresh = False
        """True if shard 0 was new: of many that store a chunk at once, one stores it."""
        if self.data_shards == 1:
            self.shards = dict.fromkeys(code.shards(self.length), new.payload)
            self.crcs = dict.fromkeys(self.shards, new.crcs)
            return
        for shard in range(self.data_shards):
            begin, size = code.extent(self.length, shard)
            self.shards[shard] = new.payload[begin : begin + size]
            self.crcs[shard] = crcs_between(new.crcs, begin, begin + size)

    def encode(self, code: ErasureCode, payload: memoryview, memory: memoryview) -> None:
        """Make the parity in `memory`.  Blocks."""
        size = code.shard_bytes(self.length)
        parts = [memory[row * size : (row + 1) * size] for row in range(code.parity)]
        code.encode(payload, parts)
        for row, part in enumerate(parts):
            self.shards[code.data + row] = part
            self.crcs[code.data + row] = granule_crcs(part)


def portions(code: ErasureCode, chunks: Sequence[NewChunk]) -> list[list[NewChunk]]:
    """Return the chunks in portions of at most PORTION_BYTES of shards, or of one chunk."""
    cut: list[list[NewChunk]] = []
    room = 0
    for new in chunks:
        size = code.stored_bytes(len(new.payload))
        if size > room:
            cut.append([])
            room = PORTION_BYTES
        cut[-1].append(new)
        room -= size
    return cut


class ParityMemory:
    """Memory for the parity of the chunks that are being stored."""

    def __init__(self, pool: BufferPool) -> None:
        assert pool.capacity >= BUFFERS_PER_PORTION_MAX, "one portion must find room"
        self._pool = pool
        self._turn = trio.Lock()

    @asynccontextmanager
    async def taken(self, lengths: Sequence[int]) -> AsyncIterator[list[memoryview]]:
        """Yield memory of each length, at most a buffer's; waits for the pool.  It is given back with the block."""
        buffers: list[PooledBuffer] = []
        try:
            yield await self._take(lengths, buffers) if lengths else []
        finally:
            for buffer in buffers:
                buffer.release()

    async def _take(self, lengths: Sequence[int], buffers: list[PooledBuffer]) -> list[memoryview]:
        areas: list[memoryview] = []
        room = memoryview(b"")
        async with self._turn:
            for length in lengths:
                assert length <= BUFFER_BYTES, "parity of a chunk fits in a buffer"
                if length > len(room):
                    buffers.append(await self._pool.acquire())
                    room = buffers[-1].view
                areas.append(room[:length])
                room = room[length:]
        return areas
