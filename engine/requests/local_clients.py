"""Requests of clients on the engine's machine, about what they share with the engine.

They open segments, slabs, the shared index and the stamps (the reply has the descriptors, all read-only), pin places of
chunks, and report reads that they did without a request (NoteReads).

Descriptors and pins are for trusted clients only (Unix socket, own process); others get PermissionDenied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.format.extents import Place
from engine.keyed.spaces import find_space
from engine.requests.answers import grant_of
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys
from engine.sessions.references import Client
from engine.store.names_store import NamesStore
from engine.store.store import Store
from engine.tiers.dram_filler import Dram
from engine.tiers.owned_table import OwnedTable
from engine.tiers.shared_index import NO_GRANT
from lakefs.errors import CorruptionError, OperationalError, PermissionDenied, RequestTooLarge, UnsupportedVersion
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import SLABS_PER_REQUEST_MAX
from lakefs.shared_index.table_format import entries_max
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

SEGMENTS_PER_REQUEST_MAX: Final = 64
_log: Final = structlog.get_logger(__name__)


class StampRequests:
    """Handler of OpenStamps."""

    def __init__(self, store: NamesStore) -> None:
        self._store = store

    @handles(m.OpenStamps)
    async def open_stamps(self, client: Client) -> Reply:
        require_local(client, "stamps are shared on the Unix socket only; ask for each answer instead")
        stamps = self._store.metadata.stamps
        if stamps is None:
            raise UnsupportedVersion("this engine has no stamps; ask for each answer instead")
        return Reply(m.StampsOpened(), descriptors=[stamps.descriptor])


class TierStore(Protocol):
    """The part of a store that slabs and shared index are opened of."""

    dram: Dram

    @property
    def shared_index(self) -> OwnedTable | None:
        """The table in which clients look chunks up."""


class TierRequests:
    """Handlers of requests for the memory in front of the segments."""

    def __init__(self, store: TierStore) -> None:
        self._store = store

    @handles(m.OpenSlabs)
    async def open_slabs(self, client: Client, request: m.OpenSlabs) -> Reply:
        require_local(client, "descriptors are given on the Unix socket only; ask for the bytes instead")
        if len(request.slabs) > SLABS_PER_REQUEST_MAX:
            raise RequestTooLarge(f"at most {SLABS_PER_REQUEST_MAX} slabs in one request")
        tier = self._store.dram.tier
        if tier is None:
            return Reply(m.SlabsOpened([], 0))
        arena = tier.arena
        found = [number for number in dict.fromkeys(request.slabs) if number in arena.slabs]
        descriptors = [arena.slabs[number].memory.descriptor for number in found]
        return Reply(m.SlabsOpened(found, arena.slab_bytes), descriptors=[*descriptors, arena.generations_descriptor])

    @handles(m.OpenSharedIndex)
    async def open_shared_index(self, client: Client) -> Reply:
        require_local(client, "the shared index is shared on the Unix socket only; use Locate instead")
        index = self._store.shared_index
        if index is None:
            raise UnsupportedVersion("this engine shares no shared index; use Locate instead")
        index.counts.lent += 1
        return Reply(m.SharedIndexOpened(entries_max(index.table.capacity)), descriptors=[index.backing.descriptor])


class SegmentRequests:
    """Handlers of requests about places in segments, and about reads of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._dram = store.dram

    async def disconnected(self, client: Client) -> None:
        """End the pins of a connection that ends."""
        self._store.segments.pins.end_all(client.pins)

    @handles(m.OpenSegments)
    async def open_segments(self, client: Client, request: m.OpenSegments) -> Reply:
        require_local(client, "descriptors are given on the Unix socket only; ask for the bytes instead")
        if len(request.segments) > SEGMENTS_PER_REQUEST_MAX:
            raise RequestTooLarge(f"at most {SEGMENTS_PER_REQUEST_MAX} segments in one request")
        known = self._store.segments.register.kinds
        found: list[int] = []
        descriptors: list[int] = []
        for segment in request.segments:
            if SegmentId(segment) not in known:
                continue
            try:
                descriptors.append(self._store.segments.files.lend(SegmentId(segment)))
            except (CorruptionError, OperationalError) as error:
                # Without a descriptor the client requests the bytes, and gets the error of each chunk.
                _log.warning("segment_not_lent", segment=f"{segment:016x}", reason=error.message)
                continue
            found.append(segment)
        return Reply(m.SegmentsOpened(found), descriptors=descriptors)

    @handles(m.NoteReads)
    async def note_reads(self, request: m.NoteReads) -> Reply:
        chunks = checked_chunks(request.chunks)
        check_keys(request.keys)
        if self._dram.tier is not None:
            for chunk, length in zip(chunks, self._lengths(chunks), strict=True):
                if length is not None and self._dram.note_read(chunk, length, by_client=True):
                    self._dram.want(chunk)
        if request.keys:
            with self._store.metadata.view() as view:
                find_space(view, request.space)
            self._store.keyed.note_used(request.space, request.keys)
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

    @handles(m.PinChunks)
    async def pin_chunks(self, client: Client, request: m.PinChunks) -> Reply:
        if not client.trusted:
            raise PermissionDenied("chunks are pinned on the Unix socket only; read them instead")
        chunks = checked_chunks(request.chunks)
        with self._store.metadata.view() as view:
            self._store.segments.pins.pin(client.pins, [(chunk, find_chunk(view, chunk)) for chunk in chunks])
            sequence = view.sequence
        found = [client.pins.get(chunk) for chunk in chunks]
        try:
            await self._store.metadata.wait_durable(sequence)
            await self._store.segments.small.wait_written(
                [Place(pin.record.segment, pin.record.offset) for pin in found if pin is not None]
            )
        except BaseException:
            pinned = (chunk for chunk, pin in zip(chunks, found, strict=True) if pin is not None)
            self._store.segments.pins.unpin(client.pins, pinned)  # the client never receives these grants
            raise
        return Reply(m.Pinned([NO_GRANT if pin is None else grant_of(pin.record) for pin in found]))

    @handles(m.UnpinChunks)
    async def unpin_chunks(self, client: Client, request: m.UnpinChunks) -> Reply:
        self._store.segments.pins.unpin(client.pins, checked_chunks(request.chunks))
        return Reply(m.Done())


def require_local(client: Client, refusal: str) -> None:
    """Raise PermissionDenied unless the client can be sent descriptors, and may have them."""
    if not (client.descriptors and client.trusted):
        raise PermissionDenied(refusal)
