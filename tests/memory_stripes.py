"""Chunks over members, in memory: the port `Stripes` of a head, with switches for what members do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from engine.members.ports import Got, NewChunk, Wanted
from lakefs.cluster.members import Member
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import NO_MEMBER, Table
from lakefs.content.verify import granule_crcs, granules_around, matches_id
from lakefs.errors import ChunkDamaged, ChunkNotFound, EngineUnreachable, InvalidArgument, LakeError
from lakefs.ids import Buffer, ChunkId, GcGeneration, MemberId, RingEpoch, id_text
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient, Reply


def table_of(epoch: int) -> Table:
    """Return the table of a lake of one member."""
    member = Member(MemberId(b"the only member."), 1 << 40)
    rows = ((0, NO_MEMBER, NO_MEMBER),) * 4096
    return Table(RingEpoch(epoch), Protection.parse("1+0"), (member,), rows, 12, 1 << 30)


async def no_member() -> EngineClient:
    """Reach the member of a lake that has none for keys."""
    raise EngineUnreachable("this lake has no member for keys")


@dataclass
class KnownState:
    """The gc generation and the tables that a head knows, and the member that keeps keys (`engine.members.ports`)."""

    generation: GcGeneration = field(default=GcGeneration(1))
    tables: Sequence[Table] = field(default_factory=lambda: [table_of(1)])
    reach: Callable[[], Awaitable[EngineClient]] = no_member

    def is_up(self, member: MemberId) -> bool:
        return True

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        assert member == self.tables[0].members[0].id, "there is no other"
        return await (await self.reach()).call(request, body, into=into)


class MemoryStripes:
    """Chunks by id; each call is noted, and fails as the switches say."""

    def __init__(self) -> None:
        self.chunks: dict[ChunkId, bytes] = {}
        self.touched: dict[ChunkId, GcGeneration] = {}
        """The latest generation in which each chunk was stored or offered."""
        self.rotten: set[ChunkId] = set()
        """Chunks whose shards do not make them any more."""
        self.store_error: LakeError | None = None
        """Raised by stores and offers."""
        self.read_error: LakeError | None = None
        """The answer to each read."""
        self.gate: trio.Event | None = None
        """If there is one, stores wait for it, with all done but the answer."""
        self.offered: list[tuple[GcGeneration, list[ChunkId]]] = []
        self.stored: list[tuple[GcGeneration, list[ChunkId]]] = []
        self.reads: list[list[Wanted]] = []

    async def offer(self, generation: GcGeneration, chunks: Sequence[ChunkId]) -> list[int]:
        """See `Stripes.offer`."""
        await trio.lowlevel.checkpoint()
        assert chunks, "nothing is asked for nothing"
        self.offered.append((generation, list(chunks)))
        if self.store_error is not None:
            raise _again(self.store_error)
        lengths = [0 if chunk in self.rotten else len(self.chunks.get(chunk, b"")) for chunk in chunks]
        for chunk, length in zip(chunks, lengths, strict=True):
            if length:
                self._touch(chunk, generation)
        return lengths

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        """See `Stripes.store`."""
        await trio.lowlevel.checkpoint()
        assert len({new.chunk for new in chunks}) == len(chunks) > 0, "each chunk is stored once"
        self.stored.append((generation, [new.chunk for new in chunks]))
        if self.store_error is not None:
            raise _again(self.store_error)
        fresh: list[bool] = []
        for new in chunks:
            assert matches_id(new.chunk, new.payload), "it was hashed"
            assert new.crcs == granule_crcs(new.payload), "its granules were"
            fresh.append(new.chunk not in self.chunks or new.chunk in self.rotten)
            self.chunks[new.chunk] = bytes(new.payload)
            self.rotten.discard(new.chunk)
            self._touch(new.chunk, generation)
        if self.gate is not None:
            await self.gate.wait()
        return fresh

    async def lengths(self, chunks: Sequence[ChunkId]) -> list[int | LakeError]:
        """See `Stripes.lengths`."""
        found = await self.read([Wanted(chunk, 0) for chunk in chunks])
        return [got if isinstance(got, LakeError) else got.chunk_bytes for got in found]

    async def read(self, wanted: Sequence[Wanted]) -> list[Got | LakeError]:
        """See `Stripes.read`."""
        await trio.lowlevel.checkpoint()
        self.reads.append(list(wanted))
        return [self._read(each) for each in wanted]

    def free(self, chunk: bytes) -> None:
        """Free a chunk, as the members' gc does."""
        del self.chunks[ChunkId(chunk)]
        self.touched.pop(ChunkId(chunk), None)

    def _read(self, wanted: Wanted) -> Got | LakeError:
        text = id_text(wanted.chunk)
        if self.read_error is not None:
            return _again(self.read_error)
        content = self.chunks.get(wanted.chunk)
        if content is None:
            return ChunkNotFound(f"chunk {text} is not in the lake", subject=text)
        if wanted.chunk in self.rotten:
            return ChunkDamaged(f"the shards of chunk {text} do not make it", subject=text)
        assert wanted.chunk_bytes in (0, len(content)), "a length that is known is right"
        end = wanted.offset + wanted.length if wanted.length else len(content)
        if not 0 <= wanted.offset < end <= len(content):
            return InvalidArgument(f"range {wanted.offset}+{wanted.length} is outside a chunk of {len(content)} bytes")
        begin, stop = granules_around(wanted.offset, end - wanted.offset, len(content))
        payload = memoryview(content)[begin:stop]
        return Got(begin, payload, granule_crcs(payload), len(content))

    def _touch(self, chunk: ChunkId, generation: GcGeneration) -> None:
        self.touched[chunk] = max(generation, self.touched.get(chunk, generation))


def _again(error: LakeError) -> LakeError:
    """Return an error like this one, with a traceback of its own."""
    return type(error)(error.message, subject=error.subject)
