"""Requests about multipart uploads: begin, parts, lists, complete, abort.

The client's session holds a part's chunks until the step in which the part is recorded; the record refers to them from
that step on.  So gc finds them in one of the two at every moment.  The same holds for the completed object.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.format.features import ReadOnlyFeature
from engine.format.records import PartRecord, UploadRecord
from engine.namespace.buckets import find_bucket
from engine.namespace.tree import Resolved
from engine.requests.answers import Decisions
from engine.requests.commit import BlobHolder
from engine.requests.handlers import handles
from engine.requests.names import one_name
from engine.sessions.references import Client, Session
from engine.store.names_store import NamesStore
from engine.tables.views import Transaction, View
from engine.uploads.keys import new_upload_id
from engine.uploads.lifecycle import (
    UploadRef,
    abort_upload,
    complete_upload,
    completed_before,
    create_upload,
    find_upload,
    parts_of,
    put_part,
    require_upload,
    to_part_stat,
    to_upload_stat,
    upload_not_found,
)
from engine.uploads.listing import list_uploads
from engine.uploads.object_parts import find_parts
from lakefs.errors import ChunkNotFound, InvalidArgument, SessionLost
from lakefs.ids import EMPTY_CHUNK, ChunkId, ChunkKind, SessionId, kind_of
from lakefs.limits import LIST_PAGE_MAX, PART_CHUNKS_MAX, PART_NUMBER_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

_LOOKS_FOR_LAYOUT = 3
_Named = m.UploadPut | m.UploadParts | m.UploadComplete | m.UploadAbort


class UploadRequests:
    """Handlers of the requests about uploads."""

    def __init__(self, store: NamesStore, blobs: BlobHolder, part_bytes_min: int) -> None:
        """`part_bytes_min`: least bytes of a part that is not the last one."""
        self._store = store
        self._references = store.references
        self._blobs = blobs
        self._part_bytes_min = part_bytes_min
        self._decisions = Decisions(store.metadata)

    @handles(m.UploadCreate)
    async def create(self, client: Client, request: m.UploadCreate) -> Reply:
        await self._store.features.begin_to_use(ReadOnlyFeature.UPLOADS)

        def decide(txn: Transaction) -> m.UploadStat:
            now_ns = self._store.clock.wall_ns()
            ref = UploadRef(find_bucket(txn, request.bucket), request.key, new_upload_id(now_ns))
            return create_upload(txn, ref, request.attributes, request.details, now_ns)

        return Reply(await self._decisions.change(client, decide))

    @handles(m.UploadPut)
    async def put(self, client: Client, request: m.UploadPut) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        held = await self._blobs.hold(session, request.blob)

        def decide(txn: Transaction) -> m.PartStat:
            self._check_open(session)
            now_ns = self._store.clock.wall_ns()
            return put_part(txn, _ref(txn, request), request.number, held, request.etag, request.checksums, now_ns)

        stat = await self._decisions.change(client, decide)
        if request.end_session:
            self._references.end_session(session.identifier)
        return Reply(stat)

    @handles(m.UploadList)
    async def list_(self, request: m.UploadList) -> Reply:
        def look(view: View) -> m.Uploads:
            return list_uploads(view, find_bucket(view, request.bucket), request)

        return Reply(await self._decisions.look(look))

    @handles(m.UploadParts)
    async def parts(self, request: m.UploadParts) -> Reply:
        limit = _page_limit(request)

        def look(view: View) -> tuple[UploadRef, UploadRecord, list[tuple[int, PartRecord]]]:
            ref = _ref(view, request)
            return ref, require_upload(view, ref)[1], parts_of(view, ref.upload, request.after, limit + 1)

        for looks_left in reversed(range(_LOOKS_FOR_LAYOUT)):
            ref, record, found = await self._decisions.look(look)
            parts = [to_part_stat(number, part) for number, part in found[:limit]]
            try:
                page = await self._with_layouts(parts) if request.layouts else parts
            except ChunkNotFound:
                if not looks_left:
                    raise
                continue  # replaced, or the upload ended, and gc ran: look again
            next_after = page[-1].number if len(page) < len(found) else 0
            return Reply(m.Parts(to_upload_stat(ref, record), page, next_after))
        raise AssertionError("unreachable")

    @handles(m.UploadComplete)
    async def complete(self, client: Client, request: m.UploadComplete) -> Reply:
        if len(request.numbers) != len(request.etags) or len(request.numbers) > PART_NUMBER_MAX:
            raise InvalidArgument(
                f"{len(request.numbers)} part numbers and {len(request.etags)} ETags; they go in pairs, "
                f"at most {PART_NUMBER_MAX}"
            )
        listed = list(zip(request.numbers, request.etags, strict=True))

        def look(view: View) -> Resolved | None:
            return self._over(view, _ref(view, request), listed)

        over = await self._decisions.look(look)
        if over is not None:
            return one_name(request.bucket, request.key, over)
        session = self._references.join_session(client, SessionId(request.session))
        try:
            held = await self._blobs.hold(session, request.blob)
        except ChunkNotFound:
            over = await self._decisions.look(look)  # aborted or completed since, and gc ran
            if over is None:
                raise
            return one_name(request.bucket, request.key, over)

        def decide(txn: Transaction) -> Resolved:
            self._check_open(session)
            ref = _ref(txn, request)
            return self._over(txn, ref, listed) or complete_upload(
                txn,
                ref,
                listed,
                held,
                request.checksums,
                request.condition,
                self._part_bytes_min,
                self._store.clock.wall_ns(),
            )

        bound = await self._decisions.change(client, decide)
        if request.end_session:
            self._references.end_session(session.identifier)
        return one_name(request.bucket, request.key, bound)

    @handles(m.UploadAbort)
    async def abort(self, client: Client, request: m.UploadAbort) -> Reply:
        await self._decisions.change(client, lambda txn: abort_upload(txn, _ref(txn, request)), grows=False)
        return Reply(m.Done())

    @handles(m.UploadedParts)
    async def of_object(self, request: m.UploadedParts) -> Reply:
        limit = _page_limit(request)
        return Reply(await self._decisions.look(lambda view: find_parts(view, request.upload, request.after, limit)))

    # --- below -------------------------------------------------------------------------------------

    @staticmethod
    def _over(view: View, ref: UploadRef, listed: Sequence[tuple[int, bytes]]) -> Resolved | None:
        """Return the object that an ended upload was completed to; None if it has not ended.  UploadNotFound."""
        if find_upload(view, ref) is not None:
            return None
        before = completed_before(view, ref, listed)
        if before is None:
            raise upload_not_found(ref)
        return before

    def _check_open(self, session: Session) -> None:
        if not self._references.is_open(session):
            raise SessionLost("the put session ended before its commit; offer the chunks again")

    async def _with_layouts(self, parts: Sequence[m.PartStat]) -> list[m.PartStat]:
        """Return the first parts with their layouts: at least one part, then at most PART_CHUNKS_MAX chunks in all."""
        page: list[m.PartStat] = []
        chunk_count = 0
        for part in parts:
            chunks, lengths = await self._layout(part)
            chunk_count += len(chunks)
            if page and chunk_count > PART_CHUNKS_MAX:
                break
            page.append(msgspec.structs.replace(part, chunks=list(chunks), lengths=lengths))
        return page

    async def _layout(self, part: m.PartStat) -> tuple[list[ChunkId], list[int]]:
        top = ChunkId(part.blob)
        if top == EMPTY_CHUNK:
            return [], []
        if kind_of(top) is ChunkKind.DATA:
            return [top], [part.size_bytes]
        layout = await self._blobs.layout(top, PART_CHUNKS_MAX)
        assert layout is not None, "a part's chunks were counted when it was recorded"
        return layout


def _page_limit(request: m.UploadParts | m.UploadedParts) -> int:
    """Return the most parts of the page that the request asks for.  InvalidArgument when it asks for no page."""
    if request.limit < 1 or not 0 <= request.after <= PART_NUMBER_MAX:
        raise InvalidArgument(
            f"a page of {request.limit} parts behind {request.after}; "
            f"ask for 1 to {LIST_PAGE_MAX} behind 0 to {PART_NUMBER_MAX}"
        )
    return min(request.limit, LIST_PAGE_MAX)


def _ref(view: View, request: _Named) -> UploadRef:
    """Return the upload that a request names.  BucketNotFound."""
    return UploadRef(find_bucket(view, request.bucket), request.key, request.upload)
