"""Requests about the DRAM tier: descriptors of its slabs, and reports of reads that clients did without a request."""

from __future__ import annotations

from collections.abc import Sequence

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.errors import PermissionDenied, RequestTooLarge
from lakefs.ids import ChunkId
from lakefs.limits import SLABS_PER_REQUEST_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class SlabRequests:
    """Handlers of requests about slabs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._dram = store.dram

    @handles(m.OpenSlabs)
    async def open(self, client: Client, request: m.OpenSlabs) -> Reply:
        if not (client.descriptors and client.trusted):
            raise PermissionDenied("descriptors are given on the Unix socket only; ask for the bytes instead")
        if len(request.slabs) > SLABS_PER_REQUEST_MAX:
            raise RequestTooLarge(f"at most {SLABS_PER_REQUEST_MAX} slabs in one request")
        tier = self._dram.tier
        if tier is None:
            return Reply(m.SlabsOpened([], 0))
        arena = tier.arena
        found = [number for number in dict.fromkeys(request.slabs) if number in arena.slabs]
        descriptors = [arena.slabs[number].memory.descriptor for number in found]
        return Reply(m.SlabsOpened(found, arena.slab_bytes), descriptors=[*descriptors, arena.generations_descriptor])

    @handles(m.NoteReads)
    async def note_reads(self, request: m.NoteReads) -> Reply:
        chunks = checked_chunks(request.chunks)
        if self._dram.tier is not None:
            for chunk, length in zip(chunks, self._lengths(chunks), strict=True):
                if length is not None and self._dram.note_read(chunk, length, by_client=True):
                    self._dram.want(chunk)
        return Reply(m.Done())

    def _lengths(self, chunks: Sequence[ChunkId]) -> list[int | None]:
        """Return the payload bytes of each chunk, None for one that does not exist."""
        shared = self._store.shared_index
        found = [None] * len(chunks) if shared is None else shared.places_of(list(chunks))
        lengths = [None if place is None else place[3] for place in found]
        if None in lengths:
            with self._store.metadata.view() as view:
                for index, chunk in enumerate(chunks):
                    if lengths[index] is None and (record := find_chunk(view, chunk)) is not None:
                        lengths[index] = record.stored_bytes
        return lengths
