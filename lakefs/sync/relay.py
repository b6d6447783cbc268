"""Relay: from the lake of one engine into that of another, chunk by chunk; what the other has is not sent.

Rules kept here:
- An object keeps its id: its chunks are bound under a manifest with the source's cuts.
- Chunks are offered to the target's engine by their ids; only those that it lacks are read from the source.
- Memory: STORE_WINDOW groups of at most STORE_REQUEST_BYTES.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from lakefs.content.manifest import CutKind, ManifestBuilder
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.get.fetch import fetch_pieces
from lakefs.get.objects import close_leases, open_objects
from lakefs.get.opened import Opened, Piece
from lakefs.get.places import BufferSink
from lakefs.ids import BlobId, ChunkId, ChunkKind, kind_of
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import STORE_REQUEST_BYTES, STORE_WINDOW
from lakefs.names import Name
from lakefs.put.upload import Upload, abandon_upload, commit_upload, open_upload, result_of, store_manifests
from lakefs.steps.steps import Pipeline, Steps, Work, send, work
from lakefs.sync.entries import Entry
from lakefs.sync.movers import attributes_of, failed, make_folders
from lakefs.sync.report import Done, SyncObserver, SyncOutcome
from lakefs.sync.sides import BucketSide
from lakefs.wire.messages import Commit, NameChange, NameResults, Offer, Offered, StoreChunks, Stored

OFFER_BATCH: Final = 256
OPEN_BATCH: Final = 64


class Relay:
    """Copies objects of one engine's lake into another's; runs at the target's client."""

    def __init__(
        self, lake: LakeSteps, source: BucketSide, target: BucketSide, observer: SyncObserver, *, create_bucket: bool
    ) -> None:
        self._lake = lake
        self._source = source
        self._target = target.name
        self._observer = observer
        self._create_bucket = create_bucket

    def take(self, entries: Sequence[Entry]) -> Steps[None]:
        files = [entry for entry in entries if not entry.is_folder]
        for start in range(0, len(files), OPEN_BATCH):
            yield from self._take_opened(files[start : start + OPEN_BATCH])
        yield from make_folders(self._target, entries, self._observer, create_bucket=self._create_bucket)

    def finish(self) -> Steps[None]:
        yield from ()

    def _take_opened(self, entries: Sequence[Entry]) -> Steps[None]:
        source = self._source
        names = [Name(source.name.bucket, source.name.key + entry.path) for entry in entries]
        answers = yield from source.asked(open_objects(source.steps.access(None), names, inline_bytes=0))
        try:
            small: list[tuple[Entry, Opened]] = []
            for entry, opened in zip(entries, answers, strict=True):
                if isinstance(opened, LakeError):
                    self._observer.outcome(failed(entry.path, opened))
                elif kind_of(BlobId(opened.stat.blob)) is ChunkKind.MANIFEST:
                    yield from self._large(entry, opened)
                else:
                    small.append((entry, opened))
            yield from self._small(small)
        finally:
            leases = [opened.lease for opened in answers if isinstance(opened, Opened)]
            yield from source.asked(close_leases(leases))

    # --- objects of one chunk ------------------------------------------------------------------------

    def _small(self, small: Sequence[tuple[Entry, Opened]]) -> Steps[None]:
        """Copy objects of one chunk each, in one session."""
        if not small:
            return
        upload = yield from open_upload(self._lake.transfer(None), CutKind.FIXED)
        try:
            fresh = yield from self._store_missing(
                upload, [(opened, piece) for _, opened in small for piece in opened.pieces]
            )
            changes = [self._change(entry, opened, opened.stat.blob) for entry, opened in small]
            reply = yield from send(Commit(upload.session, changes, end_session=True))
        except EngineUnreachable:
            raise
        except LakeError as error:
            yield from abandon_upload(upload)
            for entry, _ in small:
                self._observer.outcome(failed(entry.path, error))
            return
        assert isinstance(reply.message, NameResults)
        for (entry, opened), item in zip(small, reply.message.results, strict=True):
            try:
                result_of(item)
            except LakeError as error:
                self._observer.outcome(failed(entry.path, error))
                continue
            size = opened.stat.size_bytes
            new_bytes = size if opened.stat.blob in fresh else 0
            self._observer.progress(size, size - new_bytes)
            self._copied(entry, size, new_bytes)

    def _store_missing(self, upload: Upload, wanted: Sequence[tuple[Opened, Piece]]) -> Steps[set[bytes]]:
        """Store the chunks that the target lacks; return their ids.  The session holds all."""
        missing: dict[bytes, tuple[Opened, Piece]] = {}
        for start in range(0, len(wanted), OFFER_BATCH):
            batch = wanted[start : start + OFFER_BATCH]
            present = yield from _offered(upload, [piece for _, piece in batch])
            missing |= {bytes(one[1].chunk): one for one, has in zip(batch, present, strict=True) if not has}
        pipeline = Pipeline(STORE_WINDOW)
        for group in _groups(list(missing.values())):
            effect = Work(self._source_run, (group,))
            yield from pipeline.submit(effect, partial(_store, upload, [piece for _, piece in group]))
        yield from pipeline.drain()
        return set(missing)

    def _source_run(self, group: Sequence[tuple[Opened, Piece]]) -> list[memoryview]:
        """Read chunks from the source's engine.  Blocks."""
        runner = self._source.runner
        assert runner is not None
        return runner.run(_read(runner.steps, group))

    # --- objects of many chunks ----------------------------------------------------------------------

    def _large(self, entry: Entry, opened: Opened) -> Steps[None]:
        cut_kind: CutKind = yield from work(_cut_kind_of, opened)
        upload = yield from open_upload(self._lake.transfer(self._observer.progress), cut_kind)
        manifests = Pipeline(STORE_WINDOW)
        try:
            for start in range(0, len(opened.pieces), OFFER_BATCH):
                pieces = opened.pieces[start : start + OFFER_BATCH]
                fresh = yield from self._store_missing(upload, [(opened, piece) for piece in pieces])
                upload.stored(
                    [bytes(piece.chunk) for piece in pieces],
                    [piece.length for piece in pieces],
                    [bytes(piece.chunk) in fresh for piece in pieces],
                )
                yield from store_manifests(upload, manifests)
            yield from manifests.drain()
            result = yield from commit_upload(upload, self._change(entry, opened, b""))
        except EngineUnreachable:
            raise
        except LakeError as error:
            upload.untell()
            yield from abandon_upload(upload)
            self._observer.outcome(failed(entry.path, error))
            return
        self._copied(entry, result.size_bytes, result.new_bytes)

    def _change(self, entry: Entry, opened: Opened, blob: bytes) -> NameChange:
        attributes = attributes_of(opened.stat)
        key = self._target.key + entry.path
        return NameChange(self._target.bucket, key, blob, attributes, create_bucket=self._create_bucket)

    def _copied(self, entry: Entry, size_bytes: int, new_bytes: int) -> None:
        self._observer.outcome(SyncOutcome(entry.path, Done.COPIED, size_bytes=size_bytes, new_bytes=new_bytes))


def _offered(upload: Upload, pieces: Sequence[Piece]) -> Steps[list[bool]]:
    if not pieces:
        return []
    reply = yield from send(Offer(upload.session, [bytes(piece.chunk) for piece in pieces]))
    assert isinstance(reply.message, Offered)
    return reply.message.present


def _store(upload: Upload, pieces: Sequence[Piece], payloads: list[memoryview]) -> Steps[None]:
    kinds = [int(ChunkKind.DATA)] * len(payloads)
    reply = yield from send(StoreChunks(upload.session, kinds, [len(payload) for payload in payloads]), body=payloads)
    assert isinstance(reply.message, Stored)
    assert [bytes(chunk) for chunk in reply.message.chunks] == [bytes(piece.chunk) for piece in pieces], (
        "the same bytes have the same id"
    )


def _read(steps: LakeSteps, group: Sequence[tuple[Opened, Piece]]) -> Steps[list[memoryview]]:
    access = steps.access(None)
    payloads: list[memoryview] = []
    for opened, piece in group:
        payload = memoryview(bytearray(piece.length))
        yield from fetch_pieces(access, opened, [piece], BufferSink(payload, piece.offset))
        payloads.append(payload)
    return payloads


def _groups(wanted: Sequence[tuple[Opened, Piece]]) -> Iterator[list[tuple[Opened, Piece]]]:
    """Yield runs of at most STORE_REQUEST_BYTES and OFFER_BATCH chunks."""
    group: list[tuple[Opened, Piece]] = []
    size = 0
    for one in wanted:
        if group and (size + one[1].length > STORE_REQUEST_BYTES or len(group) == OFFER_BATCH):
            yield group
            group, size = [], 0
        group.append(one)
        size += one[1].length
    if group:
        yield group


def _cut_kind_of(opened: Opened) -> CutKind:
    """Return the kind of cuts with which the object's chunks have its id.  Hashes its manifests."""
    for kind in CutKind:
        builder = ManifestBuilder(kind)
        for piece in opened.pieces:
            builder.add(ChunkId(piece.chunk), piece.length)
        if builder.finish().blob == opened.stat.blob:
            return kind
    return CutKind.FIXED
