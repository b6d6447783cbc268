"""Reads ranges of chunks by their lengths: the members are asked, late answers are not waited for.

Rules kept here:
- All that one member is asked at a time is one request, split where it is over the limits of a frame.  Requests are
  sent without a task for each (`GatheredReads`); only where a member has to be connected first, tasks wait for that.
- Answers are received where the chunk is put together.  While one that is late may still arrive, other memory is used.
- An answer is late after the member's p95 (`AnswerTimes`): then others are asked, and the first that suffices ends the
  read.  Requests that are not needed any more are cancelled.
- A shard whose member says another length of the chunk is damaged: others are asked.
- `engine.stripes.chunk_assembly` has the checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import trio

from engine.host.tasks import plain_errors
from engine.members.ports import BeginningMembers, Got, Members
from engine.members.read_memory import Take, take_anew
from engine.stripes.answer_times import AnswerTimes
from engine.stripes.chunk_assembly import Made, made, made_from_any
from engine.stripes.chunk_read import Ask, ChunkRead
from engine.stripes.gathered_reads import GatheredReads, Part, read_request, take_result
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.request_parts import request_parts
from engine.stripes.stripe_errors import damaged, not_found, not_read
from lakefs.cluster.erasure import ErasureCode
from lakefs.content.verify import crcs_between, granules_around
from lakefs.errors import CorruptionError, LakeError
from lakefs.ids import ChunkId, MemberId
from lakefs.limits import GRANULE_BYTES
from lakefs.ports import Offload
from lakefs.wire.engine_port import Reply


class FirstPart(NamedTuple):
    """A range of shard 0 that was read while the chunk's length was not known."""

    member: MemberId
    offset: int
    payload: memoryview
    crcs: bytes


class Range:
    """A range of a chunk to read, widened to granules: its pieces, or the whole chunk once one of them has failed."""

    __slots__ = ("begin", "chunk", "end", "first", "length", "made", "memory", "outcome", "reads", "take", "vector")

    def __init__(
        self,
        chunk: ChunkId,
        length: int,
        offset: int,
        size: int,
        first: FirstPart | None = None,
        take: Take = take_anew,
    ) -> None:
        self.chunk = chunk
        self.length = length
        self.begin, self.end = granules_around(offset, size or length - offset, length)
        self.first = first
        self.take = take
        self.memory = take(self.end - self.begin)
        self.reads: list[ChunkRead] = []
        self.made: dict[ChunkRead, Made] = {}
        self.vector = b""
        """CRCs of all granules of the chunk, if they are known."""
        self.outcome: Got | LakeError | None = None


class StripeReader:
    """Reads over the members."""

    def __init__(self, members: Members, code: ErasureCode, offload: Offload, known: KnownChunks) -> None:
        self._members = members
        self._code = code
        self._offload = offload
        self._known = known
        self._times = AnswerTimes()
        self._gathered = GatheredReads(members, self._times) if isinstance(members, BeginningMembers) else None

    async def read(self, ranges: Sequence[Range]) -> list[Got | LakeError]:
        """Return what was read of each range, checked, or its error: see `Stripes.read`."""
        reading = _Reading(self._members, self._code, self._offload, self._known, self._times, self._gathered)
        try:
            reading.begin_all(ranges)
            if not await reading.run(ranges):
                with plain_errors():
                    async with trio.open_nursery() as nursery:
                        await reading.run(ranges, nursery)
                        nursery.cancel_scope.cancel()
        finally:
            reading.end()
        outcomes = [item.outcome for item in ranges if item.outcome is not None]
        assert len(outcomes) == len(ranges), "each range has an outcome"
        return outcomes


class _Reading:
    """One call of `StripeReader.read`."""

    def __init__(
        self,
        members: Members,
        code: ErasureCode,
        offload: Offload,
        known: KnownChunks,
        times: AnswerTimes,
        gathered: GatheredReads | None,
    ) -> None:
        self._members: Final = members
        self._code: Final = code
        self._offload: Final = offload
        self._known: Final = known
        self._times: Final = times
        self._gathered: Final = gathered
        self._nursery: trio.Nursery | None = None
        self._news = trio.Event()
        self._waits: list[Part] = []
        """Parts that are not answered, and not late."""
        self._parts: list[Part] = []
        """Parts that were given to `GatheredReads`, and may be answered."""

    async def run(self, ranges: Sequence[Range], nursery: trio.Nursery | None = None) -> bool:
        """Give each range its outcome; return False if that needs a nursery, for requests that connect first."""
        self._nursery = nursery
        left = [item for item in ranges if item.outcome is None]
        while left:
            self._ask_more(left)
            if self._gathered is not None:
                await self._gathered.settle()
            if not self._send_refused():
                return False
            await self._finish(left)
            left = [item for item in left if item.outcome is None]
            if left and all(self._is_waiting(item) for item in left):
                await self._wait()
        return True

    def begin_all(self, ranges: Sequence[Range]) -> None:
        """Plan the reads of all ranges; `end` has to be called from now on."""
        if self._gathered is not None:
            self._gathered.readers += 1
        for item in ranges:
            self._begin(item)

    def end(self) -> None:
        """Give up what is still asked."""
        if self._gathered is not None:
            self._gathered.readers -= 1
            for part in self._parts:
                if part.is_under_way:
                    self._gathered.give_up(part)

    async def _wait(self) -> None:
        """Wait for an answer, or until one is late."""
        until = [part.late_at for part in self._waits]
        until = until or [part.expires_at for part in self._parts if part.is_under_way]
        with trio.move_on_at(min(until, default=math.inf)):
            await self._news.wait()
        self._news = trio.Event()
        self._note_late()

    # --- ranges ------------------------------------------------------------------------------------

    def _begin(self, item: Range) -> None:
        """Plan the reads of a range: one of the whole chunk, or one for each shard that it touches."""
        if (known := self._known.get(item.chunk)) is not None:
            item.vector = known.crcs
        if len(item.memory) == item.length:
            item.reads = [self._planned(item, item.memory)]
            _begin_with_first(item)
            return
        pieces = self._code.pieces(item.length, item.begin, item.end - item.begin)
        homes = self._members.tables[0].homes(item.chunk)
        if not item.vector and not all(self._members.is_up(homes[shard]) for shard, _, _ in pieces):
            self._read_whole(item)
            return
        begin = 0
        for piece in pieces:
            size = piece[2] - piece[1]
            part = item.memory[begin : begin + size]
            item.reads.append(self._planned(item, part, piece))
            begin += size
        _begin_with_first(item)

    def _planned(self, item: Range, memory: memoryview, piece: tuple[int, int, int] | None = None) -> ChunkRead:
        return ChunkRead(self._code, self._members.tables, item.chunk, item.length, memory, piece, item.take)

    def _read_whole(self, item: Range) -> None:
        """Read the whole chunk instead: a piece of the range cannot be had, or not be checked."""
        memory = item.take(item.length)
        item.reads = [self._planned(item, memory)]
        item.made.clear()

    def _is_waiting(self, item: Range) -> bool:
        """Return True if nothing can be done for the range before an answer comes, or is late."""
        return not any(read.is_ready and read not in item.made for read in item.reads) and any(
            read.pending for read in item.reads
        )

    # --- asking ------------------------------------------------------------------------------------

    def _ask_more(self, ranges: Sequence[Range]) -> None:
        """Send the requests that are due, one for each member."""
        due: dict[MemberId, list[Ask]] = {}
        for item in ranges:
            for read in item.reads:
                if read not in item.made:
                    for ask in read.next_asks(self._members.is_up):
                        due.setdefault(ask.member, []).append(ask)
        for member, asks in due.items():
            late_after_s = self._times.late_after_s(member)
            for some in request_parts(asks, lambda ask: len(ask.target)):
                part = Part(member, some, late_after_s, self._news_came)
                self._waits.append(part)
                self._parts.append(part)
                if self._gathered is None:
                    part.end(is_refused=True)
                else:
                    self._gathered.ask(part)

    def _send_refused(self) -> bool:
        """Send parts that were refused by tasks of their own; return False if there are some, and no nursery."""
        refused = [part for part in self._parts if part.is_refused]
        if refused and self._nursery is None:
            return False
        self._parts = [part for part in self._parts if part.is_under_way]
        for part in refused:
            assert self._nursery is not None, "checked above"
            self._nursery.start_soon(self._ask, part)
        return True

    async def _ask(self, part: Part) -> None:
        """Ask a member by a call, which connects first."""
        request = read_request(part.asks)
        part.begin(None)
        began = trio.current_time()
        result: Reply | LakeError
        try:
            result = await self._members.call(part.member, request, into=[ask.target for ask in part.asks])
        except LakeError as error:
            result = error
        finally:
            self._times.note(part.member, trio.current_time() - began)
        take_result(part.asks, result)
        self._waits = [wait for wait in self._waits if wait is not part]
        self._news_came()

    def _news_came(self) -> None:
        self._news.set()

    def _note_late(self) -> None:
        """Note which requests are answered, which are late, and which are not answered in time."""
        now = trio.current_time()
        for part in self._parts:
            if part.is_under_way and part.expires_at <= now and self._gathered is not None:
                self._gathered.expire(part)
        self._parts = [part for part in self._parts if part.is_under_way or part.is_refused]
        for part in self._waits:
            if part.late_at <= now:
                for ask in part.asks:
                    ask.is_late = True
        self._waits = [part for part in self._waits if part.late_at > now and not part.is_answered]

    # --- finishing ---------------------------------------------------------------------------------

    async def _finish(self, ranges: Sequence[Range]) -> None:
        """Check what is ready; give outcomes to ranges that are read, or cannot be."""
        for item in ranges:
            if not item.vector and any(
                read.is_degraded and not read.is_whole and not read.has_wanted for read in item.reads
            ):
                self._read_whole(item)
        ready = [(item, read) for item in ranges for read in item.reads if read.is_ready and read not in item.made]
        if ready:
            for _, read in ready:
                read.hold()
            if sum(len(read.memory) for _, read in ready) <= GRANULE_BYTES:
                results = _make_all(ready)
            else:
                results = await self._offload.run(_make_all, ready)
            for (item, read), result in zip(ready, results, strict=True):
                read.let_go()
                if result is None:
                    self._distrust(item, read)
                elif read in item.reads:
                    item.made[read] = result
        for item in ranges:
            if item.outcome is None:
                item.outcome = self._outcome(item)

    def _distrust(self, item: Range, read: ChunkRead) -> None:
        """Go on with a read whose bytes failed their check."""
        if not read.is_whole:
            self._read_whole(item)
        elif read.wants_all:
            item.outcome = damaged(item.chunk, "its shards are whole, and do not make it")
        else:
            read.want_all()

    def _outcome(self, item: Range) -> Got | LakeError | None:
        """Return what a range has come to; None while it is being read."""
        for read in item.reads:
            if read.is_exhausted and not read.is_ready and read not in item.made:
                return self._error(read)
        if len(item.made) < len(item.reads):
            return None
        parts = [item.made[read] for read in item.reads]
        first = parts[0]
        if item.reads[0].is_whole:
            self._known.note(item.chunk, item.length, first.crcs)
            payload = first.payload[item.begin : item.end]
            return Got(item.begin, payload, crcs_between(first.crcs, item.begin, item.end), item.length)
        if len(parts) == 1:
            return Got(item.begin, first.payload, first.crcs, item.length)
        is_in_place = all(part.payload.obj is item.memory.obj for part in parts)
        payload = item.memory if is_in_place else memoryview(b"".join([part.payload for part in parts]))
        return Got(item.begin, payload, b"".join([part.crcs for part in parts]), item.length)

    def _error(self, read: ChunkRead) -> LakeError:
        away = read.unanswered(self._members.is_up)
        damaged_count = sum(isinstance(error, CorruptionError) for error in read.errors.values())
        if not read.got and not damaged_count:
            return not_found(read.chunk, away, self._code.parity)
        return not_read(read.chunk, len(read.got), read.needed, away, damaged_count)


def _begin_with_first(item: Range) -> None:
    """Give the first read of a range what was read before, if it is what that wants of shard 0."""
    first, read = item.first, item.reads[0]
    if first is None or read.wanted[0] != 0:
        return
    if (first.offset, len(first.payload)) == (read.begin, read.part_bytes(0)):
        read.begin_with(first.member, 0, first.payload, first.crcs)


def _make_all(ready: Sequence[tuple[Range, ChunkRead]]) -> list[Made | None]:
    """Put together and check what came; None for what fails its check.  Blocks."""
    results: list[Made | None] = []
    for item, read in ready:
        if read.wants_all:
            results.append(made_from_any(read))
        elif read.is_whole:
            results.append(made(read, item.vector))
        else:
            begin = read.begin + read.wanted[0] * read.code.shard_bytes(read.length)
            results.append(made(read, crcs_between(item.vector, begin, begin + len(read.memory))))
    return results
