"""Opens objects for reading; `engine.requests.locate` finds chunks, `engine.requests.read_chunks` streams ranges.

The engine replies with places; clients that hold descriptors read and check the bytes themselves.  Payloads under
64 KiB are in the reply itself (inline), checked by CRC32C here and by digest in the client; clients without descriptors
get ranges streamed.

Rules kept here:
- No view is held across an `await`: names first, layouts next, places last.  A chunk freed in between has a grant of
  MEDIUM_NONE; its reader locates it again or finds that it was removed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from itertools import accumulate

from engine.chunks.chunk_store import find_chunk
from engine.format.extents import Place
from engine.format.layouts import ChunkRecord
from engine.requests.answers import grant_of, inline_grant
from engine.requests.handlers import handles
from engine.requests.locate import reads_by_fabric, reads_slabs
from engine.requests.opening import Opening, Openings, check_count, open_result, open_results
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.views import View
from engine.tiers.shared_index import NO_GRANT
from lakefs.errors import ChunkDamaged, ChunkNotFound, CorruptionError, DiskFailed, LakeError, StaleGrant
from lakefs.ids import ChunkId, ChunkKind, SegmentId, kind_of
from lakefs.limits import BODY_BYTES_MAX, SMALL_PAYLOAD_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from lakefs.wire.media import IN_FILES

LAYOUT_MAX = 4096
"""Most chunks of one object's layout in a reply."""
LAYOUTS_MAX = 32_768
"""Most chunks of all layouts of one reply: at most 85 bytes each, 2.7 MiB of a control part's 4 MiB."""


class Reads:
    """Handlers of the reading requests."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metadata = store.metadata
        self._segments = store.segments
        self._dram = store.dram
        self._openings = Openings(store)

    # --- opening -----------------------------------------------------------------------------------

    @handles(m.OpenObjects)
    async def open_objects(self, client: Client, request: m.OpenObjects) -> Reply:
        check_count(request)
        stamps: list[bytes] = []
        with self._metadata.recorded_view() if request.stamps else self._metadata.view() as view:
            opening = self._openings.open_all(view, client, request, stamps)
            is_complete = not any(isinstance(item, Opening) and item.needs_layout for item in opening)
            if is_complete:
                self._grant_all(view, client, opening, request)
            sequence = view.sequence
        tried = is_complete and len(opening) == 1 and sequence <= self._metadata.durable_sequence
        if tried:
            reply = self._small_at_once(opening[0], request, stamps)
            if reply is not None:
                return reply
        leases = {item.lease for item in opening if isinstance(item, Opening) and item.lease}
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
            leases -= {item.lease for item in opening if isinstance(item, Opening)}
        finally:
            if leases:
                self._store.references.end_leases(client, leases)  # the client never receives their ids
        return Reply(m.OpenResults(open_results(opening, stamps)), Body(parts))

    def _small_at_once(self, item: Opening | LakeError, request: m.OpenObjects, stamps: Seq[bytes]) -> Reply | None:
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
        return Reply(m.OpenResults([open_result(item, stamps[0] if stamps else b"")]), Body([payload]))

    async def _add_layouts(self, opening: list[Opening | LakeError], layout_max: int) -> None:
        """Add layouts while they fit the reply; without one, the client reads the manifest like any chunk."""
        room = LAYOUTS_MAX
        for index, item in enumerate(opening):
            if isinstance(item, Opening):
                opened = opening[index] = await self._with_layout(item, min(layout_max, room))
                room -= len(opened.chunks) if isinstance(opened, Opening) else 0

    async def _with_layout(self, item: Opening, layout_max: int) -> Opening | LakeError:
        chunk = ChunkId(item.stat.blob)
        if kind_of(chunk) is not ChunkKind.MANIFEST or item.stat.chunk_count > layout_max:
            return item
        try:
            layout = await self._store.manifests.layout(chunk, layout_max)
        except (CorruptionError, DiskFailed, ChunkNotFound) as error:
            return damaged(item.stat, error)
        if layout is not None:
            item.chunks, item.lengths = layout
        return item

    async def _inline(self, opening: list[Opening | LakeError], budget: int, *, tried: bool) -> list[bytes]:
        """Read small payloads together while the budget lasts; their grants point into the body.

        `tried`: `_small_at_once` did not find the payload in memory.
        """
        chosen: list[tuple[int, Opening, ChunkRecord]] = []
        for index, item in enumerate(opening):
            if isinstance(item, Opening) and item.small is not None and item.small.logical_bytes <= budget:
                budget -= item.small.logical_bytes
                chosen.append((index, item, item.small))
            elif isinstance(item, Opening) and item.worth_it:
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
                    opening[index] = damaged(item.stat, error)
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

    def _grant_all(self, view: View, client: Client, opening: Seq[Opening | LakeError], request: m.OpenObjects) -> None:
        """Grant all chunks of each object, or those in the range that the request names."""
        for item in opening:
            if not isinstance(item, Opening):
                continue
            first, behind = granted_range(item.lengths, request)
            wanted = item.chunks[first:behind]
            records = [find_chunk(view, chunk) for chunk in wanted]
            is_small = len(item.chunks) == 1 and item.lengths[0] < SMALL_PAYLOAD_BYTES
            if is_small:
                item.small = records[0]
            grants = [grant_of(record) for record in records]
            # A small payload is most likely sent inline.
            understood = not is_small and reads_slabs(client, request.media)
            worth_it = self._dram.note_reads(wanted, grants, understood=understood)
            item.worth_it = is_small and bool(worth_it)
            if not is_small and reads_by_fabric(self._store.fabric, client, request.media):
                self._dram.grant_remotely(wanted, grants)
            for chunk in () if is_small else worth_it:
                self._dram.want(chunk)
            item.grants = [NO_GRANT] * len(item.chunks)
            item.grants[first:behind] = grants


def granted_range(lengths: Seq[int], request: m.OpenObjects) -> tuple[int, int]:
    """Return the index of the first chunk that the request wants grants of, and that behind the last one."""
    if request.grants_bytes <= 0 or len(lengths) < 2:
        return 0, len(lengths)
    ends = list(accumulate(lengths))
    return bisect_right(ends, request.grants_from), bisect_left(ends, request.grants_from + request.grants_bytes) + 1


def damaged(stat: m.ObjectStat, error: LakeError) -> ChunkDamaged:
    """Return the error for an object whose content cannot be read because it is damaged."""
    name = f"{stat.bucket}/{stat.key}"
    return ChunkDamaged(
        f"{name} is damaged on disk and was not read: {error.message}; other objects are served; "
        f"put it again with: lake put FILE {name}; see what else is damaged with: lake fsck --full",
        subject=name,
    )


def _places(opening: Seq[Opening | LakeError]) -> list[Place]:
    """Return the places in segments that clients will read themselves."""
    return [
        Place(SegmentId(grant.segment), grant.offset)
        for item in opening
        if isinstance(item, Opening)
        for grant in item.grants
        if grant.medium in IN_FILES
    ]
