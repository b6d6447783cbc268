"""Put of an object that is given piece by piece, while other operations of the client run in between.

    put = PiecewisePut(transfer)
    yield from put.store(piece)        # any number, each a whole number of chunks but for the last
    yield from put.commit(change)      # or put.abandon()

Nothing is visible until the commit, which binds the name to all pieces at once.  What is stored belongs to a session of
the connection: if that is lost, SessionLost is raised, and the put cannot be continued.
"""

from __future__ import annotations

from collections.abc import Iterator

from lakefs.content.manifest import CutKind
from lakefs.errors import InternalError
from lakefs.ids import ChunkId
from lakefs.limits import CHUNK_BYTES, STORE_REQUEST_BYTES, STORE_WINDOW
from lakefs.put.upload import (
    PutResult,
    Transfer,
    Upload,
    abandon_upload,
    commit_upload,
    offer_payloads,
    open_upload,
    store_manifests,
    store_payloads,
)
from lakefs.steps.steps import Pipeline, Steps
from lakefs.wire.messages import NameChange


class PiecewisePut:
    """One put in progress: its session, which begins with the first piece, and what it has stored."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._upload: Upload | None = None

    def _begun(self) -> Steps[Upload]:
        if self._upload is None:
            self._upload = yield from open_upload(self._transfer, CutKind.FIXED)
        return self._upload

    def store(self, piece: memoryview) -> Steps[None]:
        """Store bytes, cut every 4 MiB; on return they may be overwritten.  StoreFull, SessionLost."""
        upload = yield from self._begun()
        pipeline = Pipeline(STORE_WINDOW)
        for payloads in _requests(piece):
            if self._transfer.network:
                yield from pipeline.submit(*offer_payloads(upload, payloads, pipeline))
            else:
                yield from pipeline.submit(*store_payloads(upload, payloads))
            yield from store_manifests(upload, pipeline)
        yield from pipeline.drain()

    def take_over(self, chunks: list[tuple[ChunkId, int]]) -> Steps[None]:
        """Add chunks (id, length) of an object that is leased until the commit; no byte is copied."""
        upload = yield from self._begun()
        pipeline = Pipeline(STORE_WINDOW)
        for chunk, length in chunks:
            upload.stored([chunk], [length], [False])
            yield from store_manifests(upload, pipeline)
        yield from pipeline.drain()

    def commit(self, change: NameChange) -> Steps[PutResult]:
        """Bind the name to all pieces, and end the session.  Durable on return.  SessionLost, errors about names."""
        if self._upload is None:
            raise InternalError("a put of no piece has nothing to commit")
        result = yield from commit_upload(self._upload, change)
        self._upload = None
        return result

    def abandon(self) -> Steps[None]:
        """Drop what was stored; does nothing after a commit."""
        upload, self._upload = self._upload, None
        if upload is not None:
            yield from abandon_upload(upload)


def _requests(piece: memoryview) -> Iterator[list[memoryview]]:
    for start in range(0, len(piece), STORE_REQUEST_BYTES):
        request = piece[start : start + STORE_REQUEST_BYTES]
        yield [request[cut : cut + CHUNK_BYTES] for cut in range(0, len(request), CHUNK_BYTES)]
