"""Requests that pin chunks where they are, for clients that read through mappings, and that unpin them."""

from __future__ import annotations

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.format.extents import Place
from engine.requests.grants import grant_of
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tiers.shared_index import NO_GRANT
from lakefs.errors import PermissionDenied
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class PinRequests:
    """Handlers of requests about pins."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pins = store.segments.pins

    @handles(m.PinChunks)
    async def pin(self, client: Client, request: m.PinChunks) -> Reply:
        if not client.trusted:
            raise PermissionDenied("chunks are pinned on the Unix socket only; read them instead")
        chunks = checked_chunks(request.chunks)
        with self._store.metadata.view() as view:
            self._pins.pin(client.pins, [(chunk, find_chunk(view, chunk)) for chunk in chunks])
            sequence = view.sequence
        found = [client.pins.get(chunk) for chunk in chunks]
        try:
            await self._store.metadata.wait_durable(sequence)
            await self._store.segments.small.wait_written(
                [Place(pin.record.segment, pin.record.offset) for pin in found if pin is not None]
            )
        except BaseException:
            pinned = (chunk for chunk, pin in zip(chunks, found, strict=True) if pin is not None)
            self._pins.unpin(client.pins, pinned)  # the client never receives these grants
            raise
        return Reply(m.Pinned([NO_GRANT if pin is None else grant_of(pin.record) for pin in found]))

    @handles(m.UnpinChunks)
    async def unpin(self, client: Client, request: m.UnpinChunks) -> Reply:
        self._pins.unpin(client.pins, checked_chunks(request.chunks))
        return Reply(m.Done())
