"""Requests that store: sessions, chunks, sources, slots of lent memory, and the commits that bind names to blobs.

Rules kept here:
- A name is bound only to a blob whose every chunk is in the store and held: by the session, or by being recorded in
  the same group.  A manifest is walked and its sizes compared with the chunks' own; the client's figures are not
  trusted.
- Large payloads are synced before the decision that refers to them.  Small ones have their places by then, and are
  synced before its group is appended.  The reply is sent when the group is durable; with `durable` false, as soon as
  the change is in it.
- A slot of lent memory is copied into the engine's memory by a system call, then hashed and written from there: the
  payload never passes the socket.  A client that writes to the slot during the copy changes only what is stored for
  it; one that shrinks the memory gets an error.
- A slot of memory that the client registered for RDMA is READ into the engine's memory in the same way.
- Lent memory stays mapped until every copy has ended, even if the request is cancelled or the memory returned earlier.
- PutObjects and PutSlots use no session (`engine.chunks.bound_payloads`).
- What was copied from slots is bound to names only while their client is connected: afterwards the slots are its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from engine.chunks.bound_payloads import BoundPayloads
from engine.chunks.manifests import HeldBlob, HeldBlobs, checked_chunks
from engine.chunks.payload import Fill, Hashed, Payload, ReceivedBody, check_lengths
from engine.host.client_files import check_source, filler
from engine.memory.lent_memory import LentMemory, read_into
from engine.namespace.tree import ChangedBy
from engine.requests.answers import Decisions, stored
from engine.requests.changes import bind_changes
from engine.requests.fabric_puts import check_slots, read_slots
from engine.requests.folder_changes import FolderChanges
from engine.requests.handlers import handles
from engine.requests.stamped import with_stamps
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.recorded_view import RecordedView
from engine.tables.views import Transaction
from lakefs.errors import ChunkNotFound, EngineBusy, InvalidArgument, LakeError, RequestTooLarge, SessionLost, UserError
from lakefs.host.buffers import PooledPayload
from lakefs.host.descriptors import close_later, duplicates
from lakefs.ids import BlobId, ChunkKind, SessionId
from lakefs.limits import BATCH_MAX, BLOB_BYTES_MAX, SOURCES_PER_CONNECTION_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


class Puts:
    """Handlers of the storing requests."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._references = store.references
        self._chunks = store.chunks
        self._metadata = store.metadata
        self._held = HeldBlobs(store.chunks, store.manifests)
        self._decisions = Decisions(store.metadata)
        self._bound = BoundPayloads(store.metadata, store.chunks, store.references)

    async def receive(self, request: m.StoreChunks | m.PutObjects, pooled: PooledPayload | None = None) -> ReceivedBody:
        """Allocate memory for the payloads of a request; see `PayloadMemory.take`."""
        kinds = request.kinds if isinstance(request, m.StoreChunks) else [ChunkKind.DATA] * len(request.lengths)
        if isinstance(request, m.StoreChunks) and 0 in request.lengths:
            raise InvalidArgument("a chunk has at least 1 byte")
        return await self._store.payload_memory.take(kinds, request.lengths, pooled)

    # --- sessions ----------------------------------------------------------------------------------

    @handles(m.SessionOpen)
    async def session_open(self, client: Client, request: m.SessionOpen) -> Reply:
        if request.domain != 0:
            raise InvalidArgument(f"there is no domain {request.domain}")
        return Reply(m.SessionOpened(self._references.begin_session(client).identifier))

    @handles(m.SessionJoin)
    async def session_join(self, client: Client, request: m.SessionJoin) -> Reply:
        self._references.join_session(client, SessionId(request.session))
        return Reply(m.Done())

    @handles(m.SessionEnd)
    async def session_end(self, client: Client, request: m.SessionEnd) -> Reply:
        self._references.end_session(SessionId(request.session))
        return Reply(m.Done())

    @handles(m.Offer)
    async def offer(self, client: Client, request: m.Offer) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        present = await self._chunks.offer(session, checked_chunks(request.chunks))
        return Reply(m.Offered(present))

    # --- chunks ------------------------------------------------------------------------------------

    @handles(m.StoreChunks)
    async def store_chunks(self, client: Client, request: m.StoreChunks, body: Body) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        assert isinstance(body, ReceivedBody)
        return stored(await self._chunks.store(session, body.payloads))

    @handles(m.SourceOpen)
    async def source_open(self, client: Client, request: m.SourceOpen, descriptors: Sequence[int]) -> Reply:
        if len(descriptors) != 1:
            raise InvalidArgument(f"SourceOpen takes one descriptor, {len(descriptors)} came with it")
        _check_room(client)
        (own,) = duplicates(descriptors)
        try:
            await self._store.offload.run(check_source, own)
            _check_room(client)  # others may have been opened during the check
        except BaseException:
            close_later([own])
            raise
        number = client.number()  # not sent before the check, nor guessable: every source that is read was checked
        client.sources[number] = own
        return Reply(m.SourceOpened(number))

    @handles(m.SourceClose)
    async def source_close(self, client: Client, request: m.SourceClose) -> Reply:
        descriptor = client.sources.pop(request.source, None)
        if descriptor is not None:  # reads under way have a descriptor of their own
            os.close(descriptor)  # closing does not block: `check_source` accepted the file
        return Reply(m.Done())

    @handles(m.StoreFromSource)
    async def store_from_source(self, client: Client, request: m.StoreFromSource) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        opened = client.sources.get(request.source)
        if opened is None:
            raise InvalidArgument(f"source {request.source} is not open on this connection")
        check_lengths(request.lengths)  # bounds their number before the loops below
        if len(request.offsets) != len(request.lengths) or 0 in request.lengths:
            raise InvalidArgument("a source's offsets and lengths go in pairs, and no length is 0")
        if any(not 0 <= offset <= BLOB_BYTES_MAX for offset in request.offsets):
            raise InvalidArgument(f"an offset in a source is from 0 to {BLOB_BYTES_MAX}")
        (descriptor,) = duplicates([opened])
        try:
            fills = [filler(descriptor, offset) for offset in request.offsets]
            async with self._filled(request.lengths, fills) as payloads:
                return stored(await self._chunks.store(session, payloads))
        finally:
            os.close(descriptor)

    @handles(m.StoreSlots)
    async def store_slots(self, client: Client, request: m.StoreSlots) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        if 0 in request.lengths:
            raise InvalidArgument("a chunk has at least 1 byte")
        async with self._slots(client, request) as payloads:
            return stored(await self._chunks.store(session, payloads))

    @asynccontextmanager
    async def _slots(self, client: Client, request: m.StoreSlots | m.PutSlots) -> AsyncIterator[list[Payload]]:
        """Yield payloads that are filled from the slots; their memory lasts until the block ends.

        InvalidArgument, RequestTooLarge; SessionLost when the memory is not lent on this connection.
        """
        check_lengths(request.lengths)  # bounds their number before the loops below
        if len(request.offsets) != len(request.lengths):
            raise InvalidArgument(f"{len(request.offsets)} offsets for {len(request.lengths)} slots")
        if request.fabric is not None:
            link = self._store.fabric.link_for(client, request.fabric)
            check_slots(request.fabric, request.offsets, request.lengths)
            async with AsyncExitStack() as stack:
                async with link.put_turn:
                    payloads = await stack.enter_async_context(self._filled(request.lengths, ()))
                    await read_slots(link, request.fabric, request.offsets, payloads, self._store.offload)
                yield payloads
            return
        with self._store.lent.using(client, request.memory) as memory:
            for offset, length in zip(request.offsets, request.lengths, strict=True):
                memory.check_range(offset, length)
            fills = [_filler(memory, offset) for offset in request.offsets]
            async with self._filled(request.lengths, fills) as payloads:
                yield payloads

    @asynccontextmanager
    async def _filled(self, lengths: Sequence[int], fills: Sequence[Fill]) -> AsyncIterator[list[Payload]]:
        """Yield payloads of data that these calls fill; their memory lasts until the block ends.

        Without calls the caller fills them at once.
        """
        taken = await self._store.payload_memory.take([ChunkKind.DATA] * len(lengths), lengths)
        try:
            for payload, fill in zip(taken.payloads, fills, strict=bool(fills)):
                payload.fill = fill
            yield taken.payloads
        finally:
            taken.release()

    # --- names -------------------------------------------------------------------------------------

    @handles(m.Commit)
    async def commit(self, client: Client, request: m.Commit) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        if len(request.changes) > BATCH_MAX:
            raise RequestTooLarge(f"{len(request.changes)} names in one commit; the limit is {BATCH_MAX}")
        blobs: list[HeldBlob | LakeError] = []
        for change in request.changes:
            try:
                blobs.append(await self._held.hold(session, change.blob))
            except (UserError, ChunkNotFound) as error:
                blobs.append(error)

        def decide(txn: Transaction) -> list[m.NameResult]:
            if not self._references.is_open(session):
                raise SessionLost("the put session ended before its commit; offer the chunks again")
            return self._bind(txn, request.changes, blobs)

        names = [(change.bucket, change.key) for change in request.changes]
        conditions = [change.condition for change in request.changes]
        results = await self._decisions.change_names(client, names, decide, request, conditions=conditions)
        if request.end_session and all(result.failure is None for result in results):
            self._references.end_session(session.identifier)
        return Reply(m.NameResults(results))

    @handles(m.PutObjects)
    async def put_objects(self, client: Client, request: m.PutObjects, body: Body) -> Reply:
        assert isinstance(body, ReceivedBody)
        payloads, changes = body.payloads, request.changes
        return await self._put_payloads(
            client, payloads, changes, durable=request.durable, stamps=request.stamps, folders=request.folders
        )

    @handles(m.PutSlots)
    async def put_slots(self, client: Client, request: m.PutSlots) -> Reply:
        async with self._slots(client, request) as payloads:
            return await self._put_payloads(client, payloads, request.changes, durable=request.durable, slots=True)

    async def _put_payloads(
        self,
        client: Client,
        payloads: Sequence[Payload],
        changes: Sequence[m.NameChange],
        *,
        durable: bool,
        stamps: bool = False,
        folders: bool = False,
        slots: bool = False,
    ) -> Reply:
        """Store payloads and bind a name to each, in one group; replies to PutObjects and to PutSlots.

        `slots`: the payloads are copied from slots of the client.
        """
        if len(changes) != len(payloads):
            raise InvalidArgument(f"{len(changes)} names for {len(payloads)} payloads")

        told: FolderChanges | None = None

        def bind(txn: Transaction, hashed: Sequence[Hashed]) -> list[m.NameResult]:
            nonlocal told
            if slots:
                client.check_its_memory()
            blobs = [HeldBlob(BlobId(item.chunk), item.payload.length, 1) for item in hashed]
            if folders:
                names = [(change.bucket, change.key) for change in changes]
                told = FolderChanges(txn, names, [change.condition for change in changes])
            txn.note(ChangedBy(client))
            results = self._bind(txn, changes, blobs)
            if told is not None:
                told.decided(txn)
            return results

        def bound(results: list[m.NameResult], fresh: Sequence[bool]) -> list[m.NameResult]:
            # In the step of the decision: stamps and times are its own.
            results = self._with_stamps(results) if stamps else results
            if not all(fresh):
                told_fresh = zip(results, fresh, strict=True)
                results = [msgspec.structs.replace(result, fresh=is_new) for result, is_new in told_fresh]
            return results if told is None else told.told(self._metadata, results)

        return Reply(m.NameResults(await self._bound.store(payloads, bind, durable=durable, bound=bound)))

    def _with_stamps(self, results: list[m.NameResult]) -> list[m.NameResult]:
        """Return results of changes that were made in this step, with their stamps if this engine has any."""
        with self._metadata.recorded_view() as view:
            return with_stamps(view, results) if isinstance(view, RecordedView) else results

    def _bind(
        self, txn: Transaction, changes: Sequence[m.NameChange], blobs: Sequence[HeldBlob | LakeError]
    ) -> list[m.NameResult]:
        """Bind the changes that can be bound; every change has a result."""
        return bind_changes(txn, changes, blobs, self._store.clock.wall_ns())


def _check_room(client: Client) -> None:
    if len(client.sources) >= SOURCES_PER_CONNECTION_MAX:
        raise EngineBusy(f"{SOURCES_PER_CONNECTION_MAX} sources are open on this connection; close some")


def _filler(memory: LentMemory, offset: int) -> Fill:
    """Return a call that fills memory of the engine from a slot; it blocks, and raises SourceChanged."""

    def fill(target: memoryview, begin: int) -> bytes:
        return read_into(memory, offset + begin, target)

    return fill
