"""The only member of a lake whose chunks are in memory (`tests.memory_stripes`), for its upkeep."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import trio

from lakefs.cluster.table import Table
from lakefs.errors import UnsupportedVersion
from lakefs.ids import Buffer, ChunkId, GcGeneration, MemberId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from tests.memory_stripes import KnownState, MemoryStripes

_REPORTS: dict[type[m.Request], dict[str, Any]] = {
    m.RunFsck: {"damage": 0, "notes": 0, "checked": {}, "findings": []},
    m.RunGc: {"freed_chunks": 0, "removed_segments": 0, "disk_bytes_after": 0},
}


class MemoryMember:
    """`Members` of a lake of one member at 1+0: each chunk has one shard, which is the chunk."""

    def __init__(self, stripes: MemoryStripes, known: KnownState) -> None:
        self._stripes = stripes
        self._known = known
        self._born: set[ChunkId] = set()
        self._marked: set[ChunkId] = set()
        self._cycle = 0
        self._answers: dict[type[m.Request], Callable[[Any], m.Message]] = {
            m.SetEpoch: lambda request: m.EpochKnown(self.tables[0].ring_epoch, b""),
            m.OfferShards: self._offer,
            m.ListShards: self._list,
            m.GcBegin: self._begin,
            m.GcMark: self._mark,
            m.GcSweep: self._sweep,
        }

    @property
    def tables(self) -> Sequence[Table]:
        return self._known.tables

    @property
    def generation(self) -> GcGeneration:
        return self._known.generation

    def is_up(self, member: MemberId) -> bool:
        return True

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        await trio.lowlevel.checkpoint()
        if type(request) in _REPORTS:
            return Reply(m.ReportReply(json.dumps(_REPORTS[type(request)])), Body())
        if type(request) not in self._answers:
            raise UnsupportedVersion(f"a member in memory does not serve {type(request).__name__}")
        return Reply(self._answers[type(request)](request), Body())

    def _length(self, chunk: bytes, shard: int) -> int:
        is_there = shard == 0 and chunk not in self._stripes.rotten
        return len(self._stripes.chunks.get(ChunkId(chunk), b"")) if is_there else 0

    def _offer(self, request: m.OfferShards) -> m.ShardsOffered:
        names = zip(request.chunks, request.shards, strict=True)
        lengths = [self._length(chunk, shard) for chunk, shard in names]
        return m.ShardsOffered(lengths, lengths)

    def _list(self, request: m.ListShards) -> m.ShardsListed:
        chunks = sorted(self._stripes.chunks)
        lengths, touched = [self._length(chunk, 0) for chunk in chunks], [self._stripes.touched[c] for c in chunks]
        return m.ShardsListed([*chunks], [0] * len(chunks), lengths, [0] * len(chunks), [*touched], b"")

    def _begin(self, request: m.GcBegin) -> m.Done:
        self._born, self._marked, self._cycle = set(self._stripes.chunks), set(), request.generation
        return m.Done()

    def _mark(self, request: m.GcMark) -> m.Done:
        self._marked.update(map(ChunkId, request.chunks))
        return m.Done()

    def _sweep(self, request: m.GcSweep) -> m.ShardsSwept:
        garbage = [chunk for chunk in self._born - self._marked if self._stripes.touched[chunk] < self._cycle - 1]
        size = sum(self._length(chunk, 0) for chunk in garbage)
        for chunk in garbage:
            self._stripes.free(chunk)
        return m.ShardsSwept(len(garbage), size, "")
