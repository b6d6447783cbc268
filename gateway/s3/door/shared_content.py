"""Descriptors and mappings by which the door reads content: requested from the engine when an answer needs them.

Rules kept here:
- A chunk is looked up when its answer is learned; only the segment or slab in which it lies then is requested.
- Memory is mapped only if it is sealed against shrinking (`lakefs.grants.dram_slabs`); segments are read, not mapped.
- A request that fails is no error: the door passes on what it cannot read, and the next answer asks again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import trio

from lakefs.errors import LakeError
from lakefs.grants.dram_slabs import Slabs
from lakefs.host.descriptors import close_all
from lakefs.host.page_cache import is_in_memory
from lakefs.ids import ChunkId
from lakefs.shared_index.table import SharedIndexReader
from lakefs.shared_index.table_format import unpack_place
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.grants import MEDIUM_DRAM, MEDIUM_SEGMENT, OpenSlabs, SlabsOpened
from lakefs.wire.messages import OpenSegments, SegmentsOpened

if TYPE_CHECKING:
    from gateway.s3.door._repeater import Repeater

_WANTED_MAX: Final = 32
"""Segments, and slabs, that are waited for; more are asked for again by later answers."""


class SharedContent:
    """Segments and slabs of one engine, brought for `Repeater`.  `run` brings them, in a task of its owner."""

    def __init__(self, engine: EngineClient, repeater: Repeater) -> None:
        self._engine = engine
        self._repeater = repeater
        self._index: SharedIndexReader | None = None
        self._slabs = Slabs()
        self._wanted_segments: set[int] = set()
        self._wanted_slabs: set[int] = set()
        self._is_wanted = trio.Event()

    @property
    def is_current(self) -> bool:
        """True unless the engine has another shared index by now."""
        return self._index is None or self._index.is_current

    def use(self, index: SharedIndexReader | None) -> None:
        """Look chunks up in this index, of the present connection, from now on."""
        self._index = index
        self._slabs = Slabs()
        self._wanted_segments.clear()
        self._wanted_slabs.clear()

    def want(self, chunks: Sequence[ChunkId]) -> None:
        """Have the segments and slabs brought in which chunks lie, if they are not at hand."""
        if self._index is None:
            return
        for found in self._index.find_many(list(chunks)):
            if found is not None:
                self._want_place(found[0], found[1])
        if self._wanted_slabs or self._wanted_segments:
            self._is_wanted.set()

    def _want_place(self, medium: int, place: int) -> None:
        if medium == MEDIUM_DRAM:
            slab = unpack_place(place)[0]
            if not self._repeater.has_slab(slab) and len(self._wanted_slabs) < _WANTED_MAX:
                self._wanted_slabs.add(slab)
            return
        is_held = medium != MEDIUM_SEGMENT or self._repeater.has_segment(place)
        if not is_held and len(self._wanted_segments) < _WANTED_MAX:
            self._wanted_segments.add(place)

    async def run(self) -> None:
        """Bring what is wanted, until cancelled."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted = trio.Event()
            index = self._index
            segments, slabs = sorted(self._wanted_segments), sorted(self._wanted_slabs)
            self._wanted_segments.clear()
            self._wanted_slabs.clear()
            try:
                if segments:
                    await self._bring_segments(segments, index)
                if slabs:
                    await self._bring_slabs(slabs, index)
            except LakeError:
                continue

    async def _bring_segments(self, segments: list[int], index: SharedIndexReader | None) -> None:
        reply = await self._engine.call(OpenSegments(segments))
        assert isinstance(reply.message, SegmentsOpened)
        if index is not self._index:  # another connection by now
            close_all(reply.descriptors)
            return
        for segment, descriptor in zip(reply.message.segments, reply.descriptors, strict=True):
            self._repeater.use_segment(segment, descriptor, 0 if is_in_memory(descriptor) else os.RWF_NOWAIT)

    async def _bring_slabs(self, slabs: list[int], index: SharedIndexReader | None) -> None:
        reply = await self._engine.call(OpenSlabs(slabs))
        assert isinstance(reply.message, SlabsOpened)
        if index is not self._index:
            close_all(reply.descriptors)
            return
        before = self._slabs.arena
        self._slabs.add(reply.message.slabs, reply.descriptors, reply.message.slab_bytes)
        arena = self._slabs.arena
        if arena is None:
            return
        if before is None or before.file != arena.file:
            self._repeater.use_generations(arena.generations.cast("B"), arena.slab_bytes)
        for slab, memory in arena.slabs.items():
            if not self._repeater.has_slab(slab):
                self._repeater.use_slab(slab, memory)
