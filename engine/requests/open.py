"""Requests that read: open and locate; `engine.requests.read_chunks` streams ranges.

The engine replies with places; clients that hold descriptors read and check the bytes themselves.  Payloads under
64 KiB are in the reply itself (inline), checked by CRC32C here and by digest in the client; clients without descriptors
get ranges streamed.

Rules kept here:
- An opened object's lease is taken in the same synchronous step in which its name was read.
- Stamps are taken in that step too, only if they are wanted.  A result that rests on more than records of names has
  none: damaged bytes, no room for a lease.
- No view is held across an `await`: names first, layouts next, places last.  A chunk freed in between has a grant of
  MEDIUM_NONE; its reader locates it again or finds that it was removed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import msgspec

from engine.chunks.chunk_store import find_chunk
from engine.chunks.manifests import checked_chunks
from engine.format.extents import Place
from engine.format.layouts import ChunkRecord, NodeKind
from engine.namespace.buckets import BucketRef, find_bucket
from engine.namespace.names import require
from engine.namespace.object_stat import to_object_stat
from engine.namespace.refusals import is_a_marker
from engine.namespace.versions import version_id
from engine.requests.answers import PackedLocated, failure_of, grant_of, inline_grant, versions_of
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.recorded_view import Record, RecordedView
from engine.tables.views import View
from engine.tiers.shared_index import NO_GRANT, SharedIndex
from engine.upkeep.index_upkeep import with_what_happens
from lakefs.errors import (
    ChunkDamaged,
    ChunkNotFound,
    CorruptionError,
    DiskFailed,
    IndexDamaged,
    InvalidArgument,
    IsAFolder,
    LakeError,
    RequestTooLarge,
    StaleGrant,
    UserError,
)
from lakefs.ids import EMPTY_CHUNK, ChunkId, ChunkKind, SegmentId, kind_of
from lakefs.limits import (
    BATCH_MAX,
    BODY_BYTES_MAX,
    DRAM_PAYLOAD_BYTES_MIN,
    LEASES_PER_CONNECTION_MAX,
    SMALL_PAYLOAD_BYTES,
)
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from lakefs.wire.media import IN_FILES, MEDIA_DRAM, MEDIA_FABRIC

LAYOUT_MAX = 4096
"""Most chunks of one object's layout in a reply."""
LAYOUTS_MAX = 32_768
"""Most chunks of all layouts of one reply: at most 85 bytes each, 2.7 MiB of a control part's 4 MiB."""


@dataclass(slots=True)
class _Opening:
    """One object being opened."""

    stat: m.ObjectStat
    lease: int = 0
    chunks: list[ChunkId] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    grants: list[m.Grant] = field(default_factory=list)
    small: ChunkRecord | None = None
    worth_it: bool = False
    """True if its small chunk should be copied into the DRAM tier."""

    def add_only_chunk(self) -> bool:
        """Note the chunk of a blob without manifest; True if its payload is empty or may be sent inline."""
        chunk = ChunkId(self.stat.blob)
        if chunk == EMPTY_CHUNK:
            return True
        if kind_of(chunk) is ChunkKind.MANIFEST:
            return False
        self.chunks, self.lengths = [chunk], [self.stat.size_bytes]
        return self.stat.size_bytes < SMALL_PAYLOAD_BYTES

    @property
    def needs_layout(self) -> bool:
        """True if its chunks are in a manifest that was not read yet."""
        return not self.chunks and self.stat.size_bytes > 0


class Reads:
    """Handlers of the reading requests."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metadata = store.metadata
        self._segments = store.segments
        self._dram = store.dram

    # --- opening -----------------------------------------------------------------------------------

    @handles(m.OpenObjects)
    async def open_objects(self, client: Client, request: m.OpenObjects) -> Reply:
        if len(request.names) > BATCH_MAX:
            raise RequestTooLarge(f"{len(request.names)} names in one request; the limit is {BATCH_MAX}")
        stamps: list[bytes] = []
        with self._metadata.recorded_view() if request.stamps else self._metadata.view() as view:
            opening = self._open_all(view, client, request, stamps)
            is_complete = not any(isinstance(item, _Opening) and item.needs_layout for item in opening)
            if is_complete:
                self._grant_all(view, client, opening, request)
            sequence = view.sequence
        tried = is_complete and len(opening) == 1 and sequence <= self._metadata.durable_sequence
        if tried:
            reply = self._small_at_once(opening[0], request, stamps)
            if reply is not None:
                return reply
        leases = {item.lease for item in opening if isinstance(item, _Opening) and item.lease}
        try:
            if not is_complete:
                await self._add_layouts(opening, min(request.layout_max, LAYOUT_MAX))
                with self._metadata.view() as view:
                    self._grant_all(view, client, opening, request)
                    sequence = max(sequence, view.sequence)
            parts = await self._inline(opening, min(request.inline_bytes, BODY_BYTES_MAX), tried=tried)
            if request.durable:
                await self._metadata.wait_durable(sequence)
            elif self._segments.small.unwritten:
                await self._segments.small.wait_written(_places(opening))
            leases -= {item.lease for item in opening if isinstance(item, _Opening)}
        finally:
            if leases:
                self._store.references.end_leases(client, leases)  # the client never receives their ids
        sets = stamps or [b""] * len(opening)
        return Reply(m.OpenResults([_open_result(*each) for each in zip(opening, sets, strict=True)]), Body(parts))

    def _small_at_once(self, item: _Opening | LakeError, request: m.OpenObjects, stamps: Seq[bytes]) -> Reply | None:
        """Return the reply about one small object whose payload is in memory, the commonest case; else None."""
        if isinstance(item, LakeError) or item.small is None or item.lengths[0] > request.inline_bytes:
            return None
        payload = self._dram.small_at_once(item.chunks[0], item.small)
        if payload is None:
            payload = self._segments.batches.read_at_once(item.small)
            if payload is None:
                return None
            if item.worth_it:
                self._dram.offer(item.chunks[0], item.small, payload)
        item.grants = [inline_grant(item.small, 0, len(payload))]
        return Reply(m.OpenResults([_open_result(item, stamps[0] if stamps else b"")]), Body([payload]))

    @handles(m.CloseLeases)
    async def close_leases(self, client: Client, request: m.CloseLeases) -> Reply:
        if len(request.leases) > LEASES_PER_CONNECTION_MAX:
            raise RequestTooLarge(f"{len(request.leases)} leases; a connection has {LEASES_PER_CONNECTION_MAX}")
        self._store.references.end_leases(client, request.leases)
        return Reply(m.Done())

    def _open_all(
        self, view: View, client: Client, request: m.OpenObjects, stamps: list[bytes]
    ) -> list[_Opening | LakeError]:
        """Open each object; a recorded view also adds a set of stamps for each to `stamps`."""
        wanted = zip(request.names, versions_of(request), strict=True)
        if not request.stamps or not isinstance(view, RecordedView):
            buckets: dict[str, BucketRef] = {}
            return [self._open(view, buckets, client, *name, version, request) for name, version in wanted]
        opening: list[_Opening | LakeError] = []
        found: dict[str, tuple[BucketRef, list[Record]]] = {}
        for name, version in wanted:
            buckets = {}
            if name[0] in found:
                buckets[name[0]], records = found[name[0]]
                view.note(records)  # each name rests on its bucket too
            opening.append(self._open(view, buckets, client, *name, version, request, found))
            stamps.append(view.take_stamps())
        return opening

    def _open(
        self,
        view: View,
        buckets: dict[str, BucketRef],
        client: Client,
        bucket: str,
        key: str,
        version: str,
        request: m.OpenObjects,
        rests: dict[str, tuple[BucketRef, list[Record]]] | None = None,
    ) -> _Opening | LakeError:
        """Open one object.  `buckets` caches the buckets found in this view so far.

        `rests`: gets each bucket with the records that it was read from, if they are wanted.
        """
        try:
            ref = buckets.get(bucket)
            if ref is None:
                ref = buckets[bucket] = find_bucket(view, bucket)
                if rests is not None and isinstance(view, RecordedView):
                    rests[bucket] = ref, view.noted()
            found = require(view, ref, key, version)
            if found.node.is_marker:
                raise is_a_marker(ref, key, version)
            if found.kind is NodeKind.FOLDER and (found.node.blob is None or not key.endswith("/")):
                raise IsAFolder(
                    f"{bucket}/{key} is a folder; use -r, or name an object in it", subject=f"{bucket}/{key}"
                )
            if found.kind is NodeKind.SYMLINK:
                raise InvalidArgument(
                    f"{bucket}/{key} is a symlink and has no content; name what it points to", subject=f"{bucket}/{key}"
                )
            if found.node.blob is None:
                raise InvalidArgument(f"{bucket}/{key} has no content to read", subject=f"{bucket}/{key}")
            stat = to_object_stat(bucket, key, found.node_id, found.node, version_id(ref, found.node))
            opening = _Opening(stat)
            is_inline = opening.add_only_chunk()
            if _wants_lease(request, stat, is_inline=is_inline):
                opening.lease = self._store.references.lease(client, found.node.blob)
        except IndexDamaged as error:
            return with_what_happens(self._store, error)
        except LakeError as error:
            return error
        return opening

    async def _add_layouts(self, opening: list[_Opening | LakeError], layout_max: int) -> None:
        """Add layouts while they fit the reply; without one, the client reads the manifest like any chunk."""
        room = LAYOUTS_MAX
        for index, item in enumerate(opening):
            if isinstance(item, _Opening):
                opened = opening[index] = await self._with_layout(item, min(layout_max, room))
                room -= len(opened.chunks) if isinstance(opened, _Opening) else 0

    async def _with_layout(self, item: _Opening, layout_max: int) -> _Opening | LakeError:
        chunk = ChunkId(item.stat.blob)
        if kind_of(chunk) is not ChunkKind.MANIFEST or item.stat.chunk_count > layout_max:
            return item
        try:
            layout = await self._store.manifests.layout(chunk, layout_max)
        except (CorruptionError, DiskFailed, ChunkNotFound) as error:
            return _damaged(item, error)
        if layout is not None:
            item.chunks, item.lengths = layout
        return item

    async def _inline(self, opening: list[_Opening | LakeError], budget: int, *, tried: bool) -> list[bytes]:
        """Read small payloads together while the budget lasts; their grants point into the body.

        `tried`: `_small_at_once` did not find the payload in memory.
        """
        chosen: list[tuple[int, _Opening, ChunkRecord]] = []
        for index, item in enumerate(opening):
            if isinstance(item, _Opening) and item.small is not None and item.small.logical_bytes <= budget:
                budget -= item.small.logical_bytes
                chosen.append((index, item, item.small))
            elif isinstance(item, _Opening) and item.worth_it:
                self._dram.want(item.chunks[0])
        if not chosen:
            return []
        payloads = await self._small_payloads([(item.chunks[0], record) for _, item, record in chosen], tried=tried)
        parts: list[bytes] = []
        offset = 0
        for (index, item, record), payload in zip(chosen, payloads, strict=True):
            if isinstance(payload, LakeError):
                error = await self._store.chunks.judged(item.chunks[0], record, payload)
                if not isinstance(error, StaleGrant):
                    opening[index] = _damaged(item, error)
                continue
            if item.worth_it:
                self._dram.offer(item.chunks[0], record, payload)
            item.grants = [inline_grant(record, offset, len(payload))]
            parts.append(payload)
            offset += len(payload)
        return parts

    async def _small_payloads(
        self, wanted: Seq[tuple[ChunkId, ChunkRecord]], *, tried: bool
    ) -> list[bytes | LakeError]:
        """Return checked payloads: from the arena where it has them, the others read together from the segments.

        `tried`: `_small_at_once` has just found that neither has the payload in memory.
        """
        found: list[bytes | LakeError | None] = [None if tried else self._dram.small_at_once(*each) for each in wanted]
        missing = [index for index, payload in enumerate(found) if payload is None]
        if missing:
            records = [wanted[index][1] for index in missing]
            read = await self._segments.batches.read_small(records, tried=tried)
            for index, payload in zip(missing, read, strict=True):
                found[index] = payload
        return [payload for payload in found if payload is not None]

    # --- places ------------------------------------------------------------------------------------

    @handles(m.Locate)
    async def locate(self, client: Client, request: m.Locate) -> Reply:
        shared = self._store.shared_index
        understood = _reads_slabs(client, request.media)
        by_fabric = _reads_by_fabric(self._store, client, request.media)
        if shared is not None and not by_fabric:
            reply = self._located_at_once(shared, request.chunks, understood=understood)
            if reply is not None:
                return reply
        chunks = checked_chunks(request.chunks)
        if shared is not None:
            grants, unknown = shared.grants(chunks)
        else:
            grants, unknown = [NO_GRANT] * len(chunks), list(range(len(chunks)))
        if unknown:
            with self._metadata.view() as view:
                for index in unknown:
                    grants[index] = grant_of(find_chunk(view, chunks[index]))
                sequence = view.sequence
            await self._metadata.wait_durable(sequence)
        for chunk in self._dram.note_reads(chunks, grants, understood=understood):
            self._dram.want(chunk)
        if by_fabric:
            self._dram.grant_remotely(chunks, grants)
        return Reply(m.Located(grants))

    def _located_at_once(self, shared: SharedIndex, identifiers: list[bytes], *, understood: bool) -> Reply | None:
        """Return the answer if shared index and arena know every place and no payload is too short for the arena."""
        if len(identifiers) > BATCH_MAX:
            return None
        grants = shared.packed_grants(identifiers, DRAM_PAYLOAD_BYTES_MIN, understood=understood)
        if grants is None:
            return None
        note = partial(self._dram.note_located, identifiers, shared.table.find, understood=understood)
        return Reply(PackedLocated(msgspec.Raw(grants)), then=note)

    def _grant_all(
        self, view: View, client: Client, opening: Seq[_Opening | LakeError], request: m.OpenObjects
    ) -> None:
        """Grant all chunks of each object, or those in the range that the request names."""
        for item in opening:
            if not isinstance(item, _Opening):
                continue
            first, behind = 0, len(item.chunks)
            if request.grants_bytes > 0 and behind > 1:
                ends = list(accumulate(item.lengths))
                first = bisect_right(ends, request.grants_from)
                behind = bisect_left(ends, request.grants_from + request.grants_bytes) + 1
            wanted = item.chunks[first:behind]
            records = [find_chunk(view, chunk) for chunk in wanted]
            is_small = len(item.chunks) == 1 and item.lengths[0] < SMALL_PAYLOAD_BYTES
            if is_small:
                item.small = records[0]
            grants = [grant_of(record) for record in records]
            # A small payload is most likely sent inline.
            understood = not is_small and _reads_slabs(client, request.media)
            worth_it = self._dram.note_reads(wanted, grants, understood=understood)
            item.worth_it = is_small and bool(worth_it)
            if not is_small and _reads_by_fabric(self._store, client, request.media):
                self._dram.grant_remotely(wanted, grants)
            for chunk in () if is_small else worth_it:
                self._dram.want(chunk)
            item.grants = [NO_GRANT] * len(item.chunks)
            item.grants[first:behind] = grants


def _wants_lease(request: m.OpenObjects, stat: m.ObjectStat, *, is_inline: bool) -> bool:
    """Return True if the reader of an object needs its content kept, judged before the payload is read."""
    if not request.lease or stat.size_bytes < request.lease_from:
        return False
    return request.lease_inline or not is_inline


def _reads_slabs(client: Client, media: int) -> bool:
    """Return True if the client understands grants of the arena, and may have its slabs."""
    return bool(media & MEDIA_DRAM) and client.descriptors and client.trusted


def _reads_by_fabric(store: Store, client: Client, media: int) -> bool:
    """Return True if the client understands grants of registered memory, and has a queue pair to READ it."""
    return bool(media & MEDIA_FABRIC) and store.fabric.link_of(client) is not None


def _places(opening: Seq[_Opening | LakeError]) -> list[Place]:
    """Return the places in segments that clients will read themselves."""
    return [
        Place(SegmentId(grant.segment), grant.offset)
        for item in opening
        if isinstance(item, _Opening)
        for grant in item.grants
        if grant.medium in IN_FILES
    ]


def _damaged(item: _Opening, error: LakeError) -> ChunkDamaged:
    name = f"{item.stat.bucket}/{item.stat.key}"
    return ChunkDamaged(
        f"{name} is damaged on disk and was not read: {error.message}; other objects are served; "
        f"put it again with: lake put FILE {name}; see what else is damaged with: lake fsck --full",
        subject=name,
    )


def _open_result(item: _Opening | LakeError, stamps: bytes) -> m.OpenResult:
    if isinstance(item, LakeError):
        # Other failures rest on more than the records of names.
        return m.OpenResult(None, failure_of(item), stamps if isinstance(item, UserError) else b"")
    opened = m.OpenedObject(item.stat, item.lease, list(item.chunks), item.lengths, item.grants)
    return m.OpenResult(opened, None, stamps)
