"""An upload: one put in progress, from its session to the name, and the requests that it consists of.

The caller decides where to cut and which chunks to send: `lakefs.put.objects` does so for whole objects.

Rules kept here:
- Chunks are noted in the blob's order, which is the pipeline's order.
- Manifests are sent as they become full: an upload holds one open manifest per level.
- The opener of an upload commits or abandons it; an upload whose connection or session is lost ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from lakefs.content.manifest import CutKind, ManifestBuilder, ManifestTree
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, ChunkKind, SessionId, data_chunk_id
from lakefs.limits import STORE_WINDOW
from lakefs.put.remote import store_remotely
from lakefs.put.shared_memory import LentMemories
from lakefs.steps.steps import Pipeline, Send, Steps, Work, send
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    Commit,
    NameChange,
    NameResult,
    NameResults,
    ObjectStat,
    Offer,
    Offered,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    SourceClose,
    StoreChunks,
    Stored,
)
from lakefs.wire.offers import Offers

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric

ATTEMPTS = 3
"""Most times that a put begins before SessionLost is raised to the caller."""


@dataclass(frozen=True)
class Transfer:
    """Settings of a client's puts: the abilities of its connection, and its progress callback.

    `lent`: memories lent to the engine; None: no memory is lent.  `progress(bytes_done, bytes_already_there)` is
    called with increments, from the driver's own thread; negative ones when a put begins again.
    """

    offers: Offers
    network: bool = False
    lent: LentMemories | None = None
    progress: Callable[[int, int], None] | None = None
    fabric: ClientFabric | None = None
    """The client's RDMA, over a network; None: payloads are sent in bodies."""


@dataclass(frozen=True)
class PutResult:
    """Result of a put.  `new_bytes`: payload that the store did not have before."""

    stat: ObjectStat
    size_bytes: int
    new_bytes: int


@dataclass
class Upload:
    """One put in progress."""

    transfer: Transfer
    session: SessionId
    builder: ManifestBuilder
    new_bytes: int = 0
    manifests: list[tuple[ChunkId, bytes]] = field(default_factory=list)
    told_done: int = 0
    told_there: int = 0

    def stored(self, ids: list[bytes], lengths: list[int], fresh: list[bool]) -> None:
        """Note data chunks, in order."""
        for identifier, length, is_fresh in zip(ids, lengths, fresh, strict=True):
            self.manifests.extend(self.builder.add(ChunkId(identifier), length))
            self.new_bytes += length if is_fresh else 0
            self._tell(length, 0 if is_fresh else length)

    def untell(self) -> None:
        """Subtract this upload's bytes from the reported progress: the put begins again."""
        self._tell(-self.told_done, -self.told_there)

    def _tell(self, done: int, there: int) -> None:
        self.told_done += done
        self.told_there += there
        if self.transfer.progress is not None:
            self.transfer.progress(done, there)


def result_of(item: NameResult) -> ObjectStat:
    """Return the stat of a batch's item, or raise its error."""
    if item.failure is not None:
        raise item.failure.as_error()
    assert item.stat is not None
    return item.stat


def only_result(reply: Reply) -> ObjectStat:
    """Return the stat of a batch of one item, or raise its error."""
    return result_of(only_item(reply))


def only_item(reply: Reply) -> NameResult:
    """Return the result of a batch of one item."""
    assert isinstance(reply.message, NameResults)
    (item,) = reply.message.results
    return item


def open_upload(transfer: Transfer, cut_kind: CutKind) -> Steps[Upload]:
    """Begin an upload: open a put session."""
    reply = yield from send(SessionOpen())
    assert isinstance(reply.message, SessionOpened)
    return Upload(transfer, SessionId(reply.message.session), ManifestBuilder(cut_kind))


def abandon_upload(upload: Upload) -> Steps[None]:
    """End the session after a failure; when the engine is gone the session ends by itself."""
    yield from forget(SessionEnd(upload.session))


def forget(request: SessionEnd | SourceClose) -> Steps[None]:
    """Send a request that cleans up after a failure.  Its own errors are dropped; the caller raises the failure."""
    try:
        yield from send(request)
    except LakeError:
        return


def note_stored(upload: Upload, lengths: list[int]) -> Callable[[Reply], None]:
    """Return a function that notes the answer to a request that stores chunks of these lengths."""

    def done(reply: Reply) -> None:
        assert isinstance(reply.message, Stored)
        upload.stored(reply.message.chunks, lengths, reply.message.fresh)

    return done


def store_payloads(upload: Upload, payloads: list[memoryview]) -> tuple[Send, Callable[[Reply], None]]:
    """Return a request with the chunks in its body, and the function that notes its answer."""
    lengths = [len(payload) for payload in payloads]
    kinds = [int(ChunkKind.DATA)] * len(payloads)
    request = StoreChunks(upload.session, kinds, lengths)
    return Send(request, body=payloads), note_stored(upload, lengths)


def offer_payloads(
    upload: Upload, payloads: list[memoryview], pipeline: Pipeline
) -> tuple[Work, Callable[[list[ChunkId]], Steps[None]]]:
    """Hash chunks in a thread, offer their ids, send only the chunks that the engine lacks.

    The answers are taken in the pipeline's order, so chunks are noted in the blob's order.
    """

    def hashed(ids: list[ChunkId]) -> Steps[None]:
        reply = yield from send(Offer(upload.session, [bytes(identifier) for identifier in ids]))
        assert isinstance(reply.message, Offered)
        present = reply.message.present
        missing = [payload for payload, has in zip(payloads, present, strict=True) if not has]
        if missing:
            stored = yield from store_remotely(upload.transfer.fabric, upload.session, missing)
            if stored is None:
                effect, _ = store_payloads(upload, missing)
                stored = yield from send(effect.request, body=effect.body)
            assert isinstance(stored.message, Stored)
        upload.stored(
            [bytes(identifier) for identifier in ids],
            [len(payload) for payload in payloads],
            [not has for has in present],
        )

    return Work(_hash_all, (payloads,)), hashed


def _hash_all(payloads: list[memoryview]) -> list[ChunkId]:
    return [data_chunk_id(payload) for payload in payloads]


def store_manifests(upload: Upload, pipeline: Pipeline) -> Steps[None]:
    """Send the manifests that became full, so that a huge put holds only one open manifest per level."""
    while upload.manifests:
        _, payload = upload.manifests.pop(0)
        request = StoreChunks(upload.session, [int(ChunkKind.MANIFEST)], [len(payload)])
        yield from pipeline.submit(Send(request, body=[payload]), lambda reply: None)


def finish_manifests(upload: Upload) -> Steps[ManifestTree]:
    """Close the manifests over the stored chunks and send them; return the tree, which has the blob's id."""
    tree = upload.builder.finish()
    upload.manifests.extend(tree.manifests)
    pipeline = Pipeline(STORE_WINDOW)
    yield from store_manifests(upload, pipeline)
    yield from pipeline.drain()
    return tree


def commit_upload(upload: Upload, change: NameChange, *, durable: bool = True) -> Steps[PutResult]:
    """Bind the name to the stored blob, and end the session.  SessionLost, and errors about names."""
    tree = yield from finish_manifests(upload)
    bound = msgspec.structs.replace(change, blob=tree.blob)
    reply = yield from send(Commit(upload.session, [bound], end_session=True, durable=durable))
    return PutResult(only_result(reply), tree.size_bytes, upload.new_bytes)
