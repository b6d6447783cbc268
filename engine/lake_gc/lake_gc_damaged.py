"""Damaged shards that no sweep frees: their members are not their homes in every table of the cycle.

The walker drops one when all shards of its chunk are at their homes.  For a chunk that nothing refers to any more that
moment never comes; the walk through the names finds out, and the rest is done here.

Rules kept here:
- Members are asked behind `GcBegin` and before the walk begins.  A chunk that the walk marks is forgotten: its damaged
  shards stay, for they may be the last of it.
- Dropped is what its member still knows to be damaged, in the step that drops it, and what was not touched since g - 1.
  No answer counts a damaged shard, so marks need not have reached its member.
- A member that does not answer keeps its own, and one that has more than LISTED_MAX keeps the others until next time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from engine.host.tasks import run_all
from engine.lake_gc.lake_gc_homes import CycleHomes
from engine.members.ports import Members
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, GcGeneration, MemberId
from lakefs.wire import messages as m

LISTED_MAX: Final = 1024
"""Damaged shards of one member in one cycle, about 150 bytes each: of 3,072 members 470 MiB at the very worst."""


class DamagedShards:
    """The damaged shards elsewhere, of chunks that the walk of one cycle has not met."""

    def __init__(self, members: Members, generation: GcGeneration, homes: CycleHomes) -> None:
        self._members = members
        self._generation = generation
        self._homes = homes
        self._of_chunk: defaultdict[ChunkId, list[tuple[MemberId, int]]] = defaultdict(list)

    async def find(self, asked: Iterable[MemberId]) -> None:
        """Ask members for their damaged shards; those that do not answer are left out."""
        shift = 16 - self._homes.partition_bits

        async def of_member(member: MemberId) -> None:
            try:
                reply = await self._members.call(member, m.ListShards(limit=LISTED_MAX, only_damaged=True))
            except LakeError:
                return
            reply.body.release()
            assert isinstance(reply.message, m.ShardsListed), reply.message
            for chunk, shard in zip(reply.message.damaged_chunks, reply.message.damaged_shards, strict=True):
                if member not in self._homes.of_partition[(chunk[1] << 8 | chunk[2]) >> shift]:
                    self._of_chunk[ChunkId(chunk)].append((member, shard))

        await run_all(of_member, sorted(asked))

    def met(self, chunk: ChunkId) -> None:
        """Note that the walk has marked a chunk."""
        self._of_chunk.pop(chunk, None)

    async def drop(self) -> int:
        """Drop those of chunks that were not marked; return how many.  Call it when the walk has ended well."""
        older = self._generation - 2
        if older < 1:
            return 0  # everything was touched since
        of_member: defaultdict[MemberId, list[tuple[ChunkId, int]]] = defaultdict(list)
        for chunk, places in self._of_chunk.items():
            for member, shard in places:
                of_member[member].append((chunk, shard))
        dropped = 0

        async def at_member(member: MemberId) -> None:
            nonlocal dropped
            names = of_member[member]
            chunks: list[bytes] = [chunk for chunk, _ in names]
            request = m.DropShards(
                self._members.tables[0].ring_epoch,
                chunks,
                [shard for _, shard in names],
                [older] * len(names),
                only_damaged=True,
            )
            try:
                reply = await self._members.call(member, request)
            except LakeError:
                return
            reply.body.release()
            assert isinstance(reply.message, m.ShardsDropped), reply.message
            dropped += reply.message.touched.count(0)

        await run_all(at_member, sorted(of_member))
        return dropped
