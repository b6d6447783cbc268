"""Binds names to blobs whose content a head has looked at: the names of a lake have none.

A head's members have answered, each in a gc generation and a ring epoch, that a blob's chunks are stored.  `BindGate`
knows which answers names are bound on: gc of a member may free what was answered in an older generation, and answers
under a retired epoch may be of members that are no longer of the lake.

Rules kept here:
- The gate is looked at in the step in which a name is bound.  So after `join` has returned, no name is bound any more
  on answers below the joined generation minus one, and what was bound before is found by a walk that begins then.
- Sizes and counts are the head's, which has walked the manifest: only heads may reach these handlers.
"""

from __future__ import annotations

from typing import Final

from engine.chunks.manifests import HeldBlob, checked_chunks
from engine.format.features import ReadOnlyFeature
from engine.namespace.binding import bind
from engine.namespace.buckets import ensure_bucket, find_bucket
from engine.namespace.object_stat import copied_special, copied_symlink, new_object
from engine.namespace.tree import Resolved
from engine.requests.answers import Decisions
from engine.requests.changes import bind_changes
from engine.requests.handlers import handles
from engine.requests.names import one_name
from engine.requests.uploads import UploadRequests
from engine.sessions.references import Client
from engine.store.names_store import NamesStore
from engine.tables.views import Transaction
from lakefs.errors import InvalidArgument, RequestTooLarge, SessionLost
from lakefs.ids import EMPTY_CHUNK, BlobId, ChunkKind, GcGeneration, RingEpoch, id_text, kind_of
from lakefs.limits import BATCH_MAX, BLOB_BYTES_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

NO_GENERATION: Final = GcGeneration(0)
NO_EPOCH: Final = RingEpoch(0)


class BindGate:
    """The answers of members that names are bound on.  Holds what its owner has read from the names' log."""

    def __init__(self, joined_generation: GcGeneration = NO_GENERATION, oldest_epoch: RingEpoch = NO_EPOCH) -> None:
        self._joined = joined_generation
        self._oldest_epoch = oldest_epoch

    @property
    def joined_generation(self) -> GcGeneration:
        """The gc generation that the names have joined."""
        return self._joined

    @property
    def oldest_epoch(self) -> RingEpoch:
        """The oldest ring epoch that is not retired."""
        return self._oldest_epoch

    def join(self, generation: GcGeneration) -> None:
        """Accept no answers below `generation` minus one from now on; called in the step that records it."""
        self._joined = max(self._joined, generation)

    def retire_below(self, epoch: RingEpoch) -> None:
        """Accept no answers of ring epochs before this one from now on."""
        self._oldest_epoch = max(self._oldest_epoch, epoch)

    def check(self, answered: m.Answered) -> None:
        """Raise SessionLost unless names are bound on such answers; called in the step in which one is bound."""
        if answered.generation < self._joined - 1:
            raise SessionLost(
                f"the chunks were answered as stored in gc generation {answered.generation}, and names have joined "
                f"{self._joined}; offer the chunks again"
            )
        if answered.epoch < self._oldest_epoch:
            raise SessionLost(
                f"the chunks were answered as stored in ring epoch {answered.epoch}, which is retired; "
                "offer the chunks again"
            )


class BindRequests:
    """Handlers of the requests that bind what a head has stored."""

    def __init__(self, store: NamesStore, gate: BindGate, uploads: UploadRequests) -> None:
        self._store = store
        self._gate = gate
        self._uploads = uploads
        self._decisions = Decisions(store.metadata)

    @handles(m.AcceptedAnswers)
    async def accepted_answers(self) -> Reply:
        return Reply(m.AnswersAccepted(self._gate.joined_generation, self._gate.oldest_epoch))

    @handles(m.BindBlobs)
    async def bind_blobs(self, client: Client, request: m.BindBlobs) -> Reply:
        changes = request.changes
        if len(changes) > BATCH_MAX:
            raise RequestTooLarge(f"{len(changes)} names in one commit; the limit is {BATCH_MAX}")
        if not len(changes) == len(request.sizes) == len(request.chunk_counts):
            raise InvalidArgument("changes, sizes and chunk counts go together")
        figures = zip(changes, request.sizes, request.chunk_counts, strict=True)
        blobs = [_held(change.blob, size, count) for change, size, count in figures]

        def decide(txn: Transaction) -> list[m.NameResult]:
            self._gate.check(request.answered)
            return bind_changes(txn, changes, blobs, self._store.clock.wall_ns())

        names = [(change.bucket, change.key) for change in changes]
        conditions = [change.condition for change in changes]
        results = await self._decisions.change_names(client, names, decide, request, conditions=conditions)
        return Reply(m.NameResults(results))

    @handles(m.BindPart)
    async def bind_part(self, client: Client, request: m.BindPart) -> Reply:
        held = _held(request.put.blob, request.size_bytes, request.chunk_count)
        return Reply(
            await self._uploads.put_held(client, request.put, held, lambda: self._gate.check(request.answered))
        )

    @handles(m.BindUpload)
    async def bind_upload(self, client: Client, request: m.BindUpload) -> Reply:
        over = await self._uploads.over(request.complete)
        if over is not None:
            return over
        if not request.chunk_count:
            raise SessionLost("the upload goes on, and its content is not held; offer the chunks again")
        held = _held(request.complete.blob, request.size_bytes, request.chunk_count)
        return await self._uploads.complete_held(
            client, request.complete, held, lambda: self._gate.check(request.answered)
        )

    @handles(m.BindCopy)
    async def bind_copy(self, client: Client, request: m.BindCopy) -> Reply:
        change = request.change
        is_empty = bool(request.symlink_target or request.special)
        held = None if is_empty else _held(change.blob, request.size_bytes, request.chunk_count)

        def decide(txn: Transaction) -> Resolved:
            self._gate.check(request.answered)
            now_ns = self._store.clock.wall_ns()
            if request.special:
                node = copied_special(request.special, request.device, change.attributes, now_ns)
            elif held is None:
                node = copied_symlink(request.symlink_target, change.attributes, now_ns)
            else:
                node = new_object(held.blob, held.size_bytes, held.chunk_count, change.attributes, now_ns)
            bucket = (
                ensure_bucket(txn, change.bucket, now_ns) if change.create_bucket else find_bucket(txn, change.bucket)
            )
            bound = bind(txn, bucket, change.key, node, change.condition, now_ns)
            if request.special:
                self._store.features.need(ReadOnlyFeature.SPECIAL_NODES)
            return bound

        bound = await self._store.features.deciding(lambda: self._decisions.change(client, decide))
        return one_name(change.bucket, change.key, bound)


def _held(blob: bytes, size_bytes: int, chunk_count: int) -> HeldBlob:
    """Return a blob as a head describes it.  InvalidArgument for what no blob has."""
    (top,) = checked_chunks([blob])
    fits = 0 <= size_bytes <= BLOB_BYTES_MAX and (size_bytes == 0) == (top == EMPTY_CHUNK)
    if not fits or chunk_count < 1 or (chunk_count > 1) != (kind_of(top) is ChunkKind.MANIFEST):
        raise InvalidArgument(f"blob {id_text(top)} cannot have {size_bytes} bytes in {chunk_count} chunks")
    return HeldBlob(BlobId(top), size_bytes, chunk_count)
