"""Locate: the places of chunks, in segments, in the DRAM tier, or in memory that is registered for RDMA."""

from __future__ import annotations

from functools import partial

import msgspec

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.fabric.engine_fabric import EngineFabric
from engine.requests.answers import PackedLocated, grant_of
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tiers.shared_index import NO_GRANT, SharedIndex
from lakefs.limits import BATCH_MAX, DRAM_PAYLOAD_BYTES_MIN
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import MEDIA_DRAM, MEDIA_FABRIC


class Locates:
    """Handler of Locate."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metadata = store.metadata
        self._dram = store.dram

    @handles(m.Locate)
    async def locate(self, client: Client, request: m.Locate) -> Reply:
        shared = self._store.shared_index
        understood = reads_slabs(client, request.media)
        by_fabric = reads_by_fabric(self._store.fabric, client, request.media)
        if shared is not None and not by_fabric:
            reply = self._located_at_once(shared, request.chunks, understood=understood)
            if reply is not None:
                return reply
        chunks = checked_chunks(request.chunks)
        if shared is not None:
            grants, unknown = shared.grants(chunks)
        else:
            grants, unknown = [NO_GRANT] * len(chunks), list(range(len(chunks)))
        if unknown:
            with self._metadata.view() as view:
                for index in unknown:
                    grants[index] = grant_of(find_chunk(view, chunks[index]))
                sequence = view.sequence
            await self._metadata.wait_durable(sequence)
        for chunk in self._dram.note_reads(chunks, grants, understood=understood):
            self._dram.want(chunk)
        if by_fabric:
            self._dram.grant_remotely(chunks, grants)
        return Reply(m.Located(grants))

    def _located_at_once(self, shared: SharedIndex, identifiers: list[bytes], *, understood: bool) -> Reply | None:
        """Return the answer if shared index and arena know every place and no payload is too short for the arena."""
        if len(identifiers) > BATCH_MAX:
            return None
        grants = shared.packed_grants(identifiers, DRAM_PAYLOAD_BYTES_MIN, understood=understood)
        if grants is None:
            return None
        note = partial(self._dram.note_located, identifiers, shared.table.find, understood=understood)
        return Reply(PackedLocated(msgspec.Raw(grants)), then=note)


def reads_slabs(client: Client, media: int) -> bool:
    """Return True if the client understands grants of the arena, and may have its slabs."""
    return bool(media & MEDIA_DRAM) and client.descriptors and client.trusted


def reads_by_fabric(fabric: EngineFabric, client: Client, media: int) -> bool:
    """Return True if the client understands grants of registered memory, and has a queue pair to READ it."""
    return bool(media & MEDIA_FABRIC) and fabric.link_of(client) is not None
