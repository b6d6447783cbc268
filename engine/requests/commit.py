"""Binds names to blobs that a session holds.

A name is bound only to a blob whose every chunk is stored and held by the session.  A `BlobHolder` sees to that: an
engine's looks at its chunks (`engine.chunks.manifests.HeldBlobs`); a process that keeps names and no content has
another one.
"""

from __future__ import annotations

from typing import Protocol

from engine.chunks.manifests import HeldBlob, checked_chunks
from engine.requests.answers import Decisions
from engine.requests.changes import bind_changes
from engine.requests.handlers import handles
from engine.sessions.references import Client, Session
from engine.store.names_store import NamesStore
from engine.tables.views import Transaction
from lakefs.errors import ChunkNotFound, LakeError, RequestTooLarge, SessionLost, UnsupportedVersion, UserError
from lakefs.ids import EMPTY_BLOB, EMPTY_CHUNK, ChunkId, SessionId
from lakefs.limits import BATCH_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class BlobHolder(Protocol):
    """Looks at the content of blobs that clients bind names to."""

    async def hold(self, session: Session, blob: bytes) -> HeldBlob:
        """Keep all chunks of a blob for the session; returns its size and chunk count.

        ChunkNotFound, InvalidArgument.
        """
        ...

    async def layout(self, top: ChunkId, chunks_max: int) -> tuple[list[ChunkId], list[int]] | None:
        """Return data chunks and lengths of a manifest's blob in order; None when they are more than `chunks_max`."""
        ...


class EmptyBlobs:
    """The holder of a process that sees no content: it knows the empty blob, and refuses others."""

    async def hold(self, session: Session, blob: bytes) -> HeldBlob:
        """See `BlobHolder.hold`.  UnsupportedVersion."""
        (top,) = checked_chunks([blob])
        if top == EMPTY_CHUNK:
            return HeldBlob(EMPTY_BLOB, 0, 1)
        raise UnsupportedVersion("names are kept here without content, which would have to be looked at to bind it")

    async def layout(self, top: ChunkId, chunks_max: int) -> tuple[list[ChunkId], list[int]] | None:
        """See `BlobHolder.layout`.  UnsupportedVersion."""
        raise UnsupportedVersion("names are kept here without content, and so without layouts")


class CommitRequests:
    """Handler of Commit."""

    def __init__(self, store: NamesStore, blobs: BlobHolder) -> None:
        self._store = store
        self._references = store.references
        self._blobs = blobs
        self._decisions = Decisions(store.metadata)

    @handles(m.Commit)
    async def commit(self, client: Client, request: m.Commit) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        if len(request.changes) > BATCH_MAX:
            raise RequestTooLarge(f"{len(request.changes)} names in one commit; the limit is {BATCH_MAX}")
        blobs: list[HeldBlob | LakeError] = []
        for change in request.changes:
            try:
                blobs.append(await self._blobs.hold(session, change.blob))
            except (UserError, ChunkNotFound) as error:
                blobs.append(error)

        def decide(txn: Transaction) -> list[m.NameResult]:
            if not self._references.is_open(session):
                raise SessionLost("the put session ended before its commit; offer the chunks again")
            return bind_changes(txn, request.changes, blobs, self._store.clock.wall_ns())

        names = [(change.bucket, change.key) for change in request.changes]
        conditions = [change.condition for change in request.changes]
        results = await self._decisions.change_names(client, names, decide, request, conditions=conditions)
        if request.end_session and all(result.failure is None for result in results):
            self._references.end_session(session.identifier)
        return Reply(m.NameResults(results))
