"""Requests about multipart uploads: begin, parts, lists, complete, abort.

The client's session holds a part's chunks until the step in which the part is recorded; the record refers to them from
that step on.  So gc finds them in one of the two at every moment.  The same holds for the completed object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from engine.chunks.manifests import HeldBlob
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
        def decide(txn: Transaction) -> m.UploadStat:
            now_ns = self._store.clock.wall_ns()
            ref = UploadRef(find_bucket(txn, request.bucket), request.key, new_upload_id(now_ns))
            created = create_upload(txn, ref, request.attributes, request.details, now_ns)
            self._store.features.need(ReadOnlyFeature.UPLOADS)
            return created

        return Reply(await self._store.features.deciding(lambda: self._decisions.change(client, decide)))

    @handles(m.UploadPut)
    async def put(self, client: Client, request: m.UploadPut) -> Reply:
        session = self._references.join_session(client, SessionId(request.session))
        held = await self._blobs.hold(session, request.blob)
        stat = await self.put_held(client, request, held, lambda: self._check_open(session))
        if request.end_session:
            self._references.end_session(session.identifier)
        return Reply(stat)

    async def put_held(
        self, client: Client, request: m.UploadPut, held: HeldBlob, check: Callable[[], None]
    ) -> m.PartStat:
        """Bind the part to a blob that is held; `check` raises in the step of the decision if it is not any more."""

        def decide(txn: Transaction) -> m.PartStat:
            check()
            now_ns = self._store.clock.wall_ns()
            return put_part(txn, _ref(txn, request), request.number, held, request.etag, request.checksums, now_ns)

        return await self._decisions.change(client, decide)

    @handles(m.UploadList)
    async def list_(self, request: m.UploadList) -> Reply:
        def look(view: View) -> m.Uploads:
            return list_uploads(view, find_bucket(view, request.bucket), request)

        return Reply(await self._decisions.look(look))

    @handles(m.UploadParts)
    async def parts(self, request: m.UploadParts) -> Reply:
        if not request.layouts:
            return Reply(await self._page(request))
        return Reply(await with_layouts(lambda: self._page(request), self._blobs.layout))

    async def _page(self, request: m.UploadParts) -> m.Parts:
        """Return a page without layouts."""
        limit = _page_limit(request)

        def look(view: View) -> tuple[UploadRef, UploadRecord, list[tuple[int, PartRecord]]]:
            ref = _ref(view, request)
            return ref, require_upload(view, ref)[1], parts_of(view, ref.upload, request.after, limit + 1)

        ref, record, found = await self._decisions.look(look)
        parts = [to_part_stat(number, part) for number, part in found[:limit]]
        return m.Parts(to_upload_stat(ref, record), parts, parts[-1].number if len(parts) < len(found) else 0)

    @handles(m.UploadComplete)
    async def complete(self, client: Client, request: m.UploadComplete) -> Reply:
        over = await self.over(request)
        if over is not None:
            return over
        session = self._references.join_session(client, SessionId(request.session))
        try:
            held = await self._blobs.hold(session, request.blob)
        except ChunkNotFound:
            over = await self.over(request)  # aborted or completed since, and gc ran
            if over is None:
                raise
            return over
        reply = await self.complete_held(client, request, held, lambda: self._check_open(session))
        if request.end_session:
            self._references.end_session(session.identifier)
        return reply

    async def over(self, request: m.UploadComplete) -> Reply | None:
        """Return the answer of an upload that was completed already; None if it has not ended.  UploadNotFound."""
        if len(request.numbers) != len(request.etags) or len(request.numbers) > PART_NUMBER_MAX:
            raise InvalidArgument(
                f"{len(request.numbers)} part numbers and {len(request.etags)} ETags; they go in pairs, "
                f"at most {PART_NUMBER_MAX}"
            )
        found = await self._decisions.look(lambda view: self._over(view, _ref(view, request), _listed(request)))
        return None if found is None else one_name(request.bucket, request.key, found)

    async def complete_held(
        self, client: Client, request: m.UploadComplete, held: HeldBlob, check: Callable[[], None]
    ) -> Reply:
        """Bind the name to a blob that is held; see `put_held`."""
        listed = _listed(request)

        def decide(txn: Transaction) -> Resolved:
            check()
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

        return one_name(request.bucket, request.key, await self._decisions.change(client, decide))

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


Layout = Callable[[ChunkId, int], Awaitable[tuple[list[ChunkId], list[int]] | None]]
"""See `BlobHolder.layout`."""


async def with_layouts(look: Callable[[], Awaitable[m.Parts]], layout_of: Layout) -> m.Parts:
    """Return a page of parts with their layouts: at least one part, then at most PART_CHUNKS_MAX chunks in all.

    `look` returns the page without; it is looked at again when a part was replaced, or the upload ended, and gc ran.
    """
    for looks_left in reversed(range(_LOOKS_FOR_LAYOUT)):
        found = await look()
        try:
            page = await _with_layouts(found.parts, layout_of)
        except ChunkNotFound:
            if not looks_left:
                raise
            continue
        next_after = found.next_after if len(page) == len(found.parts) else page[-1].number
        return m.Parts(found.upload, page, next_after)
    raise AssertionError("unreachable")


async def _with_layouts(parts: Sequence[m.PartStat], layout_of: Layout) -> list[m.PartStat]:
    page: list[m.PartStat] = []
    chunk_count = 0
    for part in parts:
        chunks, lengths = await _layout(part, layout_of)
        chunk_count += len(chunks)
        if page and chunk_count > PART_CHUNKS_MAX:
            break
        page.append(msgspec.structs.replace(part, chunks=list(chunks), lengths=lengths))
    return page


async def _layout(part: m.PartStat, layout_of: Layout) -> tuple[list[ChunkId], list[int]]:
    top = ChunkId(part.blob)
    if top == EMPTY_CHUNK:
        return [], []
    if kind_of(top) is ChunkKind.DATA:
        return [top], [part.size_bytes]
    layout = await layout_of(top, PART_CHUNKS_MAX)
    assert layout is not None, "a part's chunks were counted when it was recorded"
    return layout


def _listed(request: m.UploadComplete) -> list[tuple[int, bytes]]:
    """Return number and ETag of each part that is listed."""
    return list(zip(request.numbers, request.etags, strict=True))


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
