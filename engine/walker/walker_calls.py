"""Requests of the walker to members: many shards in one, and members that fail are left out from then on.

Rules kept here:
- A request that fails as a whole takes its member out of those that have answered: what it has is not known any more.
- StaleEpoch is raised: the walk goes on from its beginning, by the newer table.
- What is more than fits in a frame is several requests, one after the other.
- Memory of a reply is held until `release`, and bounded by the batch that the caller makes.
- Long shards are read into memory that is used again (`engine.members.read_memory`): members on this machine read them
  there from their disks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from engine.members.ports import Members
from engine.members.read_memory import KEPT_FROM_BYTES, Take, take_anew
from engine.stripes.request_parts import request_parts
from engine.walker.walker_compare import Copy
from lakefs.errors import AlreadyExists, DiskFailed, EngineUnreachable, LakeError, StaleEpoch, StoreFull, StoreReadOnly
from lakefs.ids import Buffer, ChunkId, GcGeneration, MemberId, RingEpoch, id_text
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

_log: Final = structlog.get_logger(__name__)

Name = tuple[ChunkId, int]


class ReadShard(NamedTuple):
    """A shard that was read: its bytes, and the CRC32Cs of its granules as its member has them."""

    payload: Buffer
    crcs: bytes


class NewShard(NamedTuple):
    """A shard to store."""

    chunk: ChunkId
    shard: int
    chunk_bytes: int
    payload: Buffer
    crcs: bytes


class ShardCalls:
    """Requests of one walk, all of one ring epoch."""

    def __init__(self, members: Members, epoch: RingEpoch, answered: set[MemberId], take: Take = take_anew) -> None:
        """`answered` loses members that fail."""
        self._members = members
        self._take = take
        self._epoch = epoch
        self._answered = answered
        self._held: list[Reply] = []

    def release(self) -> None:
        """Give the memory of what was read back."""
        for reply in self._held:
            reply.body.release()
        self._held.clear()

    async def read(
        self, member: MemberId, copies: Sequence[tuple[ChunkId, Copy]]
    ) -> list[ReadShard | LakeError] | None:
        """Read whole shards of a member; valid until `release`.  A shard that cannot be read is its error."""
        found: list[ReadShard | LakeError] = []
        for part in request_parts(copies, lambda each: each[1].length):
            some = await self._read(member, part)
            if some is None:
                return None
            found += some
        return found

    async def _read(
        self, member: MemberId, copies: Sequence[tuple[ChunkId, Copy]]
    ) -> list[ReadShard | LakeError] | None:
        names = [(chunk, copy.shard) for chunk, copy in copies]
        chunks, shards = _columns(names)
        zeros = [0] * len(names)
        are_long = all(copy.length >= KEPT_FROM_BYTES for _, copy in copies)
        into = [self._take(copy.length) for _, copy in copies] if are_long else []
        lengths = [len(view) for view in into] or zeros  # 0: all
        reply = await self._call(member, m.ReadChunks(chunks, zeros, lengths, shards), into)
        if reply is None:
            return None
        self._held.append(reply)
        assert isinstance(reply.message, m.ReadChunksReply), reply.message
        found: list[ReadShard | LakeError] = []
        body = _Body(reply.body.parts)
        for (chunk, shard), piece in zip(names, reply.message.pieces, strict=True):
            if piece.failure is None:
                found.append(ReadShard(body.take(piece.length), piece.crcs))
                continue
            error = piece.failure.as_error()
            _log.warning("a shard cannot be read", chunk=id_text(chunk), shard=shard, reason=error.message)
            found.append(error)
        return found

    async def store(
        self, member: MemberId, generation: GcGeneration, shards: Sequence[NewShard]
    ) -> list[LakeError | None]:
        """Store shards; for each None when it is durable and touched in the generation, or the error.

        AlreadyExists is of the shard that the member has with other bytes.
        """
        results: list[LakeError | None] = []
        for part in request_parts(shards, lambda each: len(each.payload)):
            results += await self._store_part(member, generation, part)
        return results

    async def _store_part(
        self, member: MemberId, generation: GcGeneration, shards: Sequence[NewShard]
    ) -> list[LakeError | None]:
        try:
            await self._store(member, generation, shards)
        except AlreadyExists as error:
            if len(shards) == 1:
                return [error]
            results: list[LakeError | None] = []
            for shard in shards:
                results += await self._store_part(member, generation, [shard])
            return results
        except StaleEpoch:
            raise
        except LakeError as error:
            if not isinstance(error, (StoreFull, StoreReadOnly, DiskFailed)):
                self._lose(member, error)
            return [error] * len(shards)
        return [None] * len(shards)

    async def _store(self, member: MemberId, generation: GcGeneration, shards: Sequence[NewShard]) -> None:
        request = m.StoreShards(
            self._epoch,
            generation,
            [shard.chunk for shard in shards],
            [shard.shard for shard in shards],
            [len(shard.payload) for shard in shards],
            [shard.crcs for shard in shards],
            chunk_lengths=[shard.chunk_bytes for shard in shards],
        )
        reply = await self._members.call(member, request, [shard.payload for shard in shards])
        reply.body.release()

    async def offer(self, member: MemberId, generation: GcGeneration, names: Sequence[Name]) -> list[int] | None:
        """Touch shards; return their lengths, 0 for one that is absent.  The present ones are durable."""
        reply = await self._call(member, m.OfferShards(self._epoch, generation, *_columns(names)))
        if reply is None:
            return None
        reply.body.release()
        assert isinstance(reply.message, m.ShardsOffered), reply.message
        return reply.message.lengths

    async def drop(self, member: MemberId, touched: int, names: Sequence[Name]) -> list[int] | None:
        """Drop shards not touched later; return for each 0, or the generation for which it was kept."""
        reply = await self._call(member, m.DropShards(self._epoch, *_columns(names), [touched] * len(names)))
        if reply is None:
            return None
        reply.body.release()
        assert isinstance(reply.message, m.ShardsDropped), reply.message
        return reply.message.touched

    async def _call(self, member: MemberId, request: m.Request, into: Sequence[memoryview] = ()) -> Reply | None:
        try:
            return await self._members.call(member, request, into=into)
        except StaleEpoch:
            raise
        except LakeError as error:
            self._lose(member, error)
            return None

    def _lose(self, member: MemberId, error: LakeError) -> None:
        if not isinstance(error, EngineUnreachable):  # that it is away was said once, by its link
            _log.warning("a member fails during a walk", member=member.hex(), reason=error.message)
        self._answered.discard(member)


class _Body:
    """Takes pieces from the front of a body; they are slices of its parts where they can be."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = [memoryview(part) for part in parts if len(part)]
        self._part, self._at = 0, 0

    def take(self, length: int) -> Buffer:
        """Return the next bytes of the body."""
        pieces: list[memoryview] = []
        missing = length
        while missing:
            part = self._parts[self._part]
            piece = part[self._at : self._at + missing]
            pieces.append(piece)
            missing -= len(piece)
            self._at += len(piece)
            if self._at == len(part):
                self._part, self._at = self._part + 1, 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _columns(names: Sequence[Name]) -> tuple[list[bytes], list[int]]:
    return [chunk for chunk, _ in names], [shard for _, shard in names]
