"""Commit of a staged file: written bytes are sent to the store, the other chunks stay in place.

    plan       which chunks of the stored content are kept, and which parts are cut anew (pure)
    hold       the session holds the kept chunks; none of their bytes move
    store      the rest: by the staging file's descriptor where it has all bytes of a cut, else assembled and sent
    commit     one atomic change of the name

Rules kept here:
- A kept chunk has no byte that was written, hidden by a truncation, or behind the end.
- Edited chunks keep their borders, so an edit stores only the chunks it touches.  A grown end is cut anew, with the
  smaller chunks before it that are less than twice as long as it.  So of chunks under 4 MiB at the end each is at least
  twice as long as the next: n small appends leave at most n bytes / 4 MiB + 23 chunks, and store each byte O(log n)
  times.
- Without a byte of stored content the result is that of a put of a plain file: the same cuts, the same blob.
- The staging file is only read.  Content that changes during the store is not committed: the store starts again.
- Memory: `STORE_WINDOW` chunks of 4 MiB that were assembled here, 24 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fuse.staging.byte_ranges import RangeSet
from fuse.staging.folder import Kind, StagedFile
from fuse.staging.write_behind import StagedSource, WriteBehind
from lakefs.content.chunking import fixed_cuts, iter_extents, plan_file
from lakefs.content.manifest import CutKind
from lakefs.errors import EngineUnreachable, InvalidArgument, SessionLost, SourceChanged
from lakefs.get.objects import read_range
from lakefs.get.opened import Opened, Piece
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import BATCH_MAX, CHUNK_BYTES, SMALL_PAYLOAD_BYTES, STORE_REQUEST_CHUNKS, STORE_WINDOW
from lakefs.names import Name
from lakefs.put.upload import (
    ATTEMPTS,
    Upload,
    abandon_upload,
    finish_manifests,
    note_stored,
    offer_payloads,
    only_result,
    open_upload,
    store_manifests,
    store_payloads,
)
from lakefs.steps.steps import Completion, Effect, Pipeline, Send, Steps, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    Commit,
    Condition,
    FolderChange,
    NameChange,
    NameResults,
    ObjectAttributes,
    ObjectStat,
    Offer,
    Offered,
    PutObjects,
    SourceClose,
    StoreFromSource,
)


@dataclass(frozen=True, slots=True)
class Store:
    """A chunk to be stored: 1 byte to 4 MiB of the content."""

    offset: int
    length: int


Cut = Piece | Store
"""A chunk that is in the store already, or one to be stored."""


def plan_cuts(pieces: Sequence[Piece], written: RangeSet, base_bytes: int, size: int) -> list[Cut]:
    """Return the chunks, in order, of a content of `size` bytes that was written over the content of `pieces`.

    Bytes in `written` are new; others are those of the pieces below `base_bytes`, and zeros from there on.
    """
    cuts: list[Cut] = []
    for piece in pieces:
        end = piece.offset + piece.length
        if end > min(base_bytes, size):
            break
        touched = written.overlaps(piece.offset, end)
        cuts.append(Store(piece.offset, piece.length) if touched else piece)
    begin = _end_of(cuts)
    if begin < size:
        while cuts and _is_cut_with_tail(cuts[-1], size - begin):
            begin = cuts.pop().offset
        cuts += (Store(begin + offset, length) for offset, length in iter_extents(fixed_cuts(size - begin)))
    if size <= SMALL_PAYLOAD_BYTES and any(isinstance(cut, Store) for cut in cuts):
        return [Store(0, size)]
    return cuts


def _end_of(cuts: Sequence[Cut]) -> int:
    return cuts[-1].offset + cuts[-1].length if cuts else 0


def _is_cut_with_tail(cut: Cut, tail_bytes: int) -> bool:
    """Return True if a chunk is cut anew with the tail behind it: it must be stored anyway, or is short beside it."""
    return cut.length < CHUNK_BYTES and (isinstance(cut, Store) or cut.length < 2 * tail_bytes)


class Stored(NamedTuple):
    """The new record of the name; its content, if that is small and in memory; and of a new name, its folder."""

    stat: ObjectStat
    content: memoryview | None = None
    folder: FolderChange | None = None
    epoch: int = 0
    """The connection of the answer about the folder."""


def store_staged(
    lake: LakeSteps,
    staged: StagedFile,
    base: Opened | None,
    name: Name,
    attributes: ObjectAttributes,
    *,
    keep_node: int,
    condition: Condition,
    durable: bool,
    behind: WriteBehind | None = None,
    named_ns: int = 0,
    keep_attributes: bool = False,
) -> Steps[Stored]:
    """Store the content of a staged file under its name; `base` is the stored content that it was written over.

    `behind` knows the chunks that were stored while the file was written.  `keep_attributes`: those of the kept node
    stay, whatever `attributes` says, but for the times.

    The name changes at once or not at all; on return the change is durable, or with `durable` false visible to all.
    The caller then calls `staged.mark_stored`, when it reads from the new content.

    PreconditionFailed, StoreFull, SessionLost (after ATTEMPTS), SourceChanged (the file keeps changing),
    LocalFileError, errors of reading the base and of changing the name: then the staged file is unchanged.
    """
    assert base is not None or not staged.base_bytes, "bytes of a base that is not there"
    change = NameChange(name.bucket, name.key, b"", attributes, condition, False, keep_node, named_ns, keep_attributes)
    put = _StagedPut(lake, staged, base, change, durable, behind)
    for attempt in range(ATTEMPTS):
        try:
            return (yield from put.run())
        except (SessionLost, SourceChanged):
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the loop returns or raises")


class _StagedPut:
    """The commit of one staged file."""

    def __init__(
        self,
        lake: LakeSteps,
        staged: StagedFile,
        base: Opened | None,
        change: NameChange,
        durable: bool,
        behind: WriteBehind | None,
    ) -> None:
        self._lake = lake
        self._staged = staged
        self._base = base
        self._change = change
        self._durable = durable
        self._behind = behind
        self._revision = 0
        self._source = StagedSource(lake, staged)

    def run(self) -> Steps[Stored]:
        """Make one attempt."""
        self._revision = self._staged.begin_storing()
        self._source.id = None  # that of an attempt before is lost with its connection
        cuts, cut_kind = yield from self._plan()
        if not cuts or (len(cuts) == 1 and isinstance(cuts[0], Store)):
            return (yield from self._put_object())
        upload = yield from open_upload(self._lake.transfer(None), cut_kind)
        try:
            if self._is_the_base(cuts):
                return (yield from self._commit(upload, self._base_blob()))
            held = yield from self._hold(upload, cuts)
            yield from self._store(upload, held)
            self._verify_unchanged()
            return (yield from self._commit(upload, (yield from finish_manifests(upload)).blob))
        except EngineUnreachable:
            raise  # the engine was waited for already, and the session ends by itself
        except BaseException:
            yield from abandon_upload(upload)
            raise

    def _verify_unchanged(self) -> None:
        if self._staged.revision != self._revision:
            raise SourceChanged(
                f"{self._staged.name} was written to while it was stored; nothing was changed",
                subject=self._staged.name,
            )

    # --- planning ------------------------------------------------------------------------------------

    def _plan(self) -> Steps[tuple[list[Cut], CutKind]]:
        staged = self._staged
        if self._base is None or not staged.base_bytes:
            is_small = staged.size <= SMALL_PAYLOAD_BYTES
            plan = (
                plan_file(staged.read, staged.size)
                if is_small
                else (yield from work(plan_file, staged.read, staged.size))
            )
            return [self._cut(offset, length) for offset, length in iter_extents(plan.lengths())], plan.cut_kind
        cuts = plan_cuts(self._base.pieces, staged.written(), staged.base_bytes, staged.size)
        is_fixed = all(cut.length == CHUNK_BYTES for cut in cuts[:-1])
        return cuts, CutKind.FIXED if is_fixed else CutKind.PARTS

    def _cut(self, offset: int, length: int) -> Cut:
        chunk = None if self._behind is None else self._behind.chunk(offset, length)
        return Store(offset, length) if chunk is None else Piece(chunk, offset, length)

    def _is_the_base(self, cuts: Sequence[Cut]) -> bool:
        return (
            self._base is not None
            and len(cuts) == len(self._base.pieces)
            and all(isinstance(cut, Piece) for cut in cuts)
        )

    # --- small and unchanged -------------------------------------------------------------------------

    def _put_object(self) -> Steps[Stored]:
        payload = yield from self._assembled(0, self._staged.size)
        self._verify_unchanged()
        request = PutObjects([len(payload)], [self._change], durable=self._durable, folders=self._is_new)
        reply = yield from send(request, body=[payload])
        return self._stored(reply, payload if len(payload) <= SMALL_PAYLOAD_BYTES else None)

    def _base_blob(self) -> bytes:
        """The present content, to be committed with other attributes: the engine holds all of it by its top chunk."""
        assert self._base is not None
        return self._base.stat.blob

    def _commit(self, upload: Upload, blob: bytes) -> Steps[Stored]:
        change = msgspec.structs.replace(self._change, blob=blob)
        request = Commit(upload.session, [change], end_session=True, durable=self._durable, folders=self._is_new)
        return self._stored((yield from send(request)))

    @property
    def _is_new(self) -> bool:
        return self._change.condition.absent

    @staticmethod
    def _stored(reply: Reply, content: memoryview | None = None) -> Stored:
        stat = only_result(reply)
        assert isinstance(reply.message, NameResults)
        return Stored(stat, content, reply.message.results[0].folder, reply.epoch)

    # --- chunks --------------------------------------------------------------------------------------

    def _hold(self, upload: Upload, cuts: list[Cut]) -> Steps[list[Cut]]:
        """Have the session hold the kept chunks, and chunks of zeros for holes, which become chunks to keep.

        A chunk that the store no longer has is stored again.
        """
        zeros = yield from self._zeros(cuts)
        cuts = [self._without_hole(cut, zeros) for cut in cuts]
        wanted = list(dict.fromkeys(cut.chunk for cut in cuts if isinstance(cut, Piece)))
        lacking: set[ChunkId] = set()
        for start in range(0, len(wanted), BATCH_MAX):
            batch = wanted[start : start + BATCH_MAX]
            reply = yield from send(Offer(upload.session, [bytes(chunk) for chunk in batch]))
            assert isinstance(reply.message, Offered)
            there = reply.message.present
            lacking.update(chunk for chunk, is_there in zip(batch, there, strict=True) if not is_there)
        for length, chunk in zeros.items():
            if chunk in lacking:
                request, _ = store_payloads(upload, [memoryview(bytes(length))])
                yield from send(request.request, body=request.body)
                lacking.discard(chunk)
        return [
            Store(cut.offset, cut.length) if isinstance(cut, Piece) and cut.chunk in lacking else cut for cut in cuts
        ]

    def _zeros(self, cuts: Iterable[Cut]) -> Steps[dict[int, ChunkId]]:
        """Return the chunks of zeros for whole cuts in holes, by length: few lengths, however long the hole."""
        lengths = {cut.length for cut in cuts if isinstance(cut, Store) and self._is_all(Kind.HOLE, cut)}
        zeros: dict[int, ChunkId] = {}
        for length in sorted(lengths):
            zeros[length] = yield from work(_zeros_id, length)
        return zeros

    def _without_hole(self, cut: Cut, zeros: dict[int, ChunkId]) -> Cut:
        if isinstance(cut, Store) and cut.length in zeros and self._is_all(Kind.HOLE, cut):
            return Piece(zeros[cut.length], cut.offset, cut.length)
        return cut

    def _is_all(self, kind: Kind, cut: Cut) -> bool:
        return self._staged.is_all(kind, cut.offset, cut.length)

    def _store(self, upload: Upload, cuts: list[Cut]) -> Steps[None]:
        """Store the chunks that are not kept; all chunks are noted in order."""
        pipeline = Pipeline(STORE_WINDOW)
        try:
            for kept, stores in _batches(cuts, self._is_sent):
                if stores:
                    effect, done = yield from self._effect(upload, stores, pipeline)
                    yield from pipeline.submit(effect, _after(upload, kept, done), self._failed)
                else:
                    yield from pipeline.drain()
                    _note_kept(upload, kept)
                yield from store_manifests(upload, pipeline)
            yield from pipeline.drain()
        except EngineUnreachable:
            raise  # the source ends with the connection
        except BaseException:
            yield from self._source.forget()
            raise
        if self._source.id is not None:
            yield from send(SourceClose(self._source.id))

    def _is_sent(self, store: Store) -> bool:
        """Return True if the engine cannot read the bytes from the staging file."""
        return not (self._source.can_be_sent and self._is_all(Kind.STAGED, store))

    def _effect(self, upload: Upload, stores: list[Store], pipeline: Pipeline) -> Steps[tuple[Effect, Completion]]:
        source = None if self._is_sent(stores[0]) else (yield from self._source.opened())
        if source is not None:
            offsets, lengths = [store.offset for store in stores], [store.length for store in stores]
            request = StoreFromSource(upload.session, source, offsets, lengths)
            return Send(request), note_stored(upload, lengths)
        payloads: list[memoryview] = []
        for store in stores:
            payload = yield from self._assembled(store.offset, store.length)
            payloads.append(payload)
        if self._lake.network:
            return offer_payloads(upload, payloads, pipeline)
        return store_payloads(upload, payloads)

    def _failed(self, error: Exception) -> None:
        """Raise the error; a source that the engine does not know belonged to a lost connection: SessionLost."""
        if isinstance(error, InvalidArgument) and self._source.id is not None:
            raise SessionLost(error.message, subject=self._staged.name) from error
        raise error

    def _assembled(self, offset: int, length: int) -> Steps[memoryview]:
        """Return bytes of the content, assembled from spans of any kind."""
        content = memoryview(bytearray(length))
        of_base = [span for span in self._staged.spans(offset, length) if span.kind is Kind.BASE]
        if of_base:
            assert self._base is not None
            begin, end = of_base[0].offset, of_base[-1].offset + of_base[-1].length
            found = yield from read_range(self._lake.access(None), self._base, begin, end - begin)
            content[begin - offset : end - offset] = found
        if length > SMALL_PAYLOAD_BYTES:
            yield from work(self._staged.overlay, offset, content)
        elif length:
            self._staged.overlay(offset, content)  # faster than a thread
        return content


def _zeros_id(length: int) -> ChunkId:
    return data_chunk_id(bytes(length))


def _batches(cuts: Iterable[Cut], is_sent: Callable[[Store], bool]) -> Iterator[tuple[list[Piece], list[Store]]]:
    """Yield kept chunks, and those behind them for one request: one that is sent, or some that the engine reads."""
    kept: list[Piece] = []
    stores: list[Store] = []
    for cut in cuts:
        if stores and (isinstance(cut, Piece) or len(stores) == STORE_REQUEST_CHUNKS or is_sent(cut)):
            yield kept, stores
            kept, stores = [], []
        if isinstance(cut, Piece):
            kept.append(cut)
            continue
        stores.append(cut)
        if is_sent(cut):
            yield kept, stores
            kept, stores = [], []
    if kept or stores:
        yield kept, stores


def _note_kept(upload: Upload, kept: Sequence[Piece]) -> None:
    upload.stored([bytes(keep.chunk) for keep in kept], [keep.length for keep in kept], [False] * len(kept))


def _after(upload: Upload, kept: Sequence[Piece], done: Completion) -> Completion:
    """Note the kept chunks before the stored ones behind them."""

    def completed(result: Reply) -> Steps[None] | None:
        _note_kept(upload, kept)
        return done(result)

    return completed
