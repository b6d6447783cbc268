"""Requests that read at a head: objects opened, chunks located and streamed.

A head has no segments, so its grants name a cell of its DRAM tier, for clients on its machine, or no place
(`MEDIUM_STREAMED`): clients ask for the bytes with ReadChunks.  Payloads under 64 KiB are in the answer to OpenObjects
itself.  Bytes come from the tier (`engine.head.head_tier`), or over the members.

Rules kept here:
- Names take leases; those that the client never receives are ended here.
- A payload that cannot be read now is left out of the answer: its reader asks for it, and gets the error.  What is
  damaged is the failure of its object.
- Payload of answers is bounded, for each client and in all, until it is sent (`AnswerMemory`); until then cells of
  the tier that have it are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from engine.chunks.manifests import CachedManifests, checked_chunks
from engine.head.head_chunks import KnownLengths
from engine.head.head_clients import HeadClient
from engine.head.head_stamp_requests import may_ask_for_stamps
from engine.head.head_stamps import HeadStamps
from engine.head.head_tier import HeadTier
from engine.head.names_link import end_leases
from engine.members.ports import Got, Wanted
from engine.requests.answer_memory import AnswerMemory
from engine.requests.answers import failure_of
from engine.requests.chunk_ranges import LENT_FROM_BYTES
from engine.requests.handlers import handles
from engine.requests.open import LAYOUT_MAX, LAYOUTS_MAX, damaged, granted_range
from engine.requests.opening import check_count
from engine.tiers.shared_index import NO_GRANT
from lakefs.content.verify import granules_around
from lakefs.errors import (
    ChunkNotFound,
    CorruptionError,
    InvalidArgument,
    LakeError,
    OperationalError,
    RequestTooLarge,
    UnsupportedVersion,
)
from lakefs.ids import ChunkId, ChunkKind, kind_of
from lakefs.limits import BODY_BYTES_MAX, CHUNK_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from lakefs.wire.given_leases import opened_leases
from lakefs.wire.media import BY_REQUEST, MEDIUM_INLINE, MEDIUM_STREAMED


def streamed_grant(length: int) -> m.Grant:
    """Return the grant for a chunk that is asked for with ReadChunks."""
    return m.Grant(MEDIUM_STREAMED, 0, 0, length, length)


class HeadOpens:
    """Handler of OpenObjects."""

    def __init__(
        self,
        tier: HeadTier,
        manifests: CachedManifests,
        lengths: KnownLengths,
        memory: AnswerMemory,
        stamps: HeadStamps | None = None,
    ) -> None:
        self._stamps = stamps
        self._tier = tier
        self._manifests = manifests
        self._lengths = lengths
        self._memory = memory

    @handles(m.OpenObjects)
    async def open_objects(self, client: HeadClient, request: m.OpenObjects) -> Reply:
        check_count(request)
        stamps = request.stamps and await may_ask_for_stamps(self._stamps, client)
        asked = msgspec.structs.replace(request, media=0, stamps=stamps)
        answer = await client.names.ask(asked, m.OpenResults)
        leases = set(opened_leases(answer.results))
        try:
            results = await self._with_layouts(answer.results, min(request.layout_max, LAYOUT_MAX))
            results = [_granted(result, request) for result in results]
            results, body = await self._with_payloads(client, results, min(request.inline_bytes, BODY_BYTES_MAX))
            self._grant_cells(client, request.media, results)
            leases.difference_update(opened_leases(results))
        finally:
            if leases:
                await end_leases(client.names.call, leases)  # the client never receives their ids
        return Reply(m.OpenResults(results), body)

    async def _with_layouts(self, results: Sequence[m.OpenResult], layout_max: int) -> list[m.OpenResult]:
        """Add layouts while they fit the reply; without one, the client reads the manifest like any chunk."""
        room, done = LAYOUTS_MAX, list[m.OpenResult]()
        for result in results:
            opened = result.opened
            if opened is not None and not opened.chunks and opened.stat.size_bytes:
                result = await self._with_layout(result, opened, min(layout_max, room))
                room -= len(result.opened.chunks) if result.opened is not None else 0
            done.append(result)
        return done

    async def _with_layout(self, result: m.OpenResult, opened: m.OpenedObject, layout_max: int) -> m.OpenResult:
        top = ChunkId(opened.stat.blob)
        if kind_of(top) is not ChunkKind.MANIFEST or opened.stat.chunk_count > layout_max:
            return result
        try:
            layout = await self._manifests.layout(top, layout_max)
        except (CorruptionError, ChunkNotFound) as error:
            return m.OpenResult(None, failure_of(damaged(opened.stat, error)))
        except OperationalError:
            return result
        if layout is None:
            return result
        self._lengths.note(zip(*layout, strict=True))
        return _opened(result, msgspec.structs.replace(opened, chunks=list(layout[0]), lengths=layout[1]))

    async def _with_payloads(
        self, client: HeadClient, results: list[m.OpenResult], budget: int
    ) -> tuple[list[m.OpenResult], Body]:
        """Read small payloads together while the budget lasts; their grants point into the body."""
        chosen: list[tuple[int, m.OpenedObject]] = []
        total = 0
        for index, result in enumerate(results):
            opened = result.opened
            if opened is not None and len(opened.chunks) == 1:
                self._lengths.note([(ChunkId(opened.chunks[0]), opened.lengths[0])])
                if opened.lengths[0] < SMALL_PAYLOAD_BYTES and total + opened.lengths[0] <= budget:
                    total += opened.lengths[0]
                    chosen.append((index, opened))
        if not chosen:
            return results, Body()
        with ExitStack() as releases:
            releases.callback(await room_for(self._memory, client, total))
            wanted = [Wanted(ChunkId(opened.chunks[0]), opened.lengths[0]) for _, opened in chosen]
            parts: list[memoryview] = []
            offset = 0
            for (index, opened), got in zip(chosen, await self._tier.read(wanted, releases), strict=True):
                if isinstance(got, CorruptionError):
                    results[index] = m.OpenResult(None, failure_of(damaged(opened.stat, got)))
                elif isinstance(got, Got) and len(got.payload) == opened.lengths[0]:
                    results[index] = _opened(
                        results[index], msgspec.structs.replace(opened, grants=[_inline(got, offset)])
                    )
                    parts.append(got.payload)
                    offset += len(got.payload)
            return results, Body(parts, releases.pop_all().close)

    def _grant_cells(self, client: HeadClient, media: int, results: Sequence[m.OpenResult]) -> None:
        """Grant cells of the tier instead of streams, where they are granted and it has them."""
        for result in results:
            opened = result.opened
            if opened is None:
                continue
            streamed = [index for index, grant in enumerate(opened.grants) if grant.medium in BY_REQUEST]
            grants = [opened.grants[index] for index in streamed]
            self._tier.grant(client, media, [opened.chunks[index] for index in streamed], grants)
            for index, grant in zip(streamed, grants, strict=True):
                opened.grants[index] = grant


class ChunkReads:
    """Handlers of Locate and ReadChunks."""

    def __init__(self, tier: HeadTier, lengths: KnownLengths, memory: AnswerMemory) -> None:
        self._tier = tier
        self._lengths = lengths
        self._memory = memory

    @handles(m.Locate)
    async def locate(self, client: HeadClient, request: m.Locate) -> Reply:
        chunks = checked_chunks(request.chunks)
        grants: list[m.Grant] = []
        for length in await self._tier.lengths_of(chunks):
            if isinstance(length, LakeError):
                if not isinstance(length, ChunkNotFound | CorruptionError):
                    raise length
                length = 0
            grants.append(streamed_grant(length) if length else NO_GRANT)
        self._tier.grant(client, request.media, chunks, grants)
        return Reply(m.Located(grants))

    @handles(m.ReadChunks)
    async def read_chunks(self, client: HeadClient, request: m.ReadChunks) -> Reply:
        if request.shards:
            raise UnsupportedVersion("a head of a lake reads whole chunks; its members read shards")
        chunks = checked_chunks(request.chunks)
        if not len(chunks) == len(request.offsets) == len(request.lengths):
            raise InvalidArgument("chunks, offsets and lengths go together")
        ranges = zip(chunks, request.offsets, request.lengths, strict=True)
        planned = [self._planned(*each) for each in ranges]
        total = sum(plan.room for plan in planned if isinstance(plan, _Plan))
        pieces: list[m.ReadPiece] = []
        parts: list[memoryview] = []
        with ExitStack() as releases:
            releases.callback(await room_for(self._memory, client, min(total, BODY_BYTES_MAX)))
            for read in await self._read(planned, releases):
                if isinstance(read, LakeError):
                    pieces.append(m.ReadPiece(0, 0, b"", failure_of(read)))
                else:
                    pieces.append(m.ReadPiece(read.offset, len(read.payload), read.crcs))
                    parts.append(read.payload)
            return Reply(m.ReadChunksReply(pieces), Body(parts, releases.pop_all().close))

    def _planned(self, chunk: ChunkId, offset: int, length: int) -> _Plan | LakeError:
        """Return what to read for a range, and the most bytes that this may be."""
        chunk_bytes = self._tier.length_of(chunk)
        limit = chunk_bytes or CHUNK_BYTES
        end = offset + length if length else limit
        if not 0 <= offset < end <= limit:
            return InvalidArgument(f"range {offset}+{length} is outside a chunk of {limit} bytes")
        begin, stop = granules_around(offset, end - offset, limit)
        return _Plan(Wanted(chunk, chunk_bytes, offset, length), stop - begin)

    async def _read(self, planned: Sequence[_Plan | LakeError], releases: ExitStack) -> list[Got | LakeError]:
        """Read each range; those that do not fit the body any more are RequestTooLarge."""
        done: list[Got | LakeError | None] = [plan if isinstance(plan, LakeError) else None for plan in planned]
        left = [index for index, plan in enumerate(planned) if isinstance(plan, _Plan)]
        room = BODY_BYTES_MAX
        while left:
            batch = _batch(planned, left, room)
            left = left[len(batch) :]
            wanted = [plan.wanted for index in batch if isinstance(plan := planned[index], _Plan)]
            for index, got in zip(batch, await self._tier.read(wanted, releases), strict=True):
                if isinstance(got, Got):
                    self._lengths.note([(wanted[batch.index(index)].chunk, got.chunk_bytes)])
                    if len(got.payload) > room:
                        got = _too_large()
                    else:
                        room -= len(got.payload)
                done[index] = got
            if not room or (left and not _batch(planned, left, room)):
                break
        return [_too_large() if answer is None else answer for answer in done]


class _Plan(NamedTuple):
    """A range to read, and the most bytes that its answer may have."""

    wanted: Wanted
    room: int


def _batch(planned: Sequence[_Plan | LakeError], left: Sequence[int], room: int) -> list[int]:
    """Return the first of these ranges that surely fit, or the first alone if its length is not known."""
    batch: list[int] = []
    for index in left:
        plan = planned[index]
        assert isinstance(plan, _Plan), "only ranges are left"
        if plan.room > room:
            return batch or ([] if plan.wanted.chunk_bytes else [index])
        room -= plan.room
        batch.append(index)
    return batch


async def room_for(memory: AnswerMemory, client: HeadClient, size_bytes: int) -> Callable[[], None]:
    """Wait until an answer of so many bytes may be read for a client; returns what ends that, to be called once."""
    if size_bytes < LENT_FROM_BYTES:
        return _no_room
    return await memory.room(client, size_bytes)


def _no_room() -> None:
    return None


def _too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the ranges of one request add up to more than {BODY_BYTES_MAX} bytes")


def _granted(result: m.OpenResult, request: m.OpenObjects) -> m.OpenResult:
    """Grant all chunks of an object, or those in the range that the request names."""
    opened = result.opened
    if opened is None:
        return result
    first, behind = granted_range(opened.lengths, request)
    grants = [
        streamed_grant(length) if first <= index < behind else NO_GRANT for index, length in enumerate(opened.lengths)
    ]
    return _opened(result, msgspec.structs.replace(opened, grants=grants))


def _opened(result: m.OpenResult, opened: m.OpenedObject) -> m.OpenResult:
    """Return the result with more of what was opened; its stamps stay."""
    return m.OpenResult(opened, None, result.stamps)


def _inline(got: Got, offset: int) -> m.Grant:
    crc = int.from_bytes(got.crcs[:4], "little")
    return m.Grant(MEDIUM_INLINE, 0, offset, len(got.payload), len(got.payload), 0, crc, 0)
