"""Stores small objects and binds their names in one request and one group.

Rules kept here:
- PutObjects and PutSlots use no session (`engine.chunks.bound_payloads`): a blob is held by being recorded in the group
  that binds its name.
- Large payloads are synced before the decision that refers to them.  Small ones have their places by then, and are
  synced before its group is appended.  The reply is sent when the group is durable; with `durable` false, as soon as
  the change is in it.
- What was copied from slots is bound to names only while their client is connected: afterwards the slots are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.chunks.bound_payloads import BoundPayloads
from engine.chunks.manifests import HeldBlob
from engine.chunks.payload import Hashed, Payload, ReceivedBody, check_body
from engine.namespace.tree import ChangedBy
from engine.requests.changes import bind_changes
from engine.requests.folder_changes import FolderChanges
from engine.requests.handlers import handles
from engine.requests.slots import SlotPayloads
from engine.requests.stamped import with_stamps
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.recorded_view import RecordedView
from engine.tables.views import Transaction
from lakefs.errors import InvalidArgument, LakeError
from lakefs.host.buffers import PooledPayload
from lakefs.ids import BlobId, ChunkKind
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


class ObjectPuts:
    """Handlers of PutObjects and PutSlots."""

    def __init__(self, store: Store, slots: SlotPayloads) -> None:
        self._store = store
        self._metadata = store.metadata
        self._slots = slots
        self._bound = BoundPayloads(store.metadata, store.chunks, store.references)

    async def receive(self, request: m.PutObjects, body_bytes: int, pooled: PooledPayload | None) -> ReceivedBody:
        """Allocate memory for the payloads of a request; see `PayloadMemory.take`."""
        check_body(request.lengths, body_bytes)
        return await self._store.payload_memory.take([ChunkKind.DATA] * len(request.lengths), request.lengths, pooled)

    @handles(m.PutObjects)
    async def put_objects(self, client: Client, request: m.PutObjects, body: Body) -> Reply:
        assert isinstance(body, ReceivedBody)
        payloads, changes = body.payloads, request.changes
        return await self._put_payloads(
            client, payloads, changes, durable=request.durable, stamps=request.stamps, folders=request.folders
        )

    @handles(m.PutSlots)
    async def put_slots(self, client: Client, request: m.PutSlots) -> Reply:
        async with self._slots.from_request(client, request) as payloads:
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
            results = with_fresh(results, fresh)
            return (
                results
                if told is None
                else told.told(self._metadata.stamps_of(client.stamps_of, durable=durable), results)
            )

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


def with_fresh(results: list[m.NameResult], fresh: Sequence[bool]) -> list[m.NameResult]:
    """Return results that say of each payload if it was new; as they are if all were."""
    if all(fresh):
        return results
    told = zip(results, fresh, strict=True)
    return [msgspec.structs.replace(result, fresh=is_new) for result, is_new in told]
